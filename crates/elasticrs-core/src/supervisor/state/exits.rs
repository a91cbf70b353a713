//! Handles workers that have recorded an uncaught exception. Such a worker may fail to exit by itself.

use std::time::Duration;

use super::hangs::PendingAction;
use super::{Effect, Event, Group, Phase, Signal, StopScope, Timer, WorkerRaised};
use crate::supervisor::event::{ExitStage, KillReason, WorkersKilled};

/// Returns the interval between progress checks of a worker that is exiting after an uncaught exception. The interval
/// is half of `limit`, the time limit for the exit, so that the second check is due when `limit` has passed.
fn between_samples(limit: Duration) -> Duration {
    limit / 2
}

impl Group {
    /// Records a worker's uncaught exception and starts to watch the worker's exit. If a rank records several
    /// exceptions, only the last one counts, because a worker that is a shell may run its program again.
    ///
    /// If the worker is already being stopped, its exception is not reported, because such an exception is usually a
    /// consequence of the first failure. The exit of the worker is still watched.
    pub(super) fn on_raised(&mut self, raised: WorkerRaised) {
        let local_rank = raised.local_rank;
        let is_working = self.working(local_rank).is_some();
        let is_open = matches!(self.phase, Phase::Running | Phase::Stopping);
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
        let Some(member) = member.filter(|_| is_open) else { return };
        member.raised = Some(raised.clone());
        let limit = raised.limit;
        if is_working {
            self.report(Event::WorkerRaised(raised));
        }
        self.effects.extend(limit.map(|limit| Effect::Arm(Timer::Exit(local_rank), between_samples(limit))));
    }

    /// Handles a new sample of a worker that is exiting after an uncaught exception. `progressed` is true if the
    /// worker has made progress since the previous sample, and `None` for the first sample.
    pub(super) fn on_exit_sampled(&mut self, local_rank: u32, progressed: Option<bool>) {
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
        let Some(raised) = member.and_then(|m| m.raised.clone()) else { return };
        let Some(limit) = raised.limit else { return };
        let is_working = self.working(local_rank).is_some();
        match progressed {
            // Gather evidence before killing the worker, because the worker's stack shows what blocks the exit.
            Some(false) if is_working => return self.take_evidence(PendingAction::Exit(local_rank)),
            Some(false) => return self.kill_stalled(local_rank, between_samples(limit)),
            Some(true) if is_working => {
                let seen = raised.seen;
                let slow = Event::WorkerRaised(WorkerRaised { exit: ExitStage::Slow, ..raised });
                self.fail_in_grace(local_rank, seen, slow);
            }
            Some(true) | None => {}
        }
        self.effects.push(Effect::Arm(Timer::Exit(local_rank), between_samples(limit)));
    }

    /// Kills a worker whose exit has stalled. The worker gets no grace period, because it has already exceeded its time
    /// limit, and the other workers may have been waiting for it.
    pub(super) fn on_exit_overdue(&mut self, local_rank: u32) {
        let Some(raised) = self.working(local_rank).and_then(|member| member.raised.clone()) else { return };
        let seen = raised.seen;
        let stalled = Event::WorkerRaised(WorkerRaised { exit: ExitStage::Stalled, ..raised });
        self.fail_at_once(local_rank, seen, Some(stalled));
    }

    /// Kills a worker that hangs during its exit, without waiting for the end of its grace period. The worker cannot be
    /// saving data, because its program has failed and it makes no progress.
    fn kill_stalled(&mut self, local_rank: u32, limit: Duration) {
        let is_open = matches!(self.phase, Phase::Running | Phase::Stopping);
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
        let Some(member) = member.filter(|m| is_open && !m.group_has_got(Signal::KILL)) else { return };
        self.effects.push(member.send(Signal::KILL, StopScope::Group));
        let workers = vec![(local_rank, member.pid)];
        let reason = KillReason::StalledExit;
        self.report(Event::WorkersKilled(WorkersKilled { workers, reason, limit }));
    }

    /// Returns the workers that did not exit within their grace period, grouped by [`KillReason`]. Skips workers that
    /// were already sent SIGKILL.
    pub(super) fn overdue_workers(&self) -> Vec<WorkersKilled> {
        let mut killed: Vec<WorkersKilled> = Vec::new();
        for member in self.members.iter().filter(|m| m.runs() && m.sent != Some(Signal::KILL)) {
            let (reason, worker) = (member.why_overdue(), (member.local_rank, member.pid));
            match killed.iter_mut().find(|killed| killed.reason == reason) {
                Some(killed) => killed.workers.push(worker),
                None => killed.push(WorkersKilled { workers: vec![worker], reason, limit: self.grace }),
            }
        }
        killed
    }
}
