"""The restarts that a job may use: what one node and the leader of several both decide by."""

from __future__ import annotations


def used_after(used: int, most: int) -> int | None:
    """Return how many restarts are used once one more is charged; ``None``: none is left, so the job ends."""
    return used + 1 if used < most else None
