"""Makes times of several nodes comparable: all are given on the wall clock of the store."""

from __future__ import annotations

import time

from elasticrs._value import Value


class Clock(Value):
    """The wall clock of the store, seen from here.

    Args:
        offset_ns: the store's wall clock minus ours.
        error_ns: how far off that may be; ``None`` as long as nobody has measured it.
    """

    offset_ns: int = 0
    error_ns: int | None = 0

    def from_monotonic(self, ns: int) -> int:
        """The store's wall clock at a moment on this node's monotonic clock."""
        return time.time_ns() - time.monotonic_ns() + ns + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        """The inverse."""
        return ns - self.offset_ns - time.time_ns() + time.monotonic_ns()
