"""What a leader knows of the job."""

from __future__ import annotations

from elasticrs.job.value import Record, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elasticrs.rendezvous.elastic.leader_view import View
    from elasticrs.rendezvous.elastic.round_outcome import Verdict
    from elasticrs.store.coordination import Changes, Reply

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
