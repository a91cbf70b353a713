"""Basic operations of the leader: timers and conditional writes to the store.

- **LEADER-1** A leader makes one decision at a time. It makes no decision while one of its writes is
  unanswered, or while the write has not reached its own view of the store.
- **LEADER-2** Every write of a leader is conditional: the leader must still be registered, and the head (the
  state of the job) must be unchanged since the leader has seen it.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol.member import Purpose
from elasticrs._engine.nodes.transport.coordination import CreatedAt, Exists, ModifiedAt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs._engine.nodes.protocol.leader_view import View
    from elasticrs._engine.nodes.protocol.member import Leader, Member
    from elasticrs._engine.nodes.protocol.records import Head
    from elasticrs._engine.nodes.transport.coordination import Compare, Operation


# --- timers ---


def forget_timers(member: Member, leader: Leader) -> None:
    """Cancel all timers that were set in the previous state of the job."""
    for name, fired in leader.timers.items():
        if not fired:
            member.disarm(name)
    leader.timers.clear()


def has_passed(member: Member, leader: Leader, name: str, seconds: float) -> bool:
    """Return true if the timer ``name`` has expired. The first call starts the timer, which runs for
    ``seconds``. A change of the job's state cancels all timers.
    """
    timer = _timer(leader, name)
    if timer not in leader.timers:
        leader.timers[timer] = False
        member.arm(timer, seconds)
    return leader.timers[timer]


def forget(member: Member, leader: Leader, name: str) -> None:
    """Cancel a timer, because the reason for setting it no longer exists."""
    timer = _timer(leader, name)
    if timer in leader.timers and not leader.timers.pop(timer):
        member.disarm(timer)


def _timer(leader: Leader, name: str) -> str:
    return f"{name}/{leader.view.round if leader.view else 0}"


# --- writes ---


def guards(member: Member, view: View) -> list[Compare]:
    """Return the conditions that guard every write of the leader."""
    registration, keys = member.registered, member.keys
    assert registration is not None
    return [
        CreatedAt(keys.node(registration.member), registration.create_revision),
        ModifiedAt(keys.head, view.head_revision),
    ]


def write(
    member: Member, leader: Leader, view: View, then: Sequence[Operation], compares: Sequence[Compare] = ()
) -> None:
    """Write to the store if this agent is still registered, the job's state is unchanged, and all conditions
    in ``compares`` are true.

    The leader makes no decision until the reply has arrived.
    """
    leader.sent_at = view.revision
    leader.pending = member.txn(Purpose.LEAD, [*guards(member, view), *compares], then)


def close(member: Member, leader: Leader, view: View, closed: Head, alive: Sequence[str] = ()) -> None:
    """Close the job.

    Args:
        member: state of the agent that leads.
        leader: state of that agent as the leader.
        view: the leader's view of the store.
        closed: state of the job to write, with outcome and reason.
        alive: members that must still be registered for the reason to be valid.
    """
    closed = closed.replaced(state="CLOSED", time_ns=member.now)
    write(member, leader, view, [member.put_head(closed), *member.keys.forget_rounds()], here(member, alive))


def here(member: Member, alive: Sequence[str]) -> list[Compare]:
    """Return conditions that are true only while all of these members are registered."""
    return [Exists(member.keys.node(each)) for each in alive]
