"""Distinction between new stop requests and signals that repeat an earlier request."""

from __future__ import annotations

import signal

ECHO = 0.1
"""Seconds after the first stop signal in which any further stop signal belongs to the same request. Wrappers
pass on signals that the whole process group has received, and systemd, schedulers and closing terminals send
several kinds at once."""

KEYBOARD = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Stop signals that a person sends from a terminal."""


class StopRequests:
    """Decides whether a stop signal is a new request."""

    __slots__ = ("_came", "_first")

    def __init__(self) -> None:
        self._first: float | None = None
        self._came: set[int] = set()

    def is_new(self, signum: int, now: float) -> bool:
        """Record a stop signal and return true if it is a new request. ``now`` comes from a monotonic clock.

        The first signal is a new request. A later one is new if it comes at least :data:`ECHO` seconds after
        the first and shows that a person repeats the request: it is one of :data:`KEYBOARD`, or it is not the
        first SIGTERM.
        """
        first, came = self._first, signum in self._came
        self._came.add(signum)
        if first is None:
            self._first = now
            return True
        return now - first >= ECHO and (signum in KEYBOARD or (came and signum == signal.SIGTERM))
