"""Runs this package's modules in child processes, isolated from the user's environment."""

from __future__ import annotations

import os
import signal
import sys

# Put this package's folder first in the search path while the package is imported, because another release of
# the package may be installed.
_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
import elasticrs
sys.path.append(sys.path.pop(0))
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return a command line that calls the ``main`` function of ``module``, a module of this package.

    The program ignores environment variables such as ``PYTHONPATH`` and the working directory, because
    modules found there could shadow the standard library.

    Args:
        module: full name of the module.
        arguments: arguments of ``main``.
    """
    import elasticrs

    root = os.path.dirname(elasticrs.__path__[0])
    return [sys.executable, "-I", "-S", "-c", _PROGRAM.format(module=module), root, *arguments]


def main() -> int:
    """Kill a process group as soon as the program that started the group dies, even by SIGKILL. This function
    is itself such a child program. Return its exit code.

    The number of the group comes on standard input, which the starter keeps open. A starter that has ended
    the group kills this program first, because the number may belong to another group afterwards. A starter
    that dies between the start of the group and the message with its number leaves the group behind.
    """
    group = b""
    while part := os.read(0, 64):
        group += part
    try:
        if group:
            os.killpg(int(group), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return 0  # The group no longer exists, or its processes belong to another user.
    return 0
