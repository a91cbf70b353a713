"""The restarts that a job may use: what one node and the leader of several both decide by."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Meetings: TypeAlias = tuple[int | None, ...]
    """By local rank, the last meeting of each worker of a node, where it tells of any."""


def used_after(used: int, most: int) -> int | None:
    """Return how many restarts are used once one more is charged; ``None``: none is left, so the job ends."""
    return used + 1 if used < most else None


def has_not_met_since(then: Meetings, now: Meetings, place: int) -> bool:
    """Return true if a worker is still in the meeting that it was in when a failure was charged: what has
    failed there fails with the others, and costs nothing.
    """
    at = then[place] if place < len(then) else None
    return at is not None and now[place : place + 1] == (at,)


def without(then: Meetings, place: int) -> Meetings:
    """Return the same without one worker: another process has its place, which is paid for."""
    return tuple(None if each == place else at for each, at in enumerate(then))
