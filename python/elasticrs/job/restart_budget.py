"""Rules that decide whether a failure is charged to the restart budget. A consequence of an earlier failure
is not charged again.
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
    """Return true if the worker with local rank ``place`` has not joined a rendezvous since a failure was
    last charged to the restart budget. A failure of such a worker is not charged, because the charged failure
    caused it.
    """
    at = then[place] if place < len(then) else None
    return at is not None and now[place : place + 1] == (at,)


def without(then: Meetings, place: int) -> Meetings:
    """Return a copy of ``then`` in which the entry of one worker is ``None``, because the worker was
    replaced.
    """
    return tuple(None if each == place else at for each, at in enumerate(then))
