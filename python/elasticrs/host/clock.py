"""Conversion of times to the wall clock of the store, so that times of several nodes can be compared."""

from __future__ import annotations

import time

from elasticrs.job.value import Value


class Clock(Value):
    """The store's wall clock, as estimated on this node.

    Args:
        offset_ns: the store's wall clock minus ours.
        error_ns: maximum error of the offset; ``None`` if it was not measured yet.
    """

    offset_ns: int = 0
    error_ns: int | None = 0

    def from_monotonic(self, ns: int) -> int:
        """The store's wall clock at a moment on this node's monotonic clock."""
        return time.time_ns() - time.monotonic_ns() + ns + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        """The inverse."""
        return ns - self.offset_ns - time.time_ns() + time.monotonic_ns()
