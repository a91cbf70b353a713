"""Which stop signals ask for something new, and which are echoes of the first."""

from __future__ import annotations

import signal

ECHO = 0.1
"""Seconds from the first stop signal within which any other is the same request: wrappers pass on what the
whole group was sent, and systemd, schedulers and closing terminals send several kinds at once."""

KEYBOARD = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Stop signals that a person sends from a terminal."""


class StopRequests:
    """Tells whether a stop signal asks for something that was not asked for before."""

    __slots__ = ("_came", "_first")

    def __init__(self) -> None:
        self._first: float | None = None
        self._came: set[int] = set()

    def is_new(self, signum: int, now: float) -> bool:
        """Take in a stop signal, seen at ``now`` on a clock that never goes back.

        True for the first one, and for each later than :data:`ECHO` after it with which a person asks again:
        one of :data:`KEYBOARD`, or a SIGTERM that is not the first.
        """
        first, came = self._first, signum in self._came
        self._came.add(signum)
        if first is None:
            self._first = now
            return True
        return now - first >= ECHO and (signum in KEYBOARD or (came and signum == signal.SIGTERM))
