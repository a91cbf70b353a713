"""Runs this package's modules in child processes, isolated from the user's environment."""

from __future__ import annotations

import os
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
