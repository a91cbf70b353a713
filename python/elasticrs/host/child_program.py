"""Start programs of this package in child processes, with nothing but the standard library."""

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
    """Return the command line that calls the function ``main`` of a module of this package.

    The options of Python keep out everything that could change or delay the program: variables such as
    ``PYTHONPATH``, the working directory, and site packages.
    """
    import elasticrs

    root = os.path.dirname(elasticrs.__path__[0])
    return [sys.executable, "-I", "-S", "-c", _PROGRAM.format(module=module), root, *arguments]
