"""Converts times to the wall clock of the store, so that times from different nodes can be compared."""

from __future__ import annotations

import time

from elasticrs._engine.job.value import Value


class Clock(Value):
    """Offset of the wall clock of the host of the nodes' common store from this node's clock. ``error_ns`` is
    its possible error; ``None`` if the offset was not measured.
    """

    offset_ns: int = 0
    error_ns: int | None = 0

    def from_monotonic(self, ns: int) -> int:
        return ns + _wall_minus_monotonic() + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        return ns - self.offset_ns - _wall_minus_monotonic()


def _wall_minus_monotonic() -> int:
    """Return wall clock minus monotonic clock in ns. Measure thrice, and use the fastest measurement."""
    found = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]
