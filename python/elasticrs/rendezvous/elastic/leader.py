"""What a leader knows, and the few things it does: set timers, write under guards.

- **LEADER-1** one decision at a time: none while one of its writes is unanswered, or not yet in its own view.
- **LEADER-2** every write says that the leader is still registered and that the head is the one it saw.
"""

from __future__ import annotations

from elasticrs._value import Record, fresh
from elasticrs.coordination import CreatedAt, Exists, ModifiedAt
from elasticrs.rendezvous.elastic.state import Purpose

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from elasticrs.coordination import Changes, Compare, Operation, Reply
    from elasticrs.rendezvous.elastic.records import Head
    from elasticrs.rendezvous.elastic.state import Member
    from elasticrs.rendezvous.elastic.verdict import Verdict
    from elasticrs.rendezvous.elastic.view import View

    RestsOn: TypeAlias = tuple[int, bool | None, tuple[int, int, int], frozenset[str]]


class Leader(Record):
    """What a leader knows.

    Args:
        view: the store; ``None`` until its snapshot is there.
        early: changes that came before the snapshot.
        pending: tag of the write that the next decision waits for.
        sent_at: revision of the view when that write was sent.
        wait_for: revision that the view has to reach before the next decision.
        stalled: the last write was refused, and the view has not changed since it was decided.
        timers: those that were set, and whether they have fired; of the present head.
        of_head: the head's revision that the timers belong to.
        count: proposals made.
        judged: the last verdict on an ended round, after what it rests on.
        told: how many nodes the user was last told of.
        told_more: round before the one for which the user was told that the leader waits for more nodes.
        told_damaged: how many damaged records the user was told of.
    """

    view: View | None = None
    early: list[Changes] = fresh(factory=list)
    pending: int | None = None
    sent_at: int = 0
    wait_for: int = 0
    stalled: bool = False
    timers: dict[str, bool] = fresh(factory=dict)
    of_head: int = -1
    count: int = 0
    judged: tuple[RestsOn, Verdict] | None = None
    told: int = -1
    told_more: int = -1
    told_damaged: int = 0

    def is_free(self) -> bool:
        """True if nothing it has written is unanswered, or not yet in its own view."""
        is_settled = self.view is not None and self.view.revision >= self.wait_for
        return is_settled and self.pending is None and not self.stalled

    def answered(self, reply: Reply) -> bool:
        """Take over the answer to a write; return true if it was the one that is waited for."""
        if self.pending != reply.tag:
            return False
        self.pending = None
        if reply.ok:
            self.wait_for = reply.revision
        else:
            # Some change was on its way. It is in the prefix that we watch, so it will be told; the revision
            # of the reply may be that of another job's key, and would never be.
            self.stalled = self.view is None or self.view.revision <= self.sent_at
        return True


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
