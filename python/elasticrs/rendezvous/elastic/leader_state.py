"""State of an agent that leads the job."""

from __future__ import annotations

from elasticrs.job.value import Record, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elasticrs.rendezvous.elastic.leader_view import View
    from elasticrs.rendezvous.elastic.round_outcome import Verdict
    from elasticrs.store.coordination import Changes, Reply

    RestsOn: TypeAlias = tuple[int, bool | None, tuple[int, int, int], bool, frozenset[str]]


class Leader(Record):
    """State that an agent keeps while it leads the job.

    Args:
        view: the leader's view of the store; ``None`` until the snapshot of the store has arrived.
        early: changes that arrived before the snapshot.
        pending: tag of the write that is not answered yet and delays the next decision; ``None`` if there is
            none.
        sent_at: revision of the view when the last write was sent.
        wait_for: revision that the view must reach before the next decision.
        stalled: true if the last write was rejected, and the view has not changed since it was sent.
        timers: for the name of each timer that was set in the current state of the job, true if it has fired.
        of_head: revision of the state of the job to which the timers belong.
        count: number of rounds that this leader has proposed.
        judged: inputs of the last verdict on an ended round, and that verdict.
        told: number of waiting nodes that was last reported to the user.
        told_more: number of the latest round when the user was told that the leader waits for more nodes.
        told_damaged: number of damaged records that were reported to the user.
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
        """Return true if the leader may make a decision, because all of its writes were answered and are
        reflected in its view.
        """
        is_settled = self.view is not None and self.view.revision >= self.wait_for
        return is_settled and self.pending is None and not self.stalled

    def answered(self, reply: Reply) -> bool:
        """Handle the store's reply to a write. Return true if the leader was waiting for this reply."""
        if self.pending != reply.tag:
            return False
        self.pending = None
        if reply.ok:
            self.wait_for = reply.revision
        else:
            # The write was rejected because of a change that the leader has not received yet. Wait for any
            # change of this job's keys.
            #
            # Do not wait for the reply's store revision, because it may belong to a change of another job's
            # keys.
            self.stalled = self.view is None or self.view.revision <= self.sent_at
        return True
