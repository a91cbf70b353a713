"""Program that queries one built-in health source. The agent runs it in a child process.

Each health source is a module whose function ``main`` returns 0 if the node is fit and 1 if it is unfit. The
last line that ``main`` prints is the reason. An exception from ``main`` means that the source gave no answer,
because a check that fails to run says nothing about the node. This program exits with 0, :data:`UNFIT` or
:data:`NO_ANSWER`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

UNFIT = 10
"""Exit code if the health source found the node unfit. The code is not 1, because Python itself exits with 1
if this program cannot be imported.
"""
NO_ANSWER = 75
"""Exit code if the health source gave no answer (``EX_TEMPFAIL`` in sysexits.h)."""

MODULES = {
    "nvml": "elasticrs._engine.gpus.nvml_check",
}
"""Module of each health source, keyed by the name in
:data:`.BUILT_IN_SOURCES`.
"""


class NoAnswerError(Exception):
    """Raised if a health source cannot be reached, or if its reply cannot be interpreted."""


def say(line: str) -> None:
    """Print a line as UTF-8, regardless of the locale. Replace characters that UTF-8 cannot encode, because
    the text may come from another program.
    """
    sys.stdout.buffer.write(line.encode("utf-8", "replace") + b"\n")


def main(name: str) -> int:
    """Query the health source with this name and return the exit code."""
    from importlib import import_module

    try:
        ask: Callable[[], int] = import_module(MODULES[name]).main
        return UNFIT if ask() else 0
    except NoAnswerError as error:
        say(str(error))
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    return NO_ANSWER
