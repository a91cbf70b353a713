//! Handles workers that hang: decides when to check heartbeats, when to gather evidence, and which worker to blame.
//! Also requests the flight records (files in which torch records collectives) when a worker fails and another worker
//! may be the cause.
//!
//! The rules for the time limits are in [`crate::timer::hang`]. Workers may recover or exit while evidence is gathered.
//! Decisions therefore use the latest heartbeats when the evidence is complete. If a worker fails before that, the
//! decisions about this worker are made before its exit is reported. If a worker exits with code 0 without having been
//! signalled, the decisions about this worker are dropped, because the worker has finished its work (**HANG-11**).

use std::time::Duration;

use elasticrs_sys::clock::{Stamp, nanoseconds};
use elasticrs_sys::process::WorkerExit;

use super::{Deadline, Effect, Event, Group, Input, Member, Phase};
use crate::spec::StopPolicy;
use crate::supervisor::event::{Origin, RankSeen, TimerExpired, WorkerHung};
use crate::supervisor::evidence::WorkerEvidence;
use crate::timer::hang::{
    Activity, Ground, Limits, Missed, Overdue, RankState, RemoteHang, Suspect, Verdict, Watch, blame, blame_beside,
    in_section, slow, still_late, waits,
};

/// Heartbeats and output of all workers at one point in time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub at: Stamp,
    /// Heartbeat state of each member. Processes that Python started come last, and are missing if heartbeats are not
    /// enabled for them.
    pub seen: Vec<RankState>,
    /// Time of the last output line of any worker. `None` if there was no output.
    pub line: Option<u64>,
}

/// Action that waits until diagnostics about the workers are complete, or until a delay has passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PendingAction {
    Timer(TimerExpired),
    /// Kill the worker with this local rank, because its exit after an uncaught exception has stalled.
    Exit(u32),
    Hung(HangCheck),
    /// Stop the group because a rank on another node hangs. If that rank is waiting for a local worker, report that
    /// worker first.
    Stop(StopPolicy, RemoteHang, HangCheck),
    /// Kill a hung worker that has already been reported, and stop the other workers.
    KillHung {
        local_rank: u32,
        seen: Stamp,
        due: u64,
    },
    /// Stop the group after a delay, in which the other nodes can gather diagnostics about their workers.
    StopLater {
        policy: StopPolicy,
        due: u64,
    },
}

/// Result of a check of the heartbeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HangCheck {
    late: Vec<Overdue>,
    seen: Vec<RankState>,
    at: Stamp,
}

impl PendingAction {
    fn is_of_same_rank(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Timer(one), Self::Timer(other)) if one.local_rank == other.local_rank)
    }

    /// Returns true if the action was caused by this member, for example by its missed heartbeat.
    ///
    /// If this member fails, carry out the action before the exit is handled, because actions have no effect on exited
    /// members.
    fn concerns(&self, member: usize, local_rank: u32) -> bool {
        match self {
            Self::Timer(timer) => timer.local_rank == local_rank,
            Self::KillHung { local_rank: hung, .. } => *hung == local_rank,
            Self::Exit(_) | Self::StopLater { .. } => false,
            Self::Hung(check) | Self::Stop(_, _, check) => check.late.iter().any(|overdue| overdue.rank == member),
        }
    }

    /// Returns true if the action is dropped when this member exits with code 0. This applies to actions that the
    /// member caused, as long as neither the member nor another node has been notified of the action.
    fn is_cancelled_by(&self, member: usize, local_rank: u32) -> bool {
        matches!(self, Self::Timer(_) | Self::Hung(_)) && self.concerns(member, local_rank)
    }

    /// Returns true if the late ranks may be slow and not hung: each of them has missed its next heartbeat or
    /// its next line of output. See [`slow`].
    fn may_be_slow(&self) -> bool {
        matches!(self, Self::Hung(check)
            if check.late.iter().all(|overdue| matches!(overdue.missed, Missed::Step | Missed::Line)))
    }

    fn title(&self) -> String {
        match self {
            Self::Timer(TimerExpired { local_rank, scope, .. }) => {
                let scope: String = scope.chars().filter(|character| !character.is_control()).take(100).collect();
                format!("a timer of local rank {local_rank} expired: scope '{scope}'")
            }
            Self::Exit(local_rank) => {
                format!("local rank {local_rank} raised an exception, and its exit makes no progress")
            }
            Self::Hung(HangCheck { late, at, .. }) => {
                let first = late.iter().find(|overdue| overdue.is_due);
                let silent = first.map_or(0, |overdue| at.0.saturating_sub(overdue.since)) / 1_000_000;
                format!("no activity for {}.{:03} s", silent / 1000, silent % 1000)
            }
            Self::Stop(..) | Self::StopLater { .. } => "a rank on another node hangs".to_owned(),
            Self::KillHung { local_rank, .. } => format!("local rank {local_rank} hangs"),
        }
    }

    /// Returns the time at which this action is due, in nanoseconds. `None` if the action has no fixed time, because it
    /// waits for diagnostics.
    fn due(&self) -> Option<u64> {
        match self {
            Self::KillHung { due, .. } | Self::StopLater { due, .. } => Some(*due),
            Self::Timer(_) | Self::Exit(_) | Self::Hung(_) | Self::Stop(..) => None,
        }
    }
}

impl Group {
    /// Returns true if the current heartbeats may be needed to handle this input. If so, pass [`Input::Snapshot`]
    /// first.
    pub(crate) fn needs_snapshot(&self, input: &Input) -> bool {
        let looks = |input: &Input| {
            matches!(input, Input::StopForHang(..) | Input::Suspend | Input::Expired(Deadline::Check | Deadline::Hang))
        };
        matches!(input, Input::Watch(_))
            || self.watch.is_some() && (self.suspended || self.waiting.is_some() || looks(input))
    }

    pub(super) fn on_watch(&mut self, limits: Limits) {
        self.watch = Some(Watch::new(limits, self.members.len(), self.snapshot.at.0));
        self.look();
    }

    /// Carries out the delayed actions if they are due. Otherwise, checks the heartbeats.
    pub(super) fn on_check(&mut self) {
        if self.is_holding() {
            return; // The other workers may be late because they wait for the worker that has failed.
        }
        let due = self.waiting.iter().flatten().find_map(PendingAction::due);
        if due.is_some_and(|due| due <= self.snapshot.at.0) {
            return self.settle();
        }
        self.look();
    }

    /// Checks the heartbeats and sets the time of the next check. Does nothing while a failed member is about to exit,
    /// because members that wait for the failed member would seem to hang.
    pub(super) fn look(&mut self) {
        let is_time = self.phase == Phase::Running && self.waiting.is_none() && !self.is_anyone_condemned();
        let Some(watch) = self.watch.as_mut().filter(|_| is_time) else { return };
        let Snapshot { at, seen, line } = &self.snapshot;
        match watch.look(at.0, seen, *line) {
            Verdict::LookAgain(next) => {
                if let Some((ranks, limit)) = watch.unwatched(at.0, seen, *line) {
                    let members = ranks.iter().map(|rank| &self.members[*rank]).filter(|member| member.runs());
                    let message = unwatched(&members.map(|member| member.local_rank).collect::<Vec<_>>(), limit);
                    self.effects.push(Effect::Report(Event::Degraded { message }));
                }
                if let Some((ranks, limit)) = watch.still_exiting(at.0, seen) {
                    let members = ranks.iter().map(|rank| &self.members[*rank]).filter(|member| member.runs());
                    let ranks = members.map(|member| member.local_rank).collect::<Vec<_>>();
                    let message = still_exiting(&ranks, limit, watch.exit_limit());
                    self.effects.extend((!ranks.is_empty()).then_some(Effect::Report(Event::Degraded { message })));
                }
                self.effects.push(Effect::Arm(Deadline::Hang, Duration::from_nanos(next.saturating_sub(at.0))));
            }
            Verdict::Hung(late) => {
                self.take_evidence(PendingAction::Hung(HangCheck { late, seen: seen.clone(), at: *at }));
            }
        }
    }

    /// Handles a request to stop the group because a rank on another node hangs. Collects the local workers' stack
    /// traces before the stop, because a local worker may have caused the hang.
    pub(super) fn on_stop_for_hang(&mut self, policy: StopPolicy, remote: RemoteHang) {
        let Some(watch) = self.watch.as_mut().filter(|_| self.phase == Phase::Running) else {
            return self.on_stop(policy);
        };
        let Snapshot { at, seen, line } = self.snapshot.clone();
        let silence = nanoseconds(remote.silence);
        let late = watch.suspects(at.0, &seen, line, silence);
        self.take_evidence(PendingAction::Stop(policy, remote, HangCheck { late, seen, at }));
    }

    /// Gathers diagnostics about the workers, and then carries out `action`. If the group is already being stopped,
    /// carries out `action` immediately, without diagnostics.
    pub(super) fn take_evidence(&mut self, action: PendingAction) {
        if let Some(waiting) = &mut self.waiting {
            // Queue only the first expired timer of each rank, because the first timer already decides what happens to
            // the rank. The queue therefore stays short, even if a rank has many timers.
            if !waiting.iter().any(|earlier| earlier.is_of_same_rank(&action)) {
                waiting.push(action);
            }
        } else if self.phase == Phase::Running || self.is_excused_exit(&action) {
            let measures_work = action.may_be_slow();
            let goes_on = |rank: usize, local_rank: u32| self.policy.replaces && !action.concerns(rank, local_rank);
            let members = self.members.iter().enumerate().map(|(rank, member)| (rank, member.local_rank));
            let spared =
                members.filter(|&(rank, local_rank)| goes_on(rank, local_rank)).map(|(_, rank)| rank).collect();
            self.effects.push(Effect::TakeEvidence { title: action.title(), measures_work, spared });
            self.waiting = Some(vec![action]);
        } else {
            self.carry_out(action, &[]);
        }
    }

    /// Returns true if the action handles the stalled exit of a worker whose exception has stopped the group.
    fn is_excused_exit(&self, action: &PendingAction) -> bool {
        matches!(action, PendingAction::Exit(local_rank)
            if self.is_excused(*local_rank))
    }

    /// Carries out the pending actions. If an action depends on how a dead worker exited, keeps the evidence until that
    /// exit has been reported.
    pub(super) fn on_evidence(&mut self, evidence: Vec<WorkerEvidence>) {
        if self.awaits_an_exit() {
            self.gathered = Some(evidence);
            return;
        }
        let Some(waiting) = self.waiting.take() else { return };
        let evidence = &evidence[..];
        for message in evidence.iter().filter_map(|worker| worker.problem.as_ref()) {
            let message = format!("the evidence of a hang could not be written: {message}");
            self.report(Event::Degraded { message });
        }
        let delay = self.watch.as_ref().map_or(Duration::ZERO, Watch::stop_delay);
        if delay.is_zero() || self.policy.replaces || self.phase != Phase::Running {
            self.carry_out_all(waiting, evidence);
        } else {
            self.report_and_delay(waiting, evidence, delay);
        }
        // If the workers have recovered, continue to watch them.
        self.look();
    }

    /// Immediately reports the hung worker, but kills it and stops the other workers only after a delay. The delay lets
    /// the other nodes gather evidence about their own workers, because those workers fail as soon as their peers are
    /// killed.
    fn report_and_delay(&mut self, actions: Vec<PendingAction>, evidence: &[WorkerEvidence], delay: Duration) {
        let due = self.snapshot.at.0.saturating_add(nanoseconds(delay));
        let is_stopped = actions.iter().any(|action| matches!(action, PendingAction::Stop(..)));
        let mut delayed = Vec::new();
        for action in actions {
            let (hung, is_due) = match action {
                PendingAction::Hung(_) if is_stopped => continue,
                PendingAction::Hung(check) => (self.judge_and_tell(check, evidence), true),
                PendingAction::Stop(policy, remote, check) => {
                    delayed.push(PendingAction::StopLater { policy, due });
                    self.judge_beside(check, &remote, evidence)
                }
                action => {
                    self.carry_out(action, evidence);
                    continue;
                }
            };
            let Some(hung) = hung.filter(|hung| self.working(hung.local_rank).is_some()) else { continue };
            if is_due {
                let (local_rank, seen) = (hung.local_rank, hung.seen);
                delayed.insert(0, PendingAction::KillHung { local_rank, seen, due });
            }
            self.report(Event::WorkerHung(hung.into()));
        }
        if !delayed.is_empty() {
            self.effects.push(Effect::Arm(Deadline::Hang, delay));
            self.waiting = Some(delayed);
        }
        if self.phase != Phase::Running {
            self.settle();
        }
    }

    /// Carries out all pending actions immediately, without diagnostics. The worker that caused a hang is therefore
    /// determined from the heartbeats alone.
    pub(super) fn settle(&mut self) {
        self.gathered = None;
        let waiting = self.waiting.take().unwrap_or_default();
        self.carry_out_all(waiting, &[]);
    }

    /// Handles the exit of a worker while evidence is being gathered. If the worker failed, first carries out the
    /// actions that concern this worker. These actions are still justified, because the signal that requests the stacks
    /// may have caused the failure. For example, `pause` returns on any signal. If the worker succeeded, drops these
    /// actions instead. All other actions continue to wait for the evidence.
    pub(super) fn settle_before_exit(&mut self, index: usize, exit: WorkerExit) {
        let has_succeeded = exit.is_success() && self.members[index].condemned.is_none();
        if has_succeeded {
            self.cancel_before_success(index);
        }
        self.take_before_exit(index, has_succeeded);
        if !self.awaits_an_exit()
            && let Some(evidence) = self.gathered.take()
        {
            self.on_evidence(evidence);
        }
    }

    /// Drops the pending actions that this worker caused, because the worker exited with code 0 before the group
    /// signalled it (**HANG-11**). Restarts the time limits of the other workers, because they may have been waiting
    /// for this worker.
    fn cancel_before_success(&mut self, index: usize) {
        let local_rank = self.members[index].local_rank;
        let Some(waiting) = self.waiting.as_mut().filter(|_| self.phase == Phase::Running) else { return };
        let count = waiting.len();
        waiting.retain(|action| !action.is_cancelled_by(index, local_rank));
        if waiting.len() == count {
            return;
        }
        if let Some(watch) = &mut self.watch {
            let Snapshot { at, seen, line } = &self.snapshot;
            watch.forgive_all(at.0, seen, *line);
        }
        self.report(Event::Degraded { message: finished(local_rank) });
    }

    fn take_before_exit(&mut self, index: usize, has_succeeded: bool) {
        let ends_group = !has_succeeded && !self.survives(index)
            || self.members.iter().enumerate().all(|(other, m)| m.ended || other == index);
        let local_rank = self.members[index].local_rank;
        let is_due = |action: &PendingAction| match action {
            PendingAction::Stop(..) if has_succeeded => false,
            PendingAction::Timer(_) | PendingAction::Exit(_) | PendingAction::KillHung { .. } if ends_group => true,
            action => action.concerns(index, local_rank),
        };
        let Some(waiting) = &mut self.waiting else { return };
        let (due, others): (Vec<_>, _) = std::mem::take(waiting).into_iter().partition(is_due);
        *waiting = others;
        if due.iter().any(|action| action.concerns(index, local_rank)) {
            // Treat the worker as running, because actions have no effect on dead workers.
            self.members[index].dead = false;
            if ends_group && !has_succeeded {
                self.revive_overdue(&due);
            }
        }
        if !self.survives(index) {
            return self.carry_out_all(due, &[]);
        }
        for action in due {
            match action {
                // Report only the worker that has exited, because the other late workers may have been waiting for it.
                PendingAction::Hung(check) => {
                    if let Some(hung) = self.judge(check, &[]).filter(|hung| hung.local_rank == local_rank) {
                        self.on_hung(hung);
                    }
                }
                action => self.carry_out(action, &[]),
            }
        }
    }

    /// Treats workers that have exceeded their time limit and have just died as running, so that they can still be
    /// reported as hung.
    ///
    /// This is needed because the signal that requests stack traces may kill several workers at once. The first exit
    /// that is reported ends the group, but may be the exit of a worker that only waited for the hung one.
    fn revive_overdue(&mut self, actions: &[PendingAction]) {
        for action in actions {
            let PendingAction::Hung(check) = action else { continue };
            for overdue in check.late.iter().filter(|overdue| overdue.is_due) {
                self.members[overdue.rank].dead = false;
            }
        }
    }

    /// Returns true if a pending action was caused by a dead member whose exit has not been reported yet. The exit
    /// status decides whether that action is carried out or dropped.
    fn awaits_an_exit(&self) -> bool {
        let is_dead = |(_, member): &(usize, &Member)| member.dead && !member.ended;
        self.members.iter().enumerate().filter(is_dead).any(|(index, member)| {
            self.waiting.iter().flatten().any(|action| action.is_cancelled_by(index, member.local_rank))
        })
    }

    fn carry_out_all(&mut self, mut actions: Vec<PendingAction>, evidence: &[WorkerEvidence]) {
        if actions.iter().any(|action| matches!(action, PendingAction::Stop(..))) {
            // Drop the results of earlier hang checks, because `Stop` contains a newer check of the same workers.
            actions.retain(|action| !matches!(action, PendingAction::Hung(_)));
        }
        for action in actions {
            self.carry_out(action, evidence);
        }
    }

    fn carry_out(&mut self, action: PendingAction, evidence: &[WorkerEvidence]) {
        match action {
            PendingAction::Timer(timer) => self.on_timer_due(timer),
            PendingAction::Exit(local_rank) => self.on_exit_overdue(local_rank),
            PendingAction::Hung(check) => {
                if let Some(hung) = self.judge_and_tell(check, evidence) {
                    self.on_hung(hung);
                }
            }
            PendingAction::Stop(policy, remote, check) => {
                match self.judge_beside(check, &remote, evidence) {
                    (Some(hung), true) => self.on_hung(hung),
                    (Some(hung), false) => self.on_suspected(hung),
                    (None, _) => {}
                }
                self.on_stop(policy);
            }
            PendingAction::KillHung { local_rank, seen, .. } => self.fail_at_once(local_rank, seen, None),
            PendingAction::StopLater { policy, .. } => self.on_stop(policy),
        }
    }

    /// Decides whether the ranks that exceeded their time limits are hung, based on their stacks. If no rank is hung,
    /// reports the reason.
    fn judge_and_tell(&mut self, check: HangCheck, evidence: &[WorkerEvidence]) -> Option<WorkerHung> {
        let check = self.without_excused(check, evidence);
        if self.tolerate_slow(&check, evidence) {
            return None;
        }
        let due: Vec<usize> = check.late.iter().filter(|late| late.is_due).map(|late| late.rank).collect();
        let hung = self.judge(check, evidence);
        if hung.is_none() && self.phase == Phase::Running && !evidence.is_empty() {
            let running = due.iter().map(|rank| &self.members[*rank]).filter(|member| member.runs());
            let ranks = running.map(|member| member.local_rank).collect::<Vec<_>>();
            let message = recovered(&ranks);
            self.effects.extend((!ranks.is_empty()).then_some(Effect::Report(Event::Degraded { message })));
        }
        hung
    }

    /// Returns `check` without the ranks that are waiting for other ranks in torch, if another rank is in a section
    /// whose time limit has not passed (**HANG-10**).
    fn without_excused(&mut self, mut check: HangCheck, evidence: &[WorkerEvidence]) -> HangCheck {
        let is_due = |rank: usize| check.late.iter().any(|late| late.rank == rank && late.is_due);
        let mut working = (0..check.seen.len()).filter(|rank| self.members[*rank].runs() && !is_due(*rank));
        let Some(busy) = working.find(|rank| in_section(&check.seen[*rank]).is_some()) else { return check };
        let frame_of = |rank: usize| {
            let local_rank = self.members[rank].local_rank;
            evidence.iter().find(|worker| worker.local_rank == local_rank)?.frame.as_deref()
        };
        let is_excused = |late: &Overdue| late.missed == Missed::Step && frame_of(late.rank).is_some_and(waits);
        let excused: std::collections::BTreeSet<usize> =
            check.late.iter().filter(|late| is_excused(late)).map(|late| late.rank).collect();
        if excused.is_empty() {
            return check;
        }
        check.late.retain(|late| !excused.contains(&late.rank));
        let ranks = excused.iter().map(|rank| self.members[*rank].local_rank).collect::<Vec<_>>();
        let message = waits_for_section(&ranks, self.members[busy].local_rank);
        if self.watch.as_mut().is_some_and(|watch| watch.excuse(excused, busy, &check.seen)) {
            self.effects.push(Effect::Report(Event::Degraded { message }));
        }
        check
    }

    /// Extends the time limits of the late ranks if these ranks are slow but not hung (**HANG-12**). Returns false if a
    /// rank hangs, or if the time limits cannot be extended any further.
    fn tolerate_slow(&mut self, check: &HangCheck, evidence: &[WorkerEvidence]) -> bool {
        let HangCheck { late, seen, .. } = self.without_recovered(check.clone());
        let late: Vec<Overdue> = late.into_iter().filter(|overdue| self.members[overdue.rank].runs()).collect();
        let evidence_of = |rank: usize| {
            let local_rank = self.members[rank].local_rank;
            evidence.iter().find(|worker| worker.local_rank == local_rank)
        };
        let working = slow(&late, |rank| evidence_of(rank).map_or(Activity::Unknown, |worker| worker.activity));
        let Some(first) = working.first().and_then(|rank| late.iter().find(|overdue| overdue.rank == *rank)) else {
            return false;
        };
        let frame = evidence_of(first.rank).and_then(|worker| worker.frame.clone()).unwrap_or_default();
        let ranks = working.iter().map(|rank| self.members[*rank].local_rank).collect::<Vec<_>>();
        let silent = Duration::from_nanos(self.snapshot.at.0.saturating_sub(first.since));
        let Some((limit, is_new)) = self.watch.as_mut().and_then(|watch| watch.slow(&late, &seen)) else {
            return false;
        };
        if is_new {
            self.report(Event::Degraded { message: are_slow(&ranks, silent, limit, &frame) });
        }
        true
    }

    fn judge(&self, check: HangCheck, evidence: &[WorkerEvidence]) -> Option<WorkerHung> {
        let check = self.without_recovered(check);
        let is_outdated = !self.is_current(&check) || !self.anyone_is_due(&check) || self.is_anyone_condemned();
        self.verdict(&check, evidence, blame).filter(|_| !is_outdated)
    }

    /// Returns the local worker that a rank on another node is waiting for. `None` if there is no such worker.
    ///
    /// The second value is true if at least one running local worker has exceeded its time limit.
    fn judge_beside(
        &self,
        check: HangCheck,
        remote: &RemoteHang,
        evidence: &[WorkerEvidence],
    ) -> (Option<WorkerHung>, bool) {
        let check = self.without_recovered(check);
        let hung = self.verdict(&check, evidence, |suspects| blame_beside(suspects, remote));
        (hung.filter(|_| self.is_current(&check)), self.anyone_is_due(&check))
    }

    fn is_anyone_condemned(&self) -> bool {
        self.members.iter().any(|member| member.runs() && member.condemned.is_some())
    }

    /// Kills a hung worker immediately. A grace period would be useless, because a worker that hangs does not save its
    /// state.
    fn on_hung(&mut self, hung: WorkerHung) {
        self.fail_at_once(hung.local_rank, hung.seen, Some(Event::WorkerHung(hung.into())));
    }

    /// Reports a worker that a rank on another node may be waiting for.
    fn on_suspected(&mut self, hung: WorkerHung) {
        if self.working(hung.local_rank).is_some() {
            self.report(Event::WorkerHung(hung.into()));
        }
    }

    /// Returns true if no suspension of the group has invalidated the results in `check` (**HANG-5**).
    fn is_current(&self, check: &HangCheck) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.holds(check.at.0))
    }

    /// Returns `check` without the ranks that have shown activity since the check (**HANG-6**).
    fn without_recovered(&self, check: HangCheck) -> HangCheck {
        HangCheck { late: still_late(check.late, &self.snapshot.seen, self.snapshot.line), ..check }
    }

    /// Returns true if at least one of the ranks that exceeded their limit is still running.
    fn anyone_is_due(&self, check: &HangCheck) -> bool {
        check.late.iter().any(|overdue| overdue.is_due && self.members[overdue.rank].runs())
    }

    /// Finds the rank that caused the hang, and returns a report on this rank and all other running ranks. `None` if no
    /// running rank is to blame.
    fn verdict(
        &self,
        HangCheck { late, seen, at }: &HangCheck,
        evidence: &[WorkerEvidence],
        blame: impl Fn(&[Suspect]) -> Option<(usize, Ground)>,
    ) -> Option<WorkerHung> {
        let overdue_of = |index: usize| late.iter().find(|overdue| overdue.rank == index);
        let mut suspects = vec![Suspect::default(); seen.len()];
        let mut ranks = Vec::new();
        for (index, ((seen, suspect), member)) in seen.iter().zip(&mut suspects).zip(&self.members).enumerate() {
            if !member.runs() {
                continue;
            }
            let local_rank = member.local_rank;
            let evidence = evidence.iter().find(|worker| worker.local_rank == local_rank).cloned().unwrap_or_default();
            let heartbeat = seen.heartbeat(local_rank);
            let overdue = overdue_of(index);
            *suspect = Suspect {
                is_late: overdue.is_some(),
                is_due: overdue.is_some_and(|overdue| overdue.is_due),
                is_stopped: matches!(evidence.state, 'T' | 't'),
                step: heartbeat.as_ref().and_then(|beat| beat.step),
                last: overdue.map_or(at.0, |overdue| overdue.since),
                frame: evidence.frame.clone(),
            };
            let WorkerEvidence { state, wait_channel, frame, .. } = evidence;
            ranks.push(RankSeen { local_rank, heartbeat, is_late: overdue.is_some(), state, wait_channel, frame });
        }
        let (index, ground) = blame(&suspects)?;
        let (overdue, member) = (overdue_of(index)?, self.members.get(index).filter(|member| member.runs())?);
        Some(WorkerHung {
            local_rank: member.local_rank,
            pid: member.pid,
            missed: overdue.missed,
            since: Stamp(overdue.since),
            limit: overdue.limit,
            seen: *at,
            ground,
            ranks,
        })
    }
}

/// Returns the beginning of a message about these ranks, for example "local rank 3 is" or "local ranks 1, 2 are".
fn ranks_are(local_ranks: &[u32]) -> String {
    let names = local_ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    if local_ranks.len() == 1 { format!("local rank {names} is") } else { format!("local ranks {names} are") }
}

/// Returns the notice that these ranks are not hung, because they wait for the rank `busy`, which is in a section.
fn waits_for_section(local_ranks: &[u32], busy: u32) -> String {
    let ranks_are = ranks_are(local_ranks);
    format!("{ranks_are} waiting in torch while local rank {busy} is in a section: this does not count as a hang")
}

/// Returns the notice that these ranks exceeded their time limits but have become active again.
fn recovered(local_ranks: &[u32]) -> String {
    let ranks_are = ranks_are(local_ranks);
    format!(
        "{ranks_are} active again after a silence that exceeded the limit. The signal that requests stacks interrupts \
         calls of C code such as sleep(), so it may have ended a hang"
    )
}

/// Returns the notice that these ranks are slow. `silent` is the time since the last heartbeat of the first rank.
/// `limit` is the time without a heartbeat after which this rank counts as hung. `frame` is the innermost Python frame
/// of this rank.
fn are_slow(local_ranks: &[u32], silent: Duration, limit: Duration, frame: &str) -> String {
    let ranks_are = ranks_are(local_ranks);
    format!(
        "{ranks_are} slow, not hung: no heartbeat for {:.1} s, but busy outside of collectives ({frame}). Without a \
         heartbeat, this counts as a hang after {} s. To set another limit, use heartbeat.section()",
        silent.as_secs_f64(),
        limit.as_secs_f64()
    )
}

/// Returns the notice that this rank exited with code 0 while its hang or its expired timer was being examined.
fn finished(local_rank: u32) -> String {
    format!(
        "local rank {local_rank} exited with code 0 after its time limit had passed, and before it was killed: it counts \
         as succeeded. The signal that requests stacks interrupts calls of C code such as sleep(), so it may have ended \
         a hang"
    )
}

/// Returns a warning about ranks whose program returned more than `step` ago but whose process has not exited. `exit`
/// is the time limit for the exit, or `None` if there is no limit.
fn still_exiting(local_ranks: &[u32], step: Duration, exit: Option<Duration>) -> String {
    let (ranks_are, step) = (ranks_are(local_ranks), step.as_secs_f64());
    let limit = exit.map_or_else(
        || "there is no limit for that (--hang-exit-timeout 0)".to_owned(),
        |limit| format!("the limit for that is {} s (--hang-exit-timeout)", limit.as_secs_f64()),
    );
    format!("{ranks_are} still exiting {step} s after the program returned; {limit}")
}

/// Returns the message about ranks that are not watched for hangs yet. The message lists all possible reasons, because
/// only the worker knows which reason applies.
fn unwatched(local_ranks: &[u32], limit: Duration) -> String {
    let ranks_are = ranks_are(local_ranks);
    format!(
        "{ranks_are} not watched for hangs yet: no heartbeat in the first {} s. There was no call of \
         elasticrs.timer.heartbeat(), and no step of a torch optimizer was seen: torch is not used, has taken no step \
         so far, or heartbeats of steps are off",
        limit.as_secs_f64()
    )
}

// Flight records for a failure that another worker may have caused.
//
// If the workers call a collective with different arguments, gloo may abort a worker whose arguments are right. Only
// the flight records of the other workers show which call is wrong. These records are lost when the workers are
// stopped.
//
// Therefore, the group requests the flight records before it handles one of these exits: the death of a worker by
// SIGABRT, or the exit of a worker whose exception reports a lost peer. The group handles the exit when the records are
// written, or when a short time limit has passed. All other failures stop the group at once. The rest of the state
// machine cannot tell a held exit from an exit that was noticed a little later.

/// State of the request for flight records. The records are requested only once, because a second request would delete
/// the records of workers that have exited in the meantime.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Records {
    #[default]
    NotRequested,
    Requested,
    Done,
}

/// A held exit: it was noticed, but it is not handled until the flight records are written.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldExit {
    pub(super) pid: i32,
    pub(super) exit: WorkerExit,
    pub(super) seen: Stamp,
}

impl Group {
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Requests the flight records if the exception of a running worker reports a lost peer. The group starts to wait
    /// for the records only when that worker exits.
    pub(super) fn take_records_after_raise(&mut self) {
        if self.members.iter().any(|m| m.runs() && has_lost_peer(m)) {
            self.take_records();
        }
    }

    /// Returns true if the exit of this member cannot be handled until the flight records are written. Requests the
    /// records if necessary.
    pub(super) fn is_held(&mut self, index: usize, exit: WorkerExit) -> bool {
        if self.is_holding() {
            return true; // Handle all exits in their order.
        }
        let member = &self.members[index];
        let is_aborted = matches!(exit, WorkerExit::Signaled { signal: libc::SIGABRT }) && member.sent.is_none();
        let is_lost_peer = !exit.is_success() && has_lost_peer(member);
        let is_alone = !self.members.iter().enumerate().any(|(other, m)| other != index && m.runs());
        self.phase == Phase::Running && (is_aborted || is_lost_peer) && !is_alone && self.take_records()
    }

    /// Requests the flight records unless they were already requested. Returns true while the workers are writing the
    /// records.
    ///
    /// Returns false and requests nothing if the group is stopping, is not watched for hangs, has pending actions, or
    /// replaces failed workers.
    fn take_records(&mut self) -> bool {
        let is_possible =
            self.phase == Phase::Running && self.watch.is_some() && self.waiting.is_none() && !self.policy.replaces;
        if is_possible && self.records == Records::NotRequested {
            self.records = Records::Requested;
            self.effects.push(Effect::TakeRecords);
        }
        is_possible && self.records == Records::Requested
    }

    pub(super) fn on_recorded(&mut self) {
        self.release();
    }

    /// Handles the held exits now, unless this input can be handled before them.
    pub(super) fn release_before(&mut self, input: &Input) {
        let may_wait = match input {
            Input::Exited { .. }
            | Input::Dead(_)
            | Input::Snapshot(_)
            | Input::Paused { .. }
            | Input::Continued { .. }
            | Input::Expired(Deadline::Hang | Deadline::Check) => true,
            Input::Raised { workers, .. } => workers.iter().all(|raised| raised.origin != Origin::Own),
            _ => false,
        };
        if self.is_holding() && !may_wait {
            self.release();
        }
    }

    fn release(&mut self) {
        self.records = Records::Done;
        for HeldExit { pid, exit, seen } in std::mem::take(&mut self.held) {
            self.on_exit(pid, exit, seen);
        }
    }
}

fn has_lost_peer(member: &Member) -> bool {
    member.raised.as_ref().is_some_and(|raised| raised.origin == Origin::Peer)
}
