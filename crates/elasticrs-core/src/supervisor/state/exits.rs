//! Handles workers that have recorded an uncaught exception. Such a worker may fail to exit by itself.

use std::time::Duration;

use super::hangs::PendingAction;
use super::member::{Member, StopRole};
use super::{Effect, Event, Group, Phase, Signal, StopScope, Timer, WorkerRaised};
use crate::supervisor::event::{ExitStage, KillReason, WorkersKilled};

/// Returns the interval between progress checks of a worker that is exiting after an uncaught exception. The interval
/// is half of `limit`, the time limit for the exit, so that the second check is due when `limit` has passed.
fn between_samples(limit: Duration) -> Duration {
    limit / 2
}

impl Group {
    /// Records uncaught exceptions of workers, and starts to watch the exits of these workers. Stops the other workers
    /// if one of the exceptions was not caused by another worker's exit. If a rank records several exceptions, only the
    /// last one counts, because a worker that is a shell may run its program again.
    ///
    /// If a worker is already being stopped, its exception is not reported, because such an exception is usually a
    /// consequence of the first failure. The exit of the worker is still watched.
    pub(super) fn on_raised(&mut self, workers: Vec<WorkerRaised>, dying: &[i32]) {
        for raised in workers {
            let local_rank = raised.local_rank;
            let is_working = self.working(local_rank).is_some();
            let is_open = matches!(self.phase, Phase::Running | Phase::Stopping);
            let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
            let Some(member) = member.filter(|_| is_open) else { continue };
            member.raised = Some(raised.clone());
            let limit = raised.limit;
            if is_working {
                self.report(Event::WorkerRaised(raised));
            }
            self.effects.extend(limit.map(|limit| Effect::Arm(Timer::Exit(local_rank), between_samples(limit))));
        }
        self.take_records_after_raise();
        self.stop_after_raise(dying);
    }

    /// Stops the other workers if an uncaught exception is ending a worker. Does not wait for the worker's exit,
    /// because the interpreter may need seconds to exit. During that time, the other workers would waste their
    /// computation or fail as a consequence.
    ///
    /// Does nothing in three cases. First, if the group replaces failed workers. Second, if another worker is dead or
    /// dying, because its exit may have caused the exception and is reported next. Third, if evidence of a hang is
    /// being gathered, because the hang came first.
    pub(super) fn stop_after_raise(&mut self, dying: &[i32]) {
        if self.phase != Phase::Running || self.policy.replaces || self.waiting.is_some() {
            return;
        }
        let is_dying = |m: &Member| !m.ended && (m.dead || dying.contains(&m.pid));
        if self.members.iter().any(is_dying) {
            return;
        }
        let raised = self.members.iter().filter(|m| m.ends_by_its_exception());
        let first = raised.filter_map(|m| Some((m.raised.as_ref()?.seen, m.local_rank, m.pid))).min();
        let Some((seen, local_rank, pid)) = first else { return };
        for member in self.members.iter_mut().filter(|m| m.ends_by_its_exception()) {
            member.stop_role = StopRole::Excused;
        }
        self.fail(local_rank, pid, None, seen, None);
    }

    /// Returns true if the exception of the worker with this local rank has stopped the group, and the worker is still
    /// exiting within its own time limits.
    pub(super) fn is_excused(&self, local_rank: u32) -> bool {
        self.phase == Phase::Stopping && self.members.iter().any(|m| m.local_rank == local_rank && m.is_excused())
    }

    fn excused(&mut self, local_rank: u32) -> Option<&mut Member> {
        self.members.iter_mut().find(|m| m.local_rank == local_rank && m.is_excused())
    }

    /// Handles a new sample of a worker that is exiting after an uncaught exception. `progressed` is true if the
    /// worker has made progress since the previous sample, and `None` for the first sample.
    pub(super) fn on_exit_sampled(&mut self, local_rank: u32, progressed: Option<bool>) {
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs());
        let Some(raised) = member.and_then(|m| m.raised.clone()) else { return };
        let Some(limit) = raised.limit else { return };
        let is_working = self.working(local_rank).is_some();
        let is_excused = self.is_excused(local_rank);
        match progressed {
            // Gather evidence before killing the worker, because the worker's stack shows what blocks the exit.
            Some(false) if is_working || is_excused => return self.take_evidence(PendingAction::Exit(local_rank)),
            Some(false) => return self.kill_stalled(local_rank, between_samples(limit)),
            Some(true) if is_working => {
                let seen = raised.seen;
                let slow = Event::WorkerRaised(WorkerRaised { exit: ExitStage::Slow, ..raised });
                self.fail_in_grace(local_rank, seen, slow);
            }
            Some(true) if is_excused && raised.exit == ExitStage::Begun => self.on_excused_slow(local_rank),
            Some(true) | None => {}
        }
        self.effects.push(Effect::Arm(Timer::Exit(local_rank), between_samples(limit)));
    }

    /// Reports an excused worker that has exceeded the time limit for its exit but makes progress. Gives the worker
    /// another grace period to exit.
    fn on_excused_slow(&mut self, local_rank: u32) {
        let grace = self.policy.on_failure.grace;
        let Some(raised) = self.excused(local_rank).and_then(|member| member.raised.as_mut()) else { return };
        raised.exit = ExitStage::Slow;
        let slow = Event::WorkerRaised(raised.clone());
        self.report(slow);
        self.effects.push(Effect::Arm(Timer::Condemned(local_rank), grace));
    }

    /// Kills an excused worker that is still exiting at the end of its grace period.
    pub(super) fn on_excused_overdue(&mut self, local_rank: u32) {
        let limit = self.policy.on_failure.grace;
        self.kill_excused(local_rank, |member| {
            let (workers, reason) = (vec![(local_rank, member.pid)], member.why_overdue());
            Event::WorkersKilled(WorkersKilled { workers, reason, limit })
        });
    }

    /// Kills an excused worker and reports the reason. The worker is no longer excused.
    fn kill_excused(&mut self, local_rank: u32, why: impl FnOnce(&Member) -> Event) {
        let Some(member) = self.excused(local_rank) else { return };
        let (kill, why) = (member.send(Signal::KILL, StopScope::Group), why(member));
        member.stop_role = StopRole::Usual;
        self.effects.push(kill);
        self.report(why);
        self.kill_when_nobody_is_excused();
    }

    /// Kills a worker whose exit has stalled. The worker gets no grace period, because it has already exceeded its time
    /// limit, and the other workers may have been waiting for it.
    pub(super) fn on_exit_overdue(&mut self, local_rank: u32) {
        let stalled =
            |raised: &WorkerRaised| Event::WorkerRaised(WorkerRaised { exit: ExitStage::Stalled, ..raised.clone() });
        if self.phase == Phase::Stopping {
            return self.kill_excused(local_rank, |member| {
                member.raised.as_ref().map(stalled).expect("only a worker that has raised is excused")
            });
        }
        let Some(raised) = self.working(local_rank).and_then(|member| member.raised.clone()) else { return };
        self.fail_at_once(local_rank, raised.seen, Some(stalled(&raised)));
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
        let is_overdue = |m: &&Member| m.runs() && m.sent != Some(Signal::KILL) && !m.is_excused();
        for member in self.members.iter().filter(is_overdue) {
            let (reason, worker) = (member.why_overdue(), (member.local_rank, member.pid));
            match killed.iter_mut().find(|killed| killed.reason == reason) {
                Some(killed) => killed.workers.push(worker),
                None => killed.push(WorkersKilled { workers: vec![worker], reason, limit: self.grace }),
            }
        }
        killed
    }
}
