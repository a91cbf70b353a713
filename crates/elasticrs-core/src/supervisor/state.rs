//! State machine for one group of workers. A pure function maps inputs to effects. It uses no I/O, clocks or locks.

use std::collections::VecDeque;
use std::time::Duration;

use elasticrs_nursery::protocol::{Savers, SweepLimits};
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::signal::Signal;

pub use self::hangs::Snapshot;
use self::hangs::{HeldExit, PendingAction, Records};
use self::keeping::{HoldRule, Order};
pub use super::deadlines::Deadline;
use super::deadlines::{AT_ONCE, GIVE_UP_AFTER};
use super::event::{
    Event, ExitStage, KillReason, NurseryExit, Origin, Outcome, StartFailure, SweepOutcome, TimerExpired, WorkerRaised,
};
use super::evidence::WorkerEvidence;
use crate::spec::{Descendants, GroupPolicy, StopPolicy, StopScope};
use crate::timer::hang::{Limits, RemoteHang, Watch};

/// Time after which a worker that was stopped by a signal is reported as paused.
pub(crate) const PAUSE_REPORT_DELAY: Duration = Duration::from_secs(1);
/// Time between SIGTERM and SIGKILL for descendants that are still running after the time set by `--linger`.
const LINGERER_GRACE: Duration = Duration::from_secs(1);
/// Time limit for cleaning up leftover processes if some workers did not exit after SIGKILL. The limit is short,
/// because the descendants of these workers will not exit either.
pub(super) const HOPELESS_SWEEP: Duration = Duration::from_secs(1);

/// Input of a group's state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    /// A member has exited.
    Exited { pid: i32, exit: WorkerExit, seen: Stamp },
    /// A member was stopped by a signal.
    Paused { pid: i32, signal: i32 },
    /// A stopped member is running again.
    Continued { pid: i32 },
    /// The caller requests a stop of the group.
    Stop(StopPolicy),
    /// The caller requests a stop of the group because a rank on another node hangs.
    StopForHang(StopPolicy, RemoteHang),
    /// The caller requests that a signal be sent to the workers with these local ranks. `None` means all workers.
    Signal(Signal, Option<Vec<u32>>),
    /// The agent has received this signal and forwards it to the running workers with these local ranks. Forwarding
    /// does not stop the group, so a worker that exits because of the signal is handled like any other exiting worker.
    Forward(Signal, Vec<u32>),
    /// Suspend the group and pause its deadlines.
    Suspend,
    /// Resume a suspended group.
    Resume,
    /// A deadline has passed.
    Expired(Deadline),
    /// Result of [`Effect::Sweep`].
    Swept(SweepOutcome),
    /// The nursery has died. Its workers die, too, because the kernel sends them their parent-death signal.
    NurseryLost(NurseryExit),
    /// The agent did not renew its lease before the deadline for killing all workers. The nursery is killing them.
    Fenced,
    /// Members with these pids have died, but their exits have not been reported yet.
    ///
    /// If [`Group::may_signal`] returns true for an input, pass `Dead` before that input. Otherwise, a worker that died
    /// by itself would seem to have been stopped by the group.
    Dead(Vec<i32>),
    /// A member, or one of its descendants, did not release a timer in time.
    TimerExpired(TimerExpired),
    /// Start watching all current members for hangs.
    Watch(Limits),
    /// The workers' heartbeats and last output. If [`Group::needs_snapshot`] returns true for an input, pass `Snapshot`
    /// before that input.
    Snapshot(Snapshot),
    /// Result of [`Effect::TakeEvidence`].
    Evidence(Vec<WorkerEvidence>),
    /// Reply to [`Effect::TakeRecords`]. Each member has written its flight record, or cannot write a record within the
    /// time limit.
    Recorded,
    /// Members, or their descendants, have recorded uncaught exceptions. `dying` contains the pids of the members that
    /// are already exiting in the kernel, because the exit of such a member may have caused the exceptions.
    Raised { workers: Vec<WorkerRaised>, dying: Vec<i32> },
    /// Result of a progress check of a member that is exiting after an exception. `progressed` is true if the member
    /// has made progress since the previous check. It is `None` if progress cannot be determined, for example at the
    /// first check.
    ExitSampled { local_rank: u32, progressed: Option<bool> },
    /// A process that Python started was added to the group.
    Adopted { local_rank: u32, pid: i32 },
    /// Result of [`Effect::SweepWorker`].
    WorkerSwept(SweepOutcome),
    /// A replacement for this worker is being started. The caller has checked that [`Group::refusal`] returns `None`.
    Replace { local_rank: u32 },
    /// The replacement worker is running.
    Replaced { local_rank: u32, pid: i32, started: Stamp },
    /// The replacement worker could not be started.
    ReplaceFailed(StartFailure),
    /// A worker has said whether it can copy its state. `pace` is the time that a copy is expected to take. It is `None`
    /// if the worker can no longer copy its state.
    Keeper { local_rank: u32, pace: Option<Duration> },
    /// A worker's answer to [`Effect::OrderCopies`]: it has copied its state, or cannot copy it.
    Copied { local_rank: u32 },
}

/// An action for the executor. The executor carries out actions in the order in which they are returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Send a signal to a worker, or to its process group.
    Signal {
        /// Pid of the worker, which also identifies its process group. The worker may have exited.
        pid: i32,
        to: StopScope,
        signal: Signal,
    },
    /// Send the signal of an expired timer to the process that owns the timer: a worker or its descendant.
    SignalProcess { pid: i32, signal: Signal },
    /// Set a deadline.
    Arm(Deadline, Duration),
    /// Set a deadline, unless it is already set to an earlier time.
    Hasten(Deadline, Duration),
    /// Cancel a deadline.
    Disarm(Deadline),
    /// Pause all deadlines.
    Freeze,
    /// Resume all deadlines.
    Thaw,
    /// Stop all remaining processes of the group. Answered by [`Input::Swept`]. Replaces an earlier request that is
    /// still pending.
    Sweep(SweepLimits),
    /// Same as [`Self::Sweep`], but do not kill processes that may be saving.
    SweepOthers(SweepLimits, Savers),
    /// Kill the processes that this worker left behind when it exited. At most one [`Self::SweepWorker`] is pending at
    /// a time.
    ///
    /// Answered by [`Input::WorkerSwept`], unless a later [`Self::Sweep`] replaces the request.
    SweepWorker { local_rank: u32, pid: i32 },
    /// Gather diagnostics, such as stack traces, about all members. Answered by [`Input::Evidence`].
    TakeEvidence {
        title: String,
        /// True if the executor also measures whether the members that are outside of collectives are busy.
        measures_work: bool,
        /// Local ranks of the members that go on afterwards, because only failed members are replaced.
        spared: Vec<u32>,
    },
    /// Request the flight records of all members. Answered by [`Input::Recorded`] within a short time limit.
    TakeRecords,
    /// Order the workers with these local ranks to copy their states, because they are about to be stopped. Each of them
    /// answers with [`Input::Copied`].
    OrderCopies(Vec<u32>),
    /// Report to Python which workers were ordered to copy their states, and which of them have answered. The executor
    /// adds the times at which the wait for the copies began and ended.
    ReportCopies { asked: Vec<u32>, answered: Vec<u32> },
    /// Report a failed worker to Python. The executor adds the time at which all other workers had been signalled.
    ReportFailure {
        local_rank: u32,
        seen: Stamp,
        /// Number of other workers that are stopped because of the failure.
        siblings: u32,
    },
    /// Report an event to Python.
    Report(Event),
    /// Report the end of the group to Python. The executor adds the time and the wait channels of the stuck workers.
    ReportEnd(GroupOutcome),
}

/// Result of a finished group. See [`Event::GroupEnded`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupOutcome {
    pub outcome: Outcome,
    pub nursery: Option<NurseryExit>,
    /// Local rank and pid of each worker that did not exit after SIGKILL.
    pub stuck_workers: Vec<(u32, i32)>,
    pub swept: SweepOutcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The group is not being stopped, and workers may be running.
    Running,
    /// The stop signal was sent to the workers. Workers that are left at [`Deadline::Kill`] get SIGKILL.
    Stopping,
    /// SIGKILL was sent to the workers. The supervisor stops waiting for the workers at [`Deadline::GiveUp`].
    Killing,
    /// All workers have exited, or did not exit after SIGKILL. Their descendants are being cleaned up. `lingering` is
    /// true while the descendants are still allowed to run.
    Sweeping { lingering: bool },
    /// All workers have exited after a stop signal, but processes that they left behind may still be saving. These
    /// processes may run until the end of the grace period ([`Deadline::Kill`]).
    Saving,
    /// The end of the group was reported.
    Finished,
}

/// State of one group, from its start to its end.
#[derive(Debug)]
pub struct Group {
    members: Vec<Member>,
    pub(super) policy: GroupPolicy,
    phase: Phase,
    stop_signal: Option<Signal>,
    /// Time between the first stop signal and SIGKILL.
    grace: Duration,
    /// Outcome of the group. Starts as `Succeeded`, and changes if an event stops the group.
    outcome: Outcome,
    nursery: Option<NurseryExit>,
    suspended: bool,
    watch: Option<Watch>,
    snapshot: Snapshot,
    /// Effects of the current input.
    effects: Vec<Effect>,
    /// Actions that wait for diagnostics about the workers, or for the end of a delay. `None` if there is nothing to
    /// wait for.
    waiting: Option<Vec<PendingAction>>,
    /// Diagnostics that were complete before the exit code of a dead worker was known. They are used when its exit is
    /// reported. `None` if nothing waits for an exit.
    gathered: Option<Vec<WorkerEvidence>>,
    /// Indices of failed members that still have leftover processes, in exit order. The first one is being cleaned up.
    left: VecDeque<usize>,
    records: Records,
    /// Noticed exits of members, oldest first. They are handled once the other members have written their flight
    /// records (files in which torch records collectives). See [`hangs`].
    held: Vec<HeldExit>,
    order: Order,
    /// True if [`Deadline::Kill`] has expired, but a member was not killed because it is still exiting after its
    /// exception. See [`Member::is_excused`].
    is_overdue: bool,
}

impl Group {
    /// Creates the state of a group whose workers have these pids, ordered by local rank.
    pub fn new(pids: &[i32], policy: GroupPolicy) -> Self {
        let members = (0..).zip(pids).map(|(local_rank, &pid)| Member::new(local_rank, pid, false)).collect();
        Self {
            members,
            policy,
            phase: Phase::Running,
            stop_signal: None,
            grace: Duration::ZERO,
            outcome: Outcome::Succeeded,
            nursery: None,
            suspended: false,
            watch: None,
            snapshot: Snapshot::default(),
            effects: Vec::new(),
            waiting: None,
            gathered: None,
            left: VecDeque::new(),
            records: Records::default(),
            held: Vec::new(),
            order: Order::default(),
            is_overdue: false,
        }
    }

    /// Like [`Self::rank_of`], but returns `None` for a failed member that is about to exit, because such a member is
    /// not watched for hangs.
    pub(crate) fn watched_rank_of(&self, pid: i32) -> Option<u32> {
        self.members.iter().find(|m| m.pid == pid && m.runs() && m.condemned.is_none()).map(|m| m.local_rank)
    }

    /// Returns true until the group starts to stop.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Returns true if the end of the group was reported.
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Finished
    }

    /// Returns the local rank of the member with this pid. `None` if there is no such member, or if it has exited.
    pub(crate) fn rank_of(&self, pid: i32) -> Option<u32> {
        self.members.iter().find(|m| m.pid == pid && m.runs()).map(|m| m.local_rank)
    }

    /// Returns the pids of the members whose exits have not been reported yet.
    pub fn living(&self) -> impl Iterator<Item = i32> {
        self.members.iter().filter(|m| !m.ended).map(|m| m.pid)
    }

    /// Returns true if `input` may make the group signal its members. Before such an input, pass [`Input::Dead`] to
    /// [`Self::on_input`], because members that are already dead must not be recorded as signalled.
    pub(crate) fn may_signal(&self, input: &Input) -> bool {
        if !self.held.is_empty() {
            return true;
        }
        match input {
            Input::Exited { exit, .. } => match self.phase {
                Phase::Running => {
                    let is_anyone_ending = self.members.iter().any(Member::ends_by_its_exception);
                    self.waiting.is_some() || !exit.is_success() || is_anyone_ending
                }
                Phase::Stopping => self.waiting.is_some(),
                Phase::Killing | Phase::Sweeping { .. } | Phase::Saving | Phase::Finished => false,
            },
            Input::Raised { .. } => self.phase == Phase::Running,
            Input::Stop(_)
            | Input::StopForHang(..)
            | Input::Signal(..)
            | Input::Forward(..)
            | Input::Expired(
                Deadline::Kill | Deadline::Check | Deadline::Hang | Deadline::Condemned(_) | Deadline::Copies,
            )
            | Input::Keeper { .. }
            | Input::Copied { .. }
            | Input::ExitSampled { .. }
            | Input::Evidence(_) => true,
            _ => false,
        }
    }

    /// Handles an input and returns the effects. This is the only function that changes the state of the group.
    #[must_use]
    pub(crate) fn on_input(&mut self, input: Input) -> Vec<Effect> {
        if self.phase == Phase::Finished {
            return Vec::new();
        }
        self.release_before(&input);
        let (before, rule) = (self.phase, HoldRule::of(&input));
        match input {
            Input::Exited { pid, exit, seen } => self.on_exit(pid, exit, seen),
            Input::Paused { pid, signal } => self.on_paused(pid, signal),
            Input::Continued { pid } => self.on_continued(pid),
            Input::Stop(policy) => {
                self.settle();
                self.on_stop(policy);
            }
            Input::StopForHang(policy, remote) => self.on_stop_for_hang(policy, remote),
            Input::Signal(signal, ranks) => self.on_signal(signal, ranks.as_deref()),
            Input::Forward(signal, ranks) => {
                let to = self.policy.stop_scope;
                let running = self.members.iter().filter(|m| m.runs() && ranks.contains(&m.local_rank));
                self.effects.extend(running.map(|m| Effect::Signal { pid: m.pid, to, signal }));
            }
            Input::Suspend => self.on_suspend(),
            Input::Resume if self.suspended => {
                self.on_resume();
                self.look();
            }
            Input::Expired(timer) => self.on_expired(timer),
            Input::Swept(swept) if matches!(self.phase, Phase::Sweeping { .. } | Phase::Saving) => {
                self.report_end(swept);
            }
            // Ignore `Resume` if the group is not suspended, and `Swept` if no clean-up is running.
            Input::Resume | Input::Swept(_) => {}
            Input::NurseryLost(exit) => self.on_nursery_lost(exit),
            Input::Fenced => self.on_fenced(),
            Input::Dead(pids) => self.on_dead(&pids),
            Input::TimerExpired(timer) if timer.signal.is_some() => {
                self.take_evidence(PendingAction::Timer(timer));
            }
            Input::TimerExpired(timer) => self.on_timer_due(timer),
            Input::Watch(limits) => self.on_watch(limits),
            Input::Snapshot(snapshot) => self.snapshot = snapshot,
            Input::Evidence(found) => self.on_evidence(found),
            Input::Recorded => self.on_recorded(),
            Input::Raised { workers, dying } => self.on_raised(workers, &dying),
            Input::ExitSampled { local_rank, progressed } => {
                self.on_exit_sampled(local_rank, progressed);
            }
            Input::Adopted { local_rank, pid } => self.on_adopted(local_rank, pid),
            Input::WorkerSwept(swept) => self.on_worker_swept(swept),
            Input::Replace { local_rank } => self.on_replace(local_rank),
            Input::Replaced { local_rank, pid, started } => self.on_replaced(local_rank, pid, started),
            Input::ReplaceFailed(failure) => self.on_replace_failed(failure),
            Input::Keeper { local_rank, pace } => self.on_keeper(local_rank, pace),
            Input::Copied { local_rank } => self.on_copied(local_rank),
        }
        let effects = std::mem::take(&mut self.effects);
        self.order_copies_first(effects, before, rule)
    }

    fn report(&mut self, event: Event) {
        self.effects.push(Effect::Report(event));
    }

    fn on_exit(&mut self, pid: i32, exit: WorkerExit, seen: Stamp) {
        let Some(index) = self.members.iter().position(|m| m.pid == pid && !m.ended) else { return };
        if self.is_held(index, exit) {
            return self.held.push(HeldExit { pid, exit, seen });
        }
        self.settle_before_exit(index, exit);
        let member = &mut self.members[index];
        member.ended = true;
        if member.is_ended_by_stop(exit) {
            member.stop_role = StopRole::EndedBySignal;
        }
        let (local_rank, sent) = (member.local_rank, member.sent);
        if !matches!(member.pause, Pause::Running) {
            self.effects.push(Effect::Disarm(Deadline::Paused(local_rank)));
        }
        if member.raised.is_some() {
            self.effects.push(Effect::Disarm(Deadline::Exit(local_rank)));
        }
        let condemned = member.condemned.is_some();
        if condemned || member.is_slow() {
            self.effects.push(Effect::Disarm(Deadline::Condemned(local_rank)));
        }
        let has_failed = self.phase == Phase::Running && (!exit.is_success() || condemned);
        let is_replaced = has_failed && self.survives(index);
        if has_failed && !is_replaced {
            self.fail(local_rank, pid, None, seen, None);
        }
        self.report(Event::WorkerExited { local_rank, pid, exit, sent, seen });
        if is_replaced {
            return self.leave(index);
        }
        self.stop_rest_of(pid);
        self.sweep_when_all_have_ended();
        self.kill_when_nobody_is_excused();
        self.stop_after_raise(&[]);
    }

    /// Records members that have died but whose exits have not been reported.
    fn on_dead(&mut self, pids: &[i32]) {
        for member in &mut self.members {
            member.dead |= pids.contains(&member.pid);
        }
    }

    /// Signals the other processes in a worker's process group after the worker has exited during a stop. The worker no
    /// longer needs its helper processes.
    ///
    /// Does nothing after the last exit, because all leftover processes are then cleaned up.
    fn stop_rest_of(&mut self, pid: i32) {
        let Some(signal) = self.stop_signal.filter(|_| self.phase == Phase::Stopping) else { return };
        if self.all_have_ended() {
            return;
        }
        if let Some(member) = self.members.iter_mut().find(|m| m.pid == pid && !m.group_has_got(signal)) {
            self.effects.push(member.send(signal, StopScope::Group));
        }
    }

    fn on_stop(&mut self, policy: StopPolicy) {
        match self.phase {
            Phase::Running => {
                self.outcome = Outcome::Stopped;
                self.begin_stop(policy, None);
                self.sweep_when_all_have_ended();
            }
            // Send the new stop signal. The deadline for SIGKILL may become earlier, but never later. The new signal is
            // sent to all members, including members that are exiting after an exception.
            Phase::Stopping => {
                for member in self.members.iter_mut().filter(|m| m.is_excused()) {
                    member.stop_role = StopRole::Usual;
                }
                self.is_overdue = false;
                let killed = self.killed_by(policy);
                self.begin_stop(policy, None);
                if let Some(killed) = killed {
                    self.report(Event::WorkersKilled(killed));
                }
            }
            Phase::Sweeping { lingering: true } => {
                self.outcome = Outcome::Stopped;
                self.sweep(AT_ONCE);
            }
            Phase::Saving if policy.is_hard() => self.kill_savers(KillReason::Request, Duration::ZERO),
            Phase::Saving => {
                self.grace = self.grace.min(policy.grace);
                self.effects.push(Effect::Hasten(Deadline::Kill, policy.grace));
            }
            Phase::Killing | Phase::Sweeping { lingering: false } | Phase::Finished => {}
        }
    }

    fn on_signal(&mut self, signal: Signal, ranks: Option<&[u32]>) {
        for member in self.members.iter_mut().filter(|m| !m.ended) {
            if ranks.is_none_or(|ranks| ranks.contains(&member.local_rank)) {
                let to = if signal == Signal::KILL { StopScope::Group } else { self.policy.stop_scope };
                self.effects.push(member.send(signal, to));
            }
        }
    }

    fn on_expired(&mut self, timer: Deadline) {
        match timer {
            Deadline::Kill if self.phase == Phase::Stopping => self.kill_overdue(),
            Deadline::Kill if self.phase == Phase::Saving => self.on_overdue_saves(),
            Deadline::GiveUp if self.phase == Phase::Killing => self.sweep_on_end(),
            Deadline::Paused(local_rank) => {
                let paused = self.members.iter_mut().find(|m| m.local_rank == local_rank && !m.ended);
                if let Some(member) = paused
                    && let Pause::Noticed(signal) = member.pause
                {
                    member.pause = Pause::Reported;
                    let pid = member.pid;
                    self.report(Event::WorkerPaused { local_rank, pid, signal });
                }
            }
            Deadline::Condemned(local_rank) => self.on_condemned(local_rank),
            Deadline::Check | Deadline::Hang => self.on_check(),
            // Ignore these timers, because they do not apply in the current phase or are handled by the executor.
            Deadline::Kill
            | Deadline::GiveUp
            | Deadline::Start
            | Deadline::Fence
            | Deadline::Warm
            | Deadline::SlowImport
            | Deadline::Exit(_)
            | Deadline::Sweep
            | Deadline::Copies
            | Deadline::Replace(_) => {}
        }
    }

    /// Kills the process groups of all workers, including those that Python started. The nursery kills only the workers
    /// that it started itself.
    fn on_fenced(&mut self) {
        if matches!(self.phase, Phase::Running | Phase::Sweeping { lingering: true }) {
            self.outcome = Outcome::Stopped;
        }
        if self.suspended {
            // Resume the paused deadlines, but do not send SIGCONT, because the suspended workers must not run again
            // before SIGKILL.
            self.thaw();
        }
        match self.phase {
            Phase::Running | Phase::Stopping => {
                self.kill();
                self.sweep_when_all_have_ended();
            }
            Phase::Sweeping { lingering: true } => {
                self.sweep(AT_ONCE);
            }
            Phase::Saving => self.end_saves(),
            Phase::Killing | Phase::Sweeping { lingering: false } | Phase::Finished => {}
        }
    }

    fn on_nursery_lost(&mut self, exit: NurseryExit) {
        self.nursery = Some(exit);
        self.forget_places();
        match self.phase {
            Phase::Running => self.outcome = Outcome::Lost,
            // Start a new clean-up in this process, because the lost nursery cannot complete the pending clean-up.
            Phase::Sweeping { .. } => return self.sweep(AT_ONCE),
            Phase::Saving => return self.end_saves(),
            Phase::Stopping | Phase::Killing | Phase::Finished => {}
        }
        // Kill all workers, because those that Python started do not die together with the nursery.
        if self.phase != Phase::Killing {
            self.kill();
        }
        self.sweep_when_all_have_ended();
    }

    /// Sends the stop signal to every worker except the one with the pid `but`, which was already signalled or is
    /// exiting by itself. Also signals the process groups of workers that have exited, because their leftover processes
    /// may still occupy an accelerator.
    fn begin_stop(&mut self, policy: StopPolicy, but: Option<i32>) {
        self.on_resume();
        if policy.is_hard() {
            return self.kill_unless_excused();
        }
        // Signal the running members first, because the group has to wait for their exits.
        for ended in [false, true] {
            let members = self.members.iter_mut().filter(|m| m.ended == ended && !m.is_gone());
            for member in members.filter(|m| Some(m.pid) != but && !m.is_excused()) {
                let to = if member.runs() { self.policy.stop_scope } else { StopScope::Group };
                self.effects.push(member.stop(policy.signal, to));
            }
        }
        for member in self.members.iter().filter(|m| !m.ended && (m.adopted || m.pause != Pause::Running)) {
            self.effects.push(to_group(member.pid, Signal::CONT));
        }
        // Use `Hasten`, so that a later stop request cannot postpone the deadline.
        self.effects.push(Effect::Hasten(Deadline::Kill, policy.grace));
        self.grace = if self.phase == Phase::Stopping { self.grace.min(policy.grace) } else { policy.grace };
        (self.phase, self.stop_signal) = (Phase::Stopping, Some(policy.signal));
    }

    /// Kills the members that did not exit within their grace period, and reports them.
    fn kill_overdue(&mut self) {
        let killed = self.overdue_workers();
        self.kill_unless_excused();
        for killed in killed {
            self.report(Event::WorkersKilled(killed));
        }
    }

    /// Kills all members except the excused members, because these have their own time limits.
    fn kill_unless_excused(&mut self) {
        if !self.is_anyone_excused() {
            return self.kill();
        }
        for member in self.members.iter_mut().filter(|m| !m.is_gone() && !m.is_excused()) {
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
        }
        (self.phase, self.stop_signal, self.is_overdue) = (Phase::Stopping, Some(Signal::KILL), true);
        self.effects.push(Effect::Disarm(Deadline::Kill));
    }

    /// Kills the remaining processes if no excused member is running and the other members have already been killed.
    fn kill_when_nobody_is_excused(&mut self) {
        if self.phase == Phase::Stopping && self.is_overdue && !self.is_anyone_excused() {
            self.kill();
        }
    }

    fn is_anyone_excused(&self) -> bool {
        self.members.iter().any(Member::is_excused)
    }

    fn kill(&mut self) {
        for member in self.members.iter_mut().filter(|m| !m.is_gone()) {
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
        }
        self.hasten_starts();
        self.phase = Phase::Killing;
        self.effects.push(Effect::Disarm(Deadline::Kill));
        self.effects.push(Effect::Arm(Deadline::GiveUp, GIVE_UP_AFTER));
    }

    fn sweep_when_all_have_ended(&mut self) {
        let working = matches!(self.phase, Phase::Running | Phase::Stopping | Phase::Killing);
        if working && self.all_have_ended() {
            self.sweep_on_end();
        }
    }

    /// Returns true if all members have exited and no replacement can follow.
    ///
    /// In a running group, a failed member can still be replaced. In a group that is being stopped, only a replacement
    /// that is already starting can follow.
    fn all_have_ended(&self) -> bool {
        let is_over =
            |m: &Member| m.place == Place::Taken || m.place != Place::Promised && self.phase != Phase::Running;
        self.members.iter().all(|m| m.ended && is_over(m))
    }

    fn sweep_on_end(&mut self) {
        if self.phase == Phase::Stopping && !self.is_overdue && self.sweep_others() {
            return;
        }
        self.effects.push(Effect::Disarm(Deadline::Kill));
        self.effects.push(Effect::Disarm(Deadline::GiveUp));
        match (self.outcome, self.policy.on_success) {
            (Outcome::Succeeded, Descendants::Keep) => self.report_end(SweepOutcome::default()),
            (Outcome::Succeeded, Descendants::Linger(linger)) => {
                self.sweep(SweepLimits { linger, grace: LINGERER_GRACE, give_up: GIVE_UP_AFTER });
            }
            (Outcome::Failed | Outcome::Stopped | Outcome::Lost, _) => {
                let hopeless = self.members.iter().any(|m| !m.ended);
                self.sweep(if hopeless { SweepLimits::at_once(HOPELESS_SWEEP) } else { AT_ONCE });
            }
        }
    }

    fn sweep(&mut self, limits: SweepLimits) {
        self.phase = Phase::Sweeping { lingering: !limits.linger.is_zero() };
        self.effects.push(Effect::Sweep(limits));
    }

    fn report_end(&mut self, swept: SweepOutcome) {
        self.phase = Phase::Finished;
        if self.suspended {
            self.thaw(); // the next group uses the same deadlines
        }
        let stuck_workers = self.members.iter().filter(|m| !m.ended).map(|m| (m.local_rank, m.pid)).collect();
        let (outcome, nursery) = (self.outcome, self.nursery);
        self.effects.push(Effect::ReportEnd(GroupOutcome { outcome, nursery, stuck_workers, swept }));
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Pause {
    #[default]
    Running,
    /// The worker was stopped by this signal, but the stop has not been reported yet.
    Noticed(i32),
    Reported,
}

/// State of a worker's place in a group that replaces failed workers. The states are described in [`failing`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Taken,
    Left,
    Free,
    Promised,
}

/// Whether a worker gets the stop signal when its group is stopped, and how it reacts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum StopRole {
    #[default]
    Usual,
    /// The worker's own exception stopped the group. The worker gets no stop signal, because it exits by itself.
    /// Instead of the grace period, the time limit for exits after an exception applies to it.
    Excused,
    /// The worker had no handler for the stop signal, so the signal killed the worker.
    EndedBySignal,
}

#[derive(Debug, Default)]
struct Member {
    local_rank: u32,
    pid: i32,
    adopted: bool,
    ended: bool,
    /// True if the process is dead but its exit has not been reported yet.
    dead: bool,
    sent: Option<Signal>,
    /// Signal that asked the worker to exit within its grace period. `None` if no signal was sent, for example
    /// because the worker is exiting slowly after an uncaught exception.
    asked_by: Option<Signal>,
    /// Last signal that was sent to the worker's whole process group.
    group_sent: Option<Signal>,
    pause: Pause,
    raised: Option<WorkerRaised>,
    /// Time at which the supervisor considered the worker failed although it was still running. The failure counts even
    /// if the worker exits with code 0.
    ///
    /// `None` if there was no such failure. Set only in groups that replace failed workers.
    condemned: Option<Stamp>,
    place: Place,
    stop_role: StopRole,
    /// Time that a copy of the worker's state is expected to take. `None` if the worker cannot copy its state.
    copy_time: Option<Duration>,
}

impl Member {
    fn new(local_rank: u32, pid: i32, adopted: bool) -> Self {
        Self { local_rank, pid, adopted, ..Self::default() }
    }

    /// Records that a signal is sent to the worker or its process group, and returns the effect that sends it.
    fn send(&mut self, signal: Signal, to: StopScope) -> Effect {
        if self.runs() {
            self.sent = Some(signal);
        }
        if to == StopScope::Group {
            self.group_sent = Some(signal);
        }
        Effect::Signal { pid: self.pid, to, signal }
    }

    /// Same as [`Self::send`], for a signal that asks the worker to exit within its grace period.
    fn stop(&mut self, signal: Signal, to: StopScope) -> Effect {
        self.asked_by = Some(signal);
        self.send(signal, to)
    }

    /// Records that `signal` is sent to the worker because a timer has expired. The signal asks the worker to exit
    /// within its grace period.
    fn is_stopped_by(&mut self, signal: Signal) {
        (self.asked_by, self.sent) = (Some(signal), Some(signal));
    }

    /// Returns the reason for killing the worker after its grace period.
    fn why_overdue(&self) -> KillReason {
        self.asked_by.map_or(KillReason::SlowExit, KillReason::AfterSignal)
    }

    /// Returns true if the last signal sent to the worker's whole process group was this one or SIGKILL.
    fn group_has_got(&self, signal: Signal) -> bool {
        self.group_sent.is_some_and(|sent| sent == signal || sent == Signal::KILL)
    }

    /// Returns true if the worker is still exiting after the exception that has stopped the group.
    fn is_excused(&self) -> bool {
        self.stop_role == StopRole::Excused && self.runs()
    }

    /// Returns true if this exit is the default action of the signal that was sent to stop the worker.
    fn is_ended_by_stop(&self, exit: WorkerExit) -> bool {
        let sent = self.sent.filter(|sent| *sent != Signal::KILL).map(Signal::number);
        matches!(exit, WorkerExit::Signaled { signal } if sent == Some(signal))
    }

    /// Returns true if the worker is exiting because of its own uncaught exception. An exception in a descendant does
    /// not count, because the worker may survive it.
    fn ends_by_its_exception(&self) -> bool {
        self.runs() && self.raised.as_ref().is_some_and(|raised| raised.origin == Origin::Own && raised.pid == self.pid)
    }

    /// Returns true if the worker's exit after an exception has exceeded its time limit but still makes progress.
    fn is_slow(&self) -> bool {
        self.raised.as_ref().is_some_and(|raised| raised.exit == ExitStage::Slow)
    }

    /// Returns true if all processes of the worker are gone and its pid may be reused.
    fn is_gone(&self) -> bool {
        matches!(self.place, Place::Free | Place::Promised)
    }

    /// Returns true unless the worker is known to have exited.
    fn runs(&self) -> bool {
        !self.ended && !self.dead
    }
}

/// Returns the effect that sends a signal such as SIGCONT to a whole process group. The signal is not recorded as a
/// stop signal, because it does not ask the worker to exit.
fn to_group(pid: i32, signal: Signal) -> Effect {
    Effect::Signal { pid, to: StopScope::Group, signal }
}

mod failing;
mod hangs;
mod keeping;
mod pausing;
mod saving;
#[cfg(test)]
mod tests;
