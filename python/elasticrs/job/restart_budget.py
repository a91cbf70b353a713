"""Rules for the restart budget, shared by single-node jobs and by the leader of several nodes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Meetings: TypeAlias = tuple[int | None, ...]
    """Last meeting of each worker of a node, by local rank; ``None`` for a worker that reports none."""


def used_after(used: int, most: int) -> int | None:
    """Return the number of used restarts after charging another one. Return ``None`` if the budget is
    exhausted, so that the job fails.
    """
    return used + 1 if used < most else None


def has_not_met_since(then: Meetings, now: Meetings, place: int) -> bool:
    """Return true if a worker is still in the same meeting as when the last failure was charged. A failure in
    that meeting belongs to the charged failure and costs nothing.
    """
    at = then[place] if place < len(then) else None
    return at is not None and now[place : place + 1] == (at,)


def without(then: Meetings, place: int) -> Meetings:
    """Return the meetings with the entry of one worker cleared, because its replacement has been charged."""
    return tuple(None if each == place else at for each, at in enumerate(then))
