"""Distinguish new stop requests from signals that repeat an earlier request."""

from __future__ import annotations

import signal

ECHO = 0.1
"""Time window after the first stop signal, in seconds. Further stop signals in this window belong to the same
request. A single request may cause several signals: wrapper programs pass on a signal that the whole process
group has already received, and systemd, schedulers and closing terminals send several kinds of signals at
once.
"""

KEYBOARD = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Stop signals that a user can send from the keyboard."""


class StopRequests:
    """Detector for stop signals that only repeat an earlier request."""

    __slots__ = ("_came", "_first")

    def __init__(self) -> None:
        self._first: float | None = None
        self._came: set[int] = set()

    def is_new(self, signum: int, now: float) -> bool:
        """Record a stop signal. Return true if it is a new request. ``now`` is the time on a monotonic clock,
        in seconds.

        The first signal is a new request. A later signal is a new request only if it arrives at least
        :data:`ECHO` seconds after the first signal, and is one of :data:`KEYBOARD` or a repeated SIGTERM.
        Such a signal shows that the user has repeated the request.
        """
        first, came = self._first, signum in self._came
        self._came.add(signum)
        if first is None:
            self._first = now
            return True
        return now - first >= ECHO and (signum in KEYBOARD or (came and signum == signal.SIGTERM))
