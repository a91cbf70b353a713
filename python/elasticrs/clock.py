"""Makes times of several nodes comparable: all are given on the wall clock of the store."""

from __future__ import annotations

import time


class Clock:
    """The wall clock of the store, seen from here.

    Args:
        offset_ns: the store's wall clock minus ours.
        error_ns: how far off that may be; ``None`` as long as nobody has measured it.
    """

    __slots__ = ("error_ns", "offset_ns")

    def __init__(self, offset_ns: int = 0, error_ns: int | None = 0) -> None:
        self.offset_ns = offset_ns
        self.error_ns = error_ns

    def from_monotonic(self, ns: int) -> int:
        """The store's wall clock at a moment on this node's monotonic clock."""
        return time.time_ns() - time.monotonic_ns() + ns + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        """The inverse."""
        return ns - self.offset_ns - time.time_ns() + time.monotonic_ns()
