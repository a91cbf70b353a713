//! Workers that have recorded an uncaught exception, and that may not end by themselves.

use super::{Effect, Event, Group, Timer, WorkerRaised};

impl Group {
    /// The process is about to end. Only the last word of a rank counts: a shell may start its program again.
    pub(super) fn on_raised(&mut self, raised: WorkerRaised, effects: &mut Vec<Effect>) {
        let local_rank = raised.local_rank;
        let Some(member) = self.working(local_rank) else { return };
        member.raised = Some(raised.clone());
        let limit = raised.limit;
        effects.push(Effect::Tell(Event::WorkerRaised(raised)));
        effects.extend(limit.map(|limit| Effect::Arm(Timer::Exit(local_rank), limit)));
    }

    /// It has had its time to end, and whoever waits for it has waited for as long. So no grace for it.
    pub(super) fn on_exit_overdue(&mut self, local_rank: u32, effects: &mut Vec<Effect>) {
        let Some(raised) = self.working(local_rank).and_then(|member| member.raised.clone()) else { return };
        let seen = raised.seen;
        let overdue = Event::WorkerRaised(WorkerRaised { is_overdue: true, ..raised });
        self.fail_at_once(local_rank, seen, overdue, effects);
    }
}
