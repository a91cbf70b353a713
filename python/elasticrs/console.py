"""Lines of the agent on its stderr, without ever waiting for it.

A console that nobody reads (a stopped terminal, a full pipe) must not hold up a restart, and the descriptor
must not be made non-blocking, because the workers share it. So a line is written only when the descriptor
takes it at once; until then it waits here.
"""

from __future__ import annotations

import os
import select
import sys

from elasticrs.texts import PREFIX, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PIPE_BUF = 4096  # what poll's POLLOUT promises for a pipe, and what is written in one piece
_KEPT = 1000


def prefix_of(is_one_of_several: bool) -> str:
    """Return the prefix of an agent's lines; of several, which may share a console, with its node and its
    pid.
    """
    return PREFIX.replace(":", f"[{os.uname().nodename}:{os.getpid()}]:") if is_one_of_several else PREFIX


class Console:
    """A queue of lines, each with a prefix, before a descriptor."""

    __slots__ = ("_fd", "_is_gone", "_lines", "_poll", "_prefix")

    def __init__(self, fd: int = 2, prefix: str = PREFIX) -> None:
        self._fd = fd
        self._prefix = prefix
        self._lines: list[bytes] = []
        self._is_gone = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def waiting(self) -> int:
        """Number of pieces that are not written yet."""
        return 0 if self._is_gone else len(self._lines)

    def say(self, text: str) -> None:
        """Queue one line, with our name in front; a longer one is cut to what a pipe takes in one piece."""
        line = _encode(visible(self._prefix + " ".join(text.splitlines())))
        if len(self._lines) < _KEPT:
            self._lines.append(line[: _PIPE_BUF - 1] + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write as many of the waiting lines as go without waiting."""
        while self._lines and not self._is_gone:
            ready = self._poll.poll(0)
            if not ready:
                return
            if not ready[0][1] & select.POLLOUT:
                self._is_gone = True
                return
            self._write(self._lines.pop(0))

    def write(
        self,
        text: str,
        patience: float,
        wake_fd: int | None = None,
        is_enough: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Write a text of any length after the waiting lines; waits for the reader, but not for ever.

        Args:
            text: as it shall appear; control characters in it are made visible.
            patience: seconds to wait for a reader that takes nothing.
            wake_fd: a descriptor whose readiness interrupts the wait.
            is_enough: called then; true gives up.

        Returns:
            False if it gave up while lines were still waiting.
        """
        data = _encode(visible(text))
        self._lines += [data[start : start + _PIPE_BUF] for start in range(0, len(data), _PIPE_BUF)]
        self.flush()
        waiting = select.poll()
        waiting.register(self._fd, select.POLLOUT)
        if wake_fd is not None:
            waiting.register(wake_fd, select.POLLIN)
        while self._lines and not self._is_gone:
            ready = [fd for fd, _ in waiting.poll(patience * 1000)]
            if not ready or (wake_fd in ready and is_enough()):
                return False
            self.flush()
        return True

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
        except OSError:
            # A closed or broken stderr takes nothing any more, and there is nowhere left to say so.
            self._is_gone = True


def _encode(text: str) -> bytes:
    """Encode with the file system's encoding, so that file names are unchanged; escape the rest."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(sys.getfilesystemencoding(), "backslashreplace")
