"""Lines of the agent on its stderr, without ever waiting for it.

A console that nobody reads (a stopped terminal, a full pipe) must not hold up a restart, and the descriptor
must not be made non-blocking, because the workers share it. So a line is written only when the descriptor
takes it at once; until then it waits here.
"""

from __future__ import annotations

import os
import select

from elasticrs.agent.texts import PREFIX

_PIPE_BUF = 4096  # what poll's POLLOUT promises for a pipe, and what is written in one piece
_KEPT = 1000


class Console:
    """A queue of lines before a descriptor.

    Args:
        fd: of the console.
    """

    __slots__ = ("_fd", "_is_gone", "_lines", "_poll")

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._lines: list[bytes] = []
        self._is_gone = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def say(self, text: str) -> None:
        """One line, with our name before it.

        Args:
            text: without a newline; longer ones are cut to what a pipe takes in one piece.
        """
        line = os.fsencode(PREFIX + " ".join(text.splitlines()))
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

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
        except OSError:
            # A closed or broken stderr takes nothing any more, and there is nowhere left to say so.
            self._is_gone = True
