"""What a leader knows, and the few things it does: set timers, write under guards.

- **LEADER-1** one decision at a time: none while one of its writes is unanswered, or not yet in its own view.
- **LEADER-2** every write says that the leader is still registered and that the head is the one it saw.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic.member import Purpose
from elasticrs.store.coordination import CreatedAt, Exists, ModifiedAt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from elasticrs.rendezvous.elastic.leader_state import Leader
    from elasticrs.rendezvous.elastic.leader_view import View
    from elasticrs.rendezvous.elastic.member import Member
    from elasticrs.rendezvous.elastic.records import Head
    from elasticrs.store.coordination import Compare, Operation

    RestsOn: TypeAlias = tuple[int, bool | None, tuple[int, int, int], frozenset[str]]


# --- timers ---


def forget_timers(member: Member, leader: Leader) -> None:
    """Forget the timers of the head before."""
    for name, fired in leader.timers.items():
        if not fired:
            member.disarm(name)
    leader.timers.clear()


def has_passed(member: Member, leader: Leader, name: str, seconds: float) -> bool:
    """True if so many seconds have passed since this was first asked, by this name, for the present head."""
    timer = _timer(leader, name)
    if timer not in leader.timers:
        leader.timers[timer] = False
        member.arm(timer, seconds)
    return leader.timers[timer]


def forget(member: Member, leader: Leader, name: str) -> None:
    """Forget a timer whose reason is gone."""
    timer = _timer(leader, name)
    if timer in leader.timers and not leader.timers.pop(timer):
        member.disarm(timer)


def _timer(leader: Leader, name: str) -> str:
    return f"{name}/{leader.view.round if leader.view else 0}"


# --- writes ---


def guards(member: Member, view: View) -> list[Compare]:
    """Return the conditions of every write of the leader."""
    registration, keys = member.registered, member.keys
    assert registration is not None
    return [
        CreatedAt(keys.node(registration.member), registration.create_revision),
        ModifiedAt(keys.head, view.head_revision),
    ]


def write(
    member: Member, leader: Leader, view: View, then: Sequence[Operation], compares: Sequence[Compare] = ()
) -> None:
    """Send a write that the next decision waits for; ``compares`` have to hold besides the guards."""
    leader.sent_at = view.revision
    leader.pending = member.txn(Purpose.LEAD, [*guards(member, view), *compares], then)


def close(member: Member, leader: Leader, view: View, closed: Head, alive: Sequence[str] = ()) -> None:
    """End the job.

    Args:
        member: the leader.
        leader: what it knows.
        view: the store.
        closed: the head to write, with outcome and reason.
        alive: members that have to be here for the reason to hold.
    """
    closed = closed.replaced(state="CLOSED", time_ns=member.now)
    write(member, leader, view, [member.put_head(closed), *member.keys.forget_rounds()], here(member, alive))


def here(member: Member, alive: Sequence[str]) -> list[Compare]:
    """Return the conditions that members are registered."""
    return [Exists(member.keys.node(each)) for each in alive]
