"""Rules that decide if a failure is charged to the restart budget, or belongs to an earlier failure that was
already charged.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Meetings: TypeAlias = tuple[int | None, ...]
    """Round number of each worker's last rendezvous, by local rank; ``None`` if the worker did not record
    one.
    """


def has_not_met_since(then: Meetings, now: Meetings, place: int) -> bool:
    """Return true if a worker has not taken part in another rendezvous since the last failure was charged. In
    this case, a failure of the worker belongs to the failure that was already charged, and is not charged
    again.
    """
    at = then[place] if place < len(then) else None
    return at is not None and now[place : place + 1] == (at,)


def without(then: Meetings, place: int) -> Meetings:
    """Return the rounds with the entry of one worker set to ``None``, because the worker was replaced."""
    return tuple(None if each == place else at for each, at in enumerate(then))
