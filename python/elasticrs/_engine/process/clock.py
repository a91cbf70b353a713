"""Converts times to the wall clock of the store, so that times from different nodes can be compared."""

from __future__ import annotations

import time

from elasticrs._engine.job.value import Value


class Clock(Value):
    """Difference between the wall clock of the store's host and this node's. ``error_ns`` is ``None`` if it
    has not been measured yet.
    """

    offset_ns: int = 0
    error_ns: int | None = 0

    def from_monotonic(self, ns: int) -> int:
        return ns + _wall_minus_monotonic() + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        return ns - self.offset_ns - _wall_minus_monotonic()


def _wall_minus_monotonic() -> int:
    """Return this node's wall-clock time minus its monotonic time, in nanoseconds. Read both clocks three
    times and use the fastest attempt, because the thread may be interrupted between the two.
    """
    found = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]
