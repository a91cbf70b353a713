"""What a leader knows, and the few things it does: set timers, write under guards.

- **leader-1** one decision at a time: none while one of its writes is unanswered, or not yet in its own view.
- **leader-2** every write says that the leader is still registered and that the head is the one it saw.
"""

from __future__ import annotations

from elasticrs.rendezvous.elastic.messages import Arm, Disarm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from elasticrs.rendezvous.elastic.records import Head
    from elasticrs.rendezvous.elastic.state import Member
    from elasticrs.rendezvous.elastic.verdict import Verdict
    from elasticrs.rendezvous.elastic.view import View


class Lead:
    """What a leader knows.

    Attributes:
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
        told_damaged: how many damaged records the user was told of.
        on_answer: what takes the answer to a write.
    """

    __slots__ = (
        "count",
        "early",
        "judged",
        "of_head",
        "on_answer",
        "pending",
        "sent_at",
        "stalled",
        "timers",
        "told",
        "told_damaged",
        "view",
        "wait_for",
    )

    def __init__(self, on_answer: Callable[[Member, Any], None]) -> None:
        self.on_answer = on_answer
        self.view: View | None = None
        self.early: list[Any] = []
        self.pending: int | None = None
        self.sent_at = 0
        self.wait_for = 0
        self.stalled = False
        self.timers: dict[str, bool] = {}
        self.of_head = -1
        self.count = 0
        self.told = -1
        self.told_damaged = 0
        self.judged: tuple[Any, Verdict] | None = None


def is_settled(lead: Lead) -> bool:
    """True if the leader has seen its own last write."""
    return lead.view is not None and lead.view.revision >= lead.wait_for


def forget_timers(member: Member, lead: Lead) -> None:
    """Forget the timers of the head before."""
    for name, fired in lead.timers.items():
        if not fired:
            member.do(Disarm(name))
    lead.timers.clear()


def has_passed(member: Member, lead: Lead, name: str, seconds: float) -> bool:
    """Return true if a time has passed since this was first asked for the present head.

    Args:
        member: the leader.
        lead: what it knows.
        name: of the timer; it is set when it was not.
        seconds: from now, if it was not set.
    """
    timer = f"{name}/{lead.view.round if lead.view else 0}"
    if timer not in lead.timers:
        lead.timers[timer] = False
        member.do(Arm(timer, seconds))
    return lead.timers[timer]


def forget(member: Member, lead: Lead, name: str) -> None:
    """Forget a timer whose reason is gone."""
    timer = f"{name}/{lead.view.round if lead.view else 0}"
    if timer in lead.timers and not lead.timers.pop(timer):
        member.do(Disarm(timer))


def guards(member: Member, view: View) -> list[tuple[Any, ...]]:
    """Return the conditions of every write of the leader."""
    return [
        ("create", member.keys.node(member.member), member.create_revision),
        ("mod", member.keys.head, view.head_revision),
    ]


def write(
    member: Member,
    lead: Lead,
    compares: Sequence[tuple[Any, ...]],
    then: Sequence[tuple[Any, ...]],
) -> None:
    """Send a write that the next decision waits for."""
    assert lead.view is not None
    lead.sent_at = lead.view.revision
    lead.pending = member.txn(compares, then, lead.on_answer)


def answered(lead: Lead, reply: Any) -> bool:
    """Take over the answer to a write; returns whether it was the one that is waited for."""
    if lead.pending != reply.tag:
        return False
    lead.pending = None
    if reply.ok:
        lead.wait_for = reply.revision
    else:
        # Some change was on its way. It is in the prefix that we watch, so it will be told; the revision of
        # the reply may be that of another job's key, and would never be.
        lead.stalled = lead.view is None or lead.view.revision <= lead.sent_at
    return True


def close(member: Member, lead: Lead, view: View, head: Head, alive: Sequence[str], outcome: str) -> None:
    """End the job.

    Args:
        member: the leader.
        lead: what it knows.
        view: the store.
        head: with the reason.
        alive: members that have to be here for the reason to hold.
        outcome: ``failed`` or ``timeout``.
    """
    closed = head.next(state="CLOSED", outcome=outcome, time_ns=member.now)
    here = [("exists", member.keys.node(each)) for each in alive]
    put = ("put", member.keys.head, closed.encode(), False)
    write(member, lead, [*guards(member, view), *here], [put])
