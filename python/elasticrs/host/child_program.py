"""Run this package's modules in child processes that can import only the package and the standard library."""

from __future__ import annotations

import os
import sys

_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return a command line that calls the ``main`` function of one of this package's modules.

    Python's options exclude everything that could change or slow down the program: environment variables such
    as ``PYTHONPATH``, modules in the working directory, and site packages.

    Args:
        module: full name of the module.
        arguments: arguments of ``main``.
    """
    import elasticrs

    root = os.path.dirname(elasticrs.__path__[0])
    return [sys.executable, "-I", "-S", "-c", _PROGRAM.format(module=module), root, *arguments]
