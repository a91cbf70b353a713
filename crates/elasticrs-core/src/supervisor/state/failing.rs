//! Handles workers that have failed but are still running, for example because they hang or because a timer has
//! expired. Also handles workers that have recorded an uncaught exception, because they may fail to exit by themselves.
//! In a group that replaces failed workers, starts their replacements while the other workers continue.
//!
//! Each member has a place in the group. The place is *left* once the worker has failed, *free* once all of the
//! worker's processes are gone, *promised* while a replacement is being started, and *taken* while a worker is running
//! in it. A place also stays taken after its worker has exited with code 0.

use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::signal::Signal;

use super::hangs::PendingAction;
use super::{
    Deadline, Effect, Event, GIVE_UP_AFTER, Group, Member, Outcome, Pause, Phase, Place, StopRole, SweepOutcome,
    TimerExpired, WorkerRaised, to_group,
};
use crate::spec::{StopPolicy, StopScope};
use crate::supervisor::event::{ExitStage, KillReason, StartFailure, WorkersKilled};

impl Group {
    /// Handles a timer that was not released in time. If the timer has a signal, sends the signal to the process that
    /// acquired the timer, and marks the worker as failed.
    ///
    /// Ignores the timer if the worker is already being stopped, because the worker then has a deadline for its exit.
    pub(super) fn on_timer_due(&mut self, timer: TimerExpired) {
        let TimerExpired { local_rank, pid, signal, seen, .. } = timer;
        let Some(member) = self.working(local_rank) else { return };
        let Some(signal) = signal else { return self.report(Event::TimerExpired(timer)) };
        let worker = member.pid;
        if worker == pid {
            member.is_stopped_by(signal);
        }
        self.effects.push(Effect::SignalProcess { pid, signal });
        let Some(index) = self.survivable(worker) else {
            let but = (worker == pid).then_some(worker);
            return self.fail(local_rank, worker, but, seen, Some(Event::TimerExpired(timer)));
        };
        let (policy, member) = (self.policy.on_failure, &mut self.members[index]);
        let is_killed = policy.is_hard();
        if is_killed {
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
        } else if worker != pid {
            self.effects.push(member.stop(policy.signal, self.policy.stop_scope));
        }
        if member.pause != Pause::Running && !is_killed {
            self.effects.push(to_group(worker, Signal::CONT));
        }
        let limit = if is_killed { GIVE_UP_AFTER } else { policy.grace };
        self.condemn(index, limit, seen);
        self.report(Event::TimerExpired(timer));
    }

    /// Returns the worker with this local rank if it is running, has not failed, and is not being stopped.
    pub(super) fn working(&mut self, local_rank: u32) -> Option<&mut Member> {
        let runs = |m: &&mut Member| m.local_rank == local_rank && m.runs() && m.condemned.is_none();
        self.members.iter_mut().find(runs).filter(|_| self.phase == Phase::Running)
    }

    /// Kills a failed worker immediately with SIGKILL. Also stops the other workers, unless the group replaces failed
    /// workers.
    ///
    /// `why` is the event that reports the failure. `None` if the failure has already been reported.
    pub(super) fn fail_at_once(&mut self, local_rank: u32, seen: Stamp, why: Option<Event>) {
        let Some(member) = self.working(local_rank) else { return };
        let (worker, kill) = (member.pid, member.send(Signal::KILL, StopScope::Group));
        self.effects.push(kill);
        self.fail_or_condemn(local_rank, worker, GIVE_UP_AFTER, seen, why);
    }

    /// Marks a worker as failed, but gives it a grace period in which to exit. Also stops the other workers, unless the
    /// group replaces failed workers.
    pub(super) fn fail_in_grace(&mut self, local_rank: u32, seen: Stamp, why: Event) {
        let Some(worker) = self.working(local_rank).map(|member| member.pid) else { return };
        self.fail_or_condemn(local_rank, worker, self.policy.on_failure.grace, seen, Some(why));
    }

    /// Handles a failed worker that has not exited yet. If the group replaces failed workers, sets a time limit for the
    /// exit of this worker. Otherwise, stops the group.
    fn fail_or_condemn(&mut self, local_rank: u32, worker: i32, limit: Duration, seen: Stamp, why: Option<Event>) {
        let Some(index) = self.survivable(worker) else {
            return self.fail(local_rank, worker, Some(worker), seen, why);
        };
        self.condemn(index, limit, seen);
        self.effects.extend(why.map(Effect::Report));
    }

    /// Stops the group because of a failed worker, and reports the failure. `but` is the pid of a worker that gets no
    /// signal to stop. `why` is an event to report first.
    pub(super) fn fail(&mut self, local_rank: u32, worker: i32, but: Option<i32>, seen: Stamp, why: Option<Event>) {
        self.outcome = Outcome::Failed;
        let siblings = self.members.iter().filter(|m| m.runs() && m.pid != worker && !m.is_excused()).count();
        let siblings = u32::try_from(siblings).unwrap_or(u32::MAX);
        self.begin_stop(self.policy.on_failure, but);
        self.effects.extend(why.map(Effect::Report));
        self.effects.push(Effect::ReportFailure { local_rank, seen, siblings });
    }

    /// Marks a member as failed and sets the deadline for its exit. The other members keep running.
    fn condemn(&mut self, index: usize, limit: Duration, seen: Stamp) {
        let member = &mut self.members[index];
        member.condemned = Some(seen);
        self.effects.push(Effect::Arm(Deadline::Condemned(member.local_rank), limit));
    }

    /// Kills a failed member that has not exited in time. If it does not exit after SIGKILL either, stops the whole
    /// group, because a member that is still alive cannot be replaced.
    pub(super) fn on_condemned(&mut self, local_rank: u32) {
        if self.is_excused(local_rank) {
            return self.on_excused_overdue(local_rank);
        }
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && !m.ended);
        let Some(member) = member.filter(|_| self.phase == Phase::Running) else { return };
        let Some(seen) = member.condemned else { return };
        if !member.group_has_got(Signal::KILL) {
            let (workers, reason) = (vec![(local_rank, member.pid)], member.why_overdue());
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
            let limit = self.policy.on_failure.grace;
            self.report(Event::WorkersKilled(WorkersKilled { workers, reason, limit }));
            return self.effects.push(Effect::Arm(Deadline::Condemned(local_rank), GIVE_UP_AFTER));
        }
        let pid = member.pid;
        self.fail(local_rank, pid, Some(pid), seen, None);
    }
}

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
            self.effects.extend(limit.map(|limit| Effect::Arm(Deadline::Exit(local_rank), between_samples(limit))));
        }
        self.take_records_after_raise();
        self.stop_after_raise(dying);
    }

    /// Stops the other workers if a worker is exiting because of an uncaught exception. Does not wait for that exit,
    /// because the interpreter may need seconds for it. During that time, the other workers would compute in vain or
    /// fail as a consequence.
    ///
    /// Does nothing in three cases. First, if the group replaces failed workers. Second, if another worker is dead or
    /// dying, because its exit may have caused the exception and will be reported next. Third, if evidence of a hang is
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

    /// Handles a new progress check of a worker that is exiting after an uncaught exception. `progressed` is true if
    /// the worker has made progress since the previous check, and `None` for the first check.
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
        self.effects.push(Effect::Arm(Deadline::Exit(local_rank), between_samples(limit)));
    }

    /// Reports an excused worker (whose own exception stopped the group) that has exceeded the time limit for its exit
    /// but makes progress. Gives the worker another grace period to exit.
    fn on_excused_slow(&mut self, local_rank: u32) {
        let grace = self.policy.on_failure.grace;
        let Some(raised) = self.excused(local_rank).and_then(|member| member.raised.as_mut()) else { return };
        raised.exit = ExitStage::Slow;
        let slow = Event::WorkerRaised(raised.clone());
        self.report(slow);
        self.effects.push(Effect::Arm(Deadline::Condemned(local_rank), grace));
    }

    /// Kills an excused worker (whose own exception stopped the group) that is still exiting at the end of its grace
    /// period.
    pub(super) fn on_excused_overdue(&mut self, local_rank: u32) {
        let limit = self.policy.on_failure.grace;
        self.kill_excused(local_rank, |member| {
            let (workers, reason) = (vec![(local_rank, member.pid)], member.why_overdue());
            Event::WorkersKilled(WorkersKilled { workers, reason, limit })
        });
    }

    /// Kills an excused worker and reports the reason. From then on, the worker does not count as excused.
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
        for member in self.still_running() {
            let (reason, worker) = (member.why_overdue(), (member.local_rank, member.pid));
            match killed.iter_mut().find(|killed| killed.reason == reason) {
                Some(killed) => killed.workers.push(worker),
                None => killed.push(WorkersKilled { workers: vec![worker], reason, limit: self.grace }),
            }
        }
        killed
    }

    /// Returns the workers that a second stop request kills even if they are saving. `None` if there are none.
    pub(super) fn killed_by(&self, policy: StopPolicy) -> Option<WorkersKilled> {
        let workers: Vec<_> = self.still_running().map(|m| (m.local_rank, m.pid)).collect();
        let (reason, limit) = (KillReason::Request, Duration::ZERO);
        (policy.is_hard() && !workers.is_empty()).then_some(WorkersKilled { workers, reason, limit })
    }

    /// Returns the running workers that were not yet sent SIGKILL, except the excused workers.
    fn still_running(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| m.runs() && m.sent != Some(Signal::KILL) && !m.is_excused())
    }
}

/// Time limit for the start of a replacement worker once the group is being killed. A start that takes longer is
/// aborted.
const LAST_CHANCE: Duration = Duration::from_secs(1);

impl Group {
    /// Returns the reason why this worker cannot be replaced now. `None` if it can be replaced.
    pub fn refusal(&self, local_rank: u32) -> Option<&'static str> {
        let member = self.members.iter().find(|m| m.local_rank == local_rank);
        match (member.map(|m| (m.place, m.ended)), self.phase) {
            _ if !self.policy.replaces => Some("this group does not replace workers"),
            (None, _) => Some("there is no such worker"),
            (Some(_), phase) if phase != Phase::Running => Some("the group is stopping"),
            (Some((Place::Free, _)), _) => None,
            (Some((Place::Promised, _)), _) => Some("its replacement is starting"),
            (Some((Place::Left, _)), _) => Some("its leftover processes are not cleaned up yet"),
            (Some((Place::Taken, false)), _) => Some("it is running"),
            (Some((Place::Taken, true)), _) => Some("it has succeeded"),
        }
    }

    /// Returns the local ranks of the workers whose replacements are being started.
    pub fn starting(&self) -> impl Iterator<Item = u32> {
        self.members.iter().filter(|m| m.place == Place::Promised).map(|m| m.local_rank)
    }

    /// Returns true if the other members continue when this member fails. Returns false if Python started the member,
    /// because the nursery cannot clean up the processes of such a member.
    pub(super) fn survives(&self, index: usize) -> bool {
        self.policy.replaces && self.phase == Phase::Running && !self.members[index].adopted
    }

    /// Returns the index of the member with this pid if the other members continue when it fails. Otherwise, returns
    /// `None`. See [`Self::survives`].
    pub(super) fn survivable(&self, pid: i32) -> Option<usize> {
        self.members.iter().position(|m| m.pid == pid && !m.ended).filter(|&index| self.survives(index))
    }

    /// Handles the exit of a failed member. Leftover processes are cleaned up for one member at a time, in the order
    /// of the failures.
    pub(super) fn leave(&mut self, index: usize) {
        self.members[index].place = Place::Left;
        if let Some(watch) = &mut self.watch {
            watch.lose(index);
            // Check the heartbeats of the other members now, because these checks were paused while the failed member
            // was about to exit.
            self.effects.push(Effect::Arm(Deadline::Hang, Duration::ZERO));
        }
        self.left.push_back(index);
        if self.left.len() == 1 {
            self.sweep_left();
        }
    }

    fn sweep_left(&mut self) {
        if let Some(&first) = self.left.front().filter(|_| self.phase == Phase::Running) {
            let Member { local_rank, pid, .. } = self.members[first];
            self.effects.push(Effect::SweepWorker { local_rank, pid });
        }
    }

    pub(super) fn on_worker_swept(&mut self, swept: SweepOutcome) {
        let Some(index) = self.left.pop_front() else { return };
        self.members[index].place = Place::Free;
        self.report(Event::WorkerSwept { local_rank: self.members[index].local_rank, swept });
        self.sweep_left();
    }

    /// Adds a member whose process Python has started.
    pub(super) fn on_adopted(&mut self, local_rank: u32, pid: i32) {
        let mut member = Member::new(local_rank, pid, true);
        // If the group is no longer running, kill the new member.
        if self.phase != Phase::Running {
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
        }
        self.members.push(member);
    }

    pub(super) fn on_replace(&mut self, local_rank: u32) {
        if let Some(member) = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.place == Place::Free) {
            member.place = Place::Promised;
        }
    }

    fn promised(&self, local_rank: u32) -> Option<usize> {
        self.members.iter().position(|m| m.local_rank == local_rank && m.place == Place::Promised)
    }

    pub(super) fn on_replaced(&mut self, local_rank: u32, pid: i32, started: Stamp) {
        let Some(index) = self.promised(local_rank) else { return };
        for ended in self.members.iter_mut().filter(|m| m.pid == pid) {
            // Forget the pid of a member that has exited, because the kernel has reused it for the replacement.
            ended.pid = 0;
        }
        self.members[index] = Member::new(local_rank, pid, false);
        if let Some(watch) = &mut self.watch {
            watch.restart(index, started.0);
        }
        self.report(Event::WorkerReplaced { local_rank, pid, started });
        let member = &mut self.members[index];
        match (self.phase, self.stop_signal) {
            (Phase::Running, _) if self.suspended => self.effects.push(to_group(pid, Signal::STOP)),
            (Phase::Running, _) => {}
            (Phase::Stopping, Some(signal)) => self.effects.push(member.stop(signal, self.policy.stop_scope)),
            _ => self.effects.push(member.send(Signal::KILL, StopScope::Group)),
        }
    }

    pub(super) fn on_replace_failed(&mut self, failure: StartFailure) {
        let Some(index) = self.promised(failure.local_rank()) else { return };
        self.members[index].place = Place::Free;
        self.report(Event::ReplaceFailed(failure));
        self.sweep_when_all_have_ended();
    }

    /// Forgets the pending clean-ups and the pending replacements, because the nursery (the process that starts the
    /// workers) would have performed them and is lost.
    pub(super) fn forget_places(&mut self) {
        self.left.clear();
        for member in self.members.iter_mut().filter(|m| m.place == Place::Promised) {
            member.place = Place::Free;
        }
    }

    /// Shortens the deadlines of replacements that are being started, so that they do not delay the end of the group.
    pub(super) fn hasten_starts(&mut self) {
        let starting: Vec<u32> = self.starting().collect();
        let hasten = |local_rank| Effect::Hasten(Deadline::Replace(local_rank), LAST_CHANCE);
        self.effects.extend(starting.into_iter().map(hasten));
    }
}
