"""Functions for the launcher's terminal: keep a background job from reading it, and restore its settings if a
worker has changed them.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STDIN = 0
_LOCAL_FLAGS = 3
"""Index of the local flags, such as ECHO, in the list that ``termios.tcgetattr`` returns."""


def leave_input_to_foreground() -> None:
    """Replace standard input by ``/dev/null`` if it is a terminal and this process runs in the background.

    The kernel stops a background process that reads from the terminal, so a worker that reads its standard
    input would stop the job.
    """
    if not os.isatty(_STDIN) or _is_in_foreground():
        return
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)


def settings() -> list[Any] | None:
    """Return the settings of the terminal on standard input; ``None`` if standard input is not an open
    terminal.
    """
    if not os.isatty(_STDIN):
        return None
    import termios

    try:
        return termios.tcgetattr(_STDIN)
    except termios.error:
        return None  # The terminal was closed.


def restore(before: list[Any] | None) -> None:
    """Restore the settings of the terminal if a worker has changed them. For example, a worker that is killed
    while it reads a password leaves the echo off. Do nothing if this process runs in the background, because
    another process then uses the terminal.
    """
    if before is None or not os.isatty(_STDIN) or not _is_in_foreground():
        return
    import termios

    try:
        if termios.tcgetattr(_STDIN)[_LOCAL_FLAGS] != before[_LOCAL_FLAGS]:
            termios.tcsetattr(_STDIN, termios.TCSANOW, before)
    except termios.error:
        return  # The terminal was closed, so it has no settings.


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        # The terminal is not the controlling terminal, so the kernel does not stop processes that read it.
        return True
