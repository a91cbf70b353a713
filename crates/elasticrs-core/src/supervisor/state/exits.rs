//! Workers that have recorded an uncaught exception, and that may not end by themselves.

use super::{Effect, Event, Group, Phase, Signal, StopScope, Timer, WorkerRaised};

impl Group {
    /// The process is about to end. Only the last word of a rank counts: a shell may start its program again.
    pub(super) fn on_raised(&mut self, raised: WorkerRaised, effects: &mut Vec<Effect>) {
        let local_rank = raised.local_rank;
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
        let Some(member) = member.filter(|_| self.phase == Phase::Running) else { return };
        member.raised = Some(raised);
        effects.push(Effect::Tell(Event::WorkerRaised(raised)));
        effects.extend(raised.limit.map(|limit| Effect::Arm(Timer::Exit(local_rank), limit)));
    }

    /// It has had its time to end, and whoever waits for it has waited for as long. So no grace for it.
    pub(super) fn on_exit_overdue(&mut self, local_rank: u32, effects: &mut Vec<Effect>) {
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
        let Some(member) = member.filter(|_| self.phase == Phase::Running) else { return };
        let Some(raised) = member.raised else { return };
        let worker = member.pid;
        effects.push(member.send(Signal::KILL, StopScope::Group));
        let siblings = self.fail(worker, Some(worker), effects);
        effects.push(Effect::Tell(Event::WorkerRaised(WorkerRaised { is_overdue: true, ..raised })));
        effects.push(Effect::TellFailure { local_rank, seen: raised.seen, siblings });
    }
}
