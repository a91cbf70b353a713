"""Runs this package's modules in child processes, isolated from the user's environment."""

from __future__ import annotations

import os
import signal
import sys

# Put this package's folder first, because another release of the package may be installed.
_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
import elasticrs
sys.path.append(sys.path.pop(0))
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return a command line that calls the ``main`` function of a module of this package.

    The program ignores ``PYTHONPATH`` and the working directory, which could shadow the standard library.
    """
    import elasticrs

    root = os.path.dirname(elasticrs.__path__[0])
    return [sys.executable, "-I", "-S", "-c", _PROGRAM.format(module=module), root, *arguments]


def main() -> int:
    """Kill a process group as soon as the program that started this one dies, even by SIGKILL.

    The starter writes the group's number to this process's standard input, and keeps the pipe open. A starter
    that ends the group itself kills this process first, because another group may get the number afterwards.
    If a starter dies before it writes the number, the group continues to run.
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
