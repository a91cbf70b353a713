//! Tests of groups that replace failed workers while the other workers continue.

use std::collections::BTreeMap;

use super::exits::{killed, raised, sampled};
use super::*;

fn replacing() -> Group {
    group_of(&PIDS, LINGER, StopScope::Worker, true)
}

fn left_swept() -> Input {
    Input::WorkerSwept(SweepOutcome::default())
}

fn replaced(local_rank: u32, pid: i32) -> Input {
    Input::Replaced { local_rank, pid, started: Stamp(9) }
}

fn failed_start(local_rank: u32) -> StartFailure {
    StartFailure::Hung { local_rank, stage: None, wait_channel: String::new(), deadline: Duration::ZERO }
}

/// Makes the worker of this rank fail, completes its clean-up, and starts a replacement with the given pid.
fn replace(group: &mut Group, local_rank: u32, pid: i32) {
    let old = PIDS[local_rank as usize];
    let _ = group.on_input(exited(old, FAILED));
    let _ = group.on_input(left_swept());
    let _ = group.on_input(Input::Replace { local_rank });
    let _ = group.on_input(replaced(local_rank, pid));
}

fn sweeps_left(effects: &[Effect]) -> Vec<u32> {
    let rank =
        |effect: &Effect| if let Effect::SweepWorker { local_rank, .. } = effect { Some(*local_rank) } else { None };
    effects.iter().filter_map(rank).collect()
}

#[test]
fn a_failed_worker_is_cleaned_up_without_signalling_the_others() {
    let mut group = replacing();
    let effects = group.on_input(exited(101, FAILED));
    let [
        Effect::Report(Event::WorkerExited { local_rank: 1, .. }),
        Effect::SweepWorker { local_rank: 1, pid: 101, .. },
    ] = effects[..]
    else {
        panic!("{effects:?}");
    };
    let effects = group.on_input(left_swept());
    assert!(matches!(effects[..], [Effect::Report(Event::WorkerSwept { local_rank: 1, .. })]), "{effects:?}");
}

#[test]
fn workers_that_fail_together_are_cleaned_up_one_at_a_time() {
    let mut group = replacing();
    assert_eq!(sweeps_left(&group.on_input(exited(101, FAILED))), [1]);
    assert_eq!(sweeps_left(&group.on_input(exited(103, FAILED))).len(), 0);
    assert_eq!(group.refusal(1), Some("its leftover processes are not cleaned up yet"));
    assert_eq!(sweeps_left(&group.on_input(left_swept())), [3]);
    assert_eq!(group.refusal(1), None);
    assert_eq!(group.refusal(3), Some("its leftover processes are not cleaned up yet"));
    let _ = group.on_input(Input::Replace { local_rank: 1 });
    assert_eq!(group.refusal(1), Some("its replacement is starting"));
    let _ = group.on_input(left_swept());
    assert_eq!(group.refusal(3), None);
}

#[test]
fn a_group_without_running_workers_continues_until_it_is_stopped() {
    let mut group = replacing();
    let effects = all_exit(&mut group, &PIDS, KILLED);
    assert!(!effects.iter().any(|e| matches!(e, Effect::Sweep(_))), "{effects:?}");
    for _ in PIDS {
        let _ = group.on_input(left_swept());
    }
    let effects = group.on_input(Input::Stop(TERM_30));
    assert_eq!(signals(&effects), [], "their numbers may be those of others");
    assert!(effects.iter().any(|e| matches!(e, Effect::Sweep(_))));
    assert_eq!(end(&group.on_input(swept())).map(|e| e.outcome), Some(Outcome::Stopped));
}

#[test]
fn a_group_succeeds_if_the_last_worker_of_each_rank_succeeds() {
    let mut group = replacing();
    replace(&mut group, 1, 201);
    let effects = all_exit(&mut group, &[100, 102, 103, 201], DONE);
    assert!(effects.iter().any(|e| matches!(e, Effect::Sweep(_))));
    assert_eq!(end(&group.on_input(swept())).map(|e| e.outcome), Some(Outcome::Succeeded));
}

#[test]
fn a_replacement_that_starts_during_a_stop_is_stopped_as_well() {
    for (stop, to, signal) in [(TERM_30, StopScope::Worker, Signal::TERM), (KILL, StopScope::Group, Signal::KILL)] {
        let mut group = replacing();
        let _ = group.on_input(exited(101, FAILED));
        let _ = group.on_input(left_swept());
        let _ = group.on_input(Input::Replace { local_rank: 1 });
        let effects = group.on_input(Input::Stop(stop));
        let hastens = effects.iter().any(|e| matches!(e, Effect::Hasten(Deadline::Replace(1), _)));
        assert_eq!(hastens, stop == KILL, "what hangs then does not delay the end");
        let effects = all_exit(&mut group, &[100, 102, 103], KILLED);
        assert!(!effects.iter().any(|e| matches!(e, Effect::Sweep(_))), "one is still to come: {effects:?}");
        let effects = group.on_input(replaced(1, 201));
        assert_eq!(effects[1..], [Effect::Signal { pid: 201, to, signal }]);
        assert!(group.on_input(exited(201, KILLED)).iter().any(|e| matches!(e, Effect::Sweep(_))));
    }
}

#[test]
fn a_replacement_that_fails_to_start_during_a_stop_lets_the_group_end() {
    let mut group = replacing();
    let _ = group.on_input(exited(101, FAILED));
    let _ = group.on_input(left_swept());
    let _ = group.on_input(Input::Replace { local_rank: 1 });
    let _ = group.on_input(Input::Stop(KILL));
    let _ = all_exit(&mut group, &[100, 102, 103], KILLED);
    let effects = group.on_input(Input::ReplaceFailed(failed_start(1)));
    assert!(matches!(effects[0], Effect::Report(Event::ReplaceFailed(_))));
    assert!(effects.iter().any(|e| matches!(e, Effect::Sweep(_))), "{effects:?}");
}

#[test]
fn a_replacement_that_starts_in_a_suspended_group_is_suspended_as_well() {
    let mut group = replacing();
    let _ = group.on_input(Input::Suspend);
    let _ = group.on_input(exited(101, KILLED));
    let _ = group.on_input(left_swept());
    let _ = group.on_input(Input::Replace { local_rank: 1 });
    assert_eq!(signals(&group.on_input(replaced(1, 201))), [(201, Signal::STOP)]);
    assert!(signals(&group.on_input(Input::Resume)).contains(&(201, Signal::CONT)));
}

#[test]
fn losing_the_nursery_ends_the_group_despite_pending_replacements() {
    let mut group = replacing();
    let _ = group.on_input(exited(101, FAILED));
    let _ = group.on_input(left_swept());
    let _ = group.on_input(Input::Replace { local_rank: 1 });
    let _ = group.on_input(exited(102, FAILED));
    let _ = group.on_input(Input::NurseryLost(NurseryExit { exit: KILLED, hung: false }));
    let _ = all_exit(&mut group, &[100, 103], KILLED);
    assert_eq!(end(&group.on_input(swept())).map(|e| e.outcome), Some(Outcome::Lost));
}

#[test]
fn an_expired_timer_stops_only_its_own_worker() {
    let usr1 = Signal::new(10).expect("it exists");
    let mut group = replacing();
    let effects = after_evidence(&mut group, expired(1, 101, Some(usr1)));
    assert_eq!(effects[0], Effect::SignalProcess { pid: 101, signal: usr1 });
    assert!(effects.contains(&Effect::Arm(Deadline::Condemned(1), TERM_30.grace)), "{effects:?}");
    assert_eq!(signals(&effects), []);
    assert_eq!(
        group.on_input(expired(1, 101, Some(usr1))).len(),
        1,
        "it has failed already, which evidence may not tell"
    );
    let _ = group.on_input(Input::Evidence(Vec::new()));
    assert_eq!(signals(&group.on_input(Input::Expired(Deadline::Condemned(1)))), [(101, Signal::KILL)]);
    let effects = group.on_input(exited(101, DONE));
    assert_eq!(sweeps_left(&effects), [1], "whatever it exits with");
    assert!(effects.contains(&Effect::Disarm(Deadline::Condemned(1))));
}

#[test]
fn a_worker_that_survives_sigkill_fails_the_group() {
    let mut group = replacing();
    let _ = after_evidence(&mut group, expired(1, 101, Some(Signal::KILL)));
    let _ = group.on_input(Input::Expired(Deadline::Condemned(1)));
    let effects = group.on_input(Input::Expired(Deadline::Condemned(1)));
    assert_eq!(signals(&effects), [100, 102, 103].map(|pid| (pid, Signal::TERM)));
    assert!(effects.iter().any(|e| matches!(e, Effect::ReportFailure { local_rank: 1, siblings: 3, .. })));
}

#[test]
fn the_kill_reason_distinguishes_slow_and_stalled_exits() {
    let mut group = replacing();
    let _ = group.on_input(raised(2));
    let effects = group.on_input(sampled(2, Some(true)));
    assert_eq!(signals(&effects), [], "it is left alone");
    // Signal 10 was sent by the user and is not a request to exit, so it must not be reported as the reason for the
    // kill.
    let _ = group.on_input(Input::Signal(Signal::new(10).expect("it exists"), Some(vec![2])));
    let effects = group.on_input(Input::Expired(Deadline::Condemned(2)));
    assert_eq!(killed(&effects), [(vec![2], KillReason::SlowExit, 30)]);
    let _ = group.on_input(raised(3));
    let _ = group.on_input(sampled(3, Some(true)));
    let effects = group.on_input(sampled(3, Some(false)));
    assert_eq!(killed(&effects), [(vec![3], KillReason::StalledExit, 5)]);
}

#[test]
fn the_kill_reason_after_an_expired_timer_is_the_signal_of_the_timer() {
    let mut group = replacing();
    let _ = after_evidence(&mut group, expired(1, 101, Some(Signal::TERM)));
    let effects = group.on_input(Input::Expired(Deadline::Condemned(1)));
    assert_eq!(killed(&effects), [(vec![1], KillReason::AfterSignal(Signal::TERM), 30)]);
}

#[test]
fn the_failure_of_a_worker_started_by_python_fails_the_group() {
    let mut group = replacing();
    let _ = group.on_input(Input::Adopted { local_rank: 4, pid: 50 });
    let effects = group.on_input(exited(50, FAILED));
    assert!(effects.iter().any(|e| matches!(e, Effect::ReportFailure { local_rank: 4, .. })));
}

/// A step of a randomly generated test. The numbers are local ranks.
#[derive(Debug, Clone)]
enum Step {
    Exit(u32, WorkerExit),
    Other(Input),
    AnswerSweep,
    Replace(u32),
    /// Result of starting a replacement: its pid, or `None` if the start failed. The pid may be one that an earlier
    /// worker had, because the kernel reuses pids.
    AnswerStart(u32, Option<i32>),
    Time(u32),
}

fn any_step() -> impl Strategy<Value = Step> {
    let rank = || 0..4_u32;
    let other = prop_oneof![
        1 => Just(Input::Stop(TERM_30)),
        1 => Just(Input::Stop(KILL)),
        1 => Just(Input::Suspend),
        1 => Just(Input::Resume),
        1 => Just(Input::NurseryLost(NurseryExit { exit: FAILED, hung: false })),
        1 => Just(Input::Fenced),
        4 => rank().prop_map(|rank| expired(rank, 100, Some(Signal::KILL))),
        4 => Just(Input::Evidence(Vec::new())),
        2 => rank().prop_map(raised),
        2 => Just(Input::Expired(Deadline::Kill)),
    ];
    prop_oneof![
        8 => (rank(), any_exit()).prop_map(|(rank, exit)| Step::Exit(rank, exit)),
        1 => other.prop_map(Step::Other),
        8 => Just(Step::AnswerSweep),
        6 => rank().prop_map(Step::Replace),
        6 => (rank(), prop::option::weighted(0.8, 100..108)).prop_map(|(rank, pid)| Step::AnswerStart(rank, pid)),
        1 => rank().prop_map(Step::Time),
    ]
}

/// Model of the nursery and the kernel. It feeds inputs to a group that replaces failed workers.
struct World {
    group: Group,
    living: BTreeMap<u32, i32>,
    exiting: Option<(u32, i32)>,
    last: BTreeMap<u32, WorkerExit>,
    /// Local rank of the failed worker whose leftover processes are being cleaned up.
    sweeping: Option<u32>,
    free: BTreeSet<u32>,
    promised: BTreeSet<u32>,
    condemned: BTreeSet<u32>,
    armed: BTreeSet<Deadline>,
    owes_sweep: bool,
    takes_evidence: bool,
    /// True if the group has failed, was stopped, or has lost its nursery.
    is_over: bool,
    ends: Vec<Outcome>,
}

impl World {
    fn new() -> Self {
        Self {
            group: replacing(),
            living: (0..).zip(PIDS).collect(),
            exiting: None,
            last: BTreeMap::new(),
            sweeping: None,
            free: BTreeSet::new(),
            promised: BTreeSet::new(),
            condemned: BTreeSet::new(),
            armed: BTreeSet::new(),
            owes_sweep: false,
            takes_evidence: false,
            is_over: false,
            ends: Vec::new(),
        }
    }

    fn input(&mut self, input: Input) -> Result<(), TestCaseError> {
        let effects = self.group.on_input(input);
        for effect in &effects {
            prop_assert!(self.ends.is_empty(), "SUP-5: {effect:?} after the end");
            match effect {
                Effect::ReportFailure { .. } => self.is_over = true,
                Effect::SweepWorker { local_rank, pid, .. } => {
                    prop_assert_eq!(self.sweeping.replace(*local_rank), None, "one at a time");
                    prop_assert!(!self.living.values().any(|living| living == pid), "SUP-9: it lives");
                }
                Effect::Report(Event::WorkerSwept { local_rank, .. }) => {
                    prop_assert!(self.free.insert(*local_rank), "SUP-9: told twice");
                }
                Effect::Report(Event::TimerExpired(timer)) => {
                    self.condemned.insert(timer.local_rank);
                }
                Effect::Report(Event::WorkerRaised(raised)) if raised.exit != ExitStage::Begun => {
                    self.condemned.insert(raised.local_rank);
                }
                Effect::Arm(timer, _) | Effect::Hasten(timer, _) => {
                    self.armed.insert(*timer);
                }
                Effect::Disarm(timer) => {
                    self.armed.remove(timer);
                }
                Effect::Sweep(_) => self.owes_sweep = true,
                Effect::TakeEvidence { .. } => self.takes_evidence = true,
                Effect::ReportEnd(end) => self.ends.push(end.outcome),
                _ => {}
            }
        }
        for (pid, _) in signals(&effects).iter().filter(|(_, signal)| [Signal::TERM, Signal::KILL].contains(signal)) {
            let mut known = self.living.iter().map(|(rank, pid)| (*rank, *pid)).chain(self.exiting);
            let rank = known.find(|(_, living)| living == pid).map(|(rank, _)| rank);
            let is_due = self.is_over || rank.is_some_and(|rank| self.condemned.contains(&rank));
            prop_assert!(is_due, "SUP-9: {pid} is signalled for another one: {effects:?}");
        }
        Ok(())
    }

    fn exit(&mut self, local_rank: u32, exit: WorkerExit) -> Result<(), TestCaseError> {
        let Some(pid) = self.living.remove(&local_rank) else { return Ok(()) };
        self.last.insert(local_rank, exit);
        self.exiting = Some((local_rank, pid));
        self.input(exited(pid, exit))?;
        self.exiting = None;
        self.condemned.remove(&local_rank);
        Ok(())
    }

    fn answer_start(&mut self, local_rank: u32, pid: Option<i32>) -> Result<(), TestCaseError> {
        if !self.promised.remove(&local_rank) {
            return Ok(());
        }
        match pid.filter(|pid| !self.living.values().any(|living| living == pid)) {
            None => {
                self.free.insert(local_rank);
                self.input(Input::ReplaceFailed(failed_start(local_rank)))
            }
            Some(pid) => {
                self.living.insert(local_rank, pid);
                self.input(replaced(local_rank, pid))
            }
        }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Exit(local_rank, exit) => self.exit(local_rank, exit),
            Step::AnswerSweep if self.sweeping.take().is_some() => self.input(left_swept()),
            Step::AnswerSweep if std::mem::take(&mut self.owes_sweep) => self.input(swept()),
            Step::Replace(local_rank) => {
                let may_be = self.group.refusal(local_rank).is_none();
                let is_free = self.free.contains(&local_rank) && !self.is_over;
                prop_assert_eq!(may_be, is_free, "SUP-9: nobody starts before its predecessor is swept");
                if may_be {
                    self.free.remove(&local_rank);
                    self.promised.insert(local_rank);
                    self.input(Input::Replace { local_rank })?;
                }
                Ok(())
            }
            Step::AnswerStart(local_rank, pid) => self.answer_start(local_rank, pid),
            Step::Time(local_rank) if self.armed.remove(&Deadline::Condemned(local_rank)) => {
                self.input(Input::Expired(Deadline::Condemned(local_rank)))
            }
            Step::AnswerSweep | Step::Time(_) => Ok(()),
            Step::Other(Input::Expired(timer)) if !self.armed.remove(&timer) => Ok(()),
            Step::Other(Input::Evidence(_)) if !std::mem::take(&mut self.takes_evidence) => Ok(()),
            Step::Other(input) => {
                self.is_over |= matches!(input, Input::Stop(_) | Input::NurseryLost(_) | Input::Fenced);
                if matches!(input, Input::NurseryLost(_)) {
                    // The lost nursery will not answer pending requests for clean-ups or starts.
                    (self.sweeping, self.promised) = (None, BTreeSet::new());
                }
                self.input(input)
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Checks that failed workers are replaced as **SUP-9** requires, and that the group finishes exactly once.
    #[test]
    fn a_group_with_replacements_ends_exactly_once_after_any_sequence_of_inputs(
        history in prop::collection::vec(any_step(), 0..60),
    ) {
        let mut world = World::new();
        for step in history {
            world.step(step)?;
        }
        if !world.is_over {
            prop_assert!(!world.ends.contains(&Outcome::Failed));
        }
        world.step(Step::Other(Input::Stop(KILL)))?;
        for rank in 0..4 {
            world.answer_start(rank, None)?;
            world.exit(rank, KILLED)?;
        }
        world.step(Step::AnswerSweep)?;
        world.step(Step::AnswerSweep)?;
        prop_assert_eq!(world.ends.len(), 1);
        prop_assert!(world.group.has_ended());
        if world.ends[0] == Outcome::Succeeded {
            prop_assert!(world.last.len() == 4 && world.last.values().all(|exit| exit.is_success()));
        }
    }
}
