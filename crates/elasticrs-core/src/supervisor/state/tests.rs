use std::collections::BTreeSet;

use proptest::prelude::*;

use self::exits::{failed_by_itself, killed, lost_peer, raised, sampled};
use self::hangs::{DELAYED, FOUR_SECONDS, after_evidence, remote_hang, snapshot};
use super::*;
use crate::supervisor::event::{ExitStage, KillReason, Origin, WorkersKilled};
use crate::supervisor::start::tests::policy;

mod exits;
mod hangs;
mod keeping;
mod records;
mod replacing;
mod saving;

const PIDS: [i32; 4] = [100, 101, 102, 103];
const TERM_30: StopPolicy = StopPolicy { signal: Signal::TERM, grace: Duration::from_secs(30) };
const KILL: StopPolicy = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };
const FAILED: WorkerExit = WorkerExit::Exited { code: 1 };
const DONE: WorkerExit = WorkerExit::Exited { code: 0 };
const KILLED: WorkerExit = WorkerExit::Signaled { signal: 9 };
/// Exit of a worker that was killed by SIGABRT.
const ABORTED: WorkerExit = WorkerExit::Signaled { signal: 6 };
/// Exit of a worker that was killed by SIGTERM.
const ENDED: WorkerExit = WorkerExit::Signaled { signal: 15 };

const LINGER: Descendants = Descendants::Linger(Duration::from_secs(5));

fn group_of(pids: &[i32], on_success: Descendants, stop_scope: StopScope, replaces: bool) -> Group {
    let keep_grace = Duration::from_secs(10);
    Group::new(pids, GroupPolicy { on_failure: TERM_30, on_success, stop_scope, replaces, keep_grace, ..policy() })
}

fn group(on_success: Descendants) -> Group {
    group_of(&PIDS, on_success, StopScope::Group, false)
}

fn lingering() -> Group {
    group(LINGER)
}

fn exited(pid: i32, exit: WorkerExit) -> Input {
    Input::Exited { pid, exit, seen: Stamp(7) }
}

/// Makes these workers exit one after another. Returns the effects of the last exit.
fn all_exit(group: &mut Group, pids: &[i32], exit: WorkerExit) -> Vec<Effect> {
    pids.iter().map(|pid| group.on_input(exited(*pid, exit))).last().unwrap_or_default()
}

fn swept() -> Input {
    Input::Swept(SweepOutcome::default())
}

fn signals(effects: &[Effect]) -> Vec<(i32, Signal)> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::Signal { pid, signal, .. } => Some((*pid, *signal)),
            _ => None,
        })
        .collect()
}

fn end(effects: &[Effect]) -> Option<&GroupOutcome> {
    effects.iter().find_map(|e| match e {
        Effect::ReportEnd(end) => Some(end),
        _ => None,
    })
}

#[test]
fn sibling_workers_are_signalled_before_the_first_failure_is_reported() {
    let mut group = lingering();
    let effects = group.on_input(exited(101, FAILED));
    assert_eq!(
        signals(&effects),
        [(100, Signal::TERM), (102, Signal::TERM), (103, Signal::TERM), (101, Signal::TERM)],
        "living siblings first, then what the failed worker may have left in its group"
    );
    let report = effects.iter().position(|e| matches!(e, Effect::ReportFailure { siblings: 3, local_rank: 1, .. }));
    let last_signal = effects.iter().rposition(|e| matches!(e, Effect::Signal { .. }));
    assert!(report > last_signal, "{effects:?}");
    assert!(effects.contains(&Effect::Hasten(Deadline::Kill, TERM_30.grace)));
}

#[test]
fn a_second_failure_is_reported_only_as_an_exit() {
    let mut group = lingering();
    let _ = group.on_input(exited(101, FAILED));
    let effects = group.on_input(exited(102, FAILED));
    assert_eq!(signals(&effects), []);
    let sent: Vec<_> = effects
        .iter()
        .filter_map(|e| match e {
            Effect::Report(Event::WorkerExited { sent, .. }) => Some(*sent),
            _ => None,
        })
        .collect();
    assert_eq!(sent, [Some(Signal::TERM)], "it was a victim, and the report must be able to say so");
}

#[test]
fn sigkill_after_the_grace_period_reaches_process_groups_without_a_leader() {
    let mut group = lingering();
    let _ = group.on_input(exited(101, FAILED));
    let _ = group.on_input(exited(100, FAILED));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)));
    assert!(effects.contains(&Effect::Arm(Deadline::GiveUp, GIVE_UP_AFTER)));
}

#[test]
fn workers_that_survive_sigkill_are_given_up_and_reported() {
    let mut group = lingering();
    let _ = group.on_input(Input::Stop(KILL));
    let _ = all_exit(&mut group, &[100, 101, 103], KILLED);
    let effects = group.on_input(Input::Expired(Deadline::GiveUp));
    assert!(effects.contains(&Effect::Sweep(SweepLimits::at_once(HOPELESS_SWEEP))));
    let effects = group.on_input(swept());
    assert_eq!(end(&effects).map(|e| e.stuck_workers.clone()), Some(vec![(2, 102)]));
}

#[test]
fn descendants_may_linger_after_success_but_not_after_a_failure() {
    let mut group = lingering();
    let effects = all_exit(&mut group, &PIDS, DONE);
    let linger = Duration::from_secs(5);
    assert!(effects.contains(&Effect::Sweep(SweepLimits { linger, grace: LINGERER_GRACE, give_up: GIVE_UP_AFTER })));

    let mut group = lingering();
    let effects = all_exit(&mut group, &PIDS, FAILED);
    assert!(effects.contains(&Effect::Sweep(AT_ONCE)));
}

#[test]
fn descendants_are_not_cleaned_up_with_the_keep_setting() {
    let mut group = group(Descendants::Keep);
    let effects = all_exit(&mut group, &PIDS, DONE);
    assert!(!effects.iter().any(|e| matches!(e, Effect::Sweep(_))));
    assert_eq!(end(&effects).map(|e| e.outcome), Some(Outcome::Succeeded));
}

#[test]
fn a_stop_kills_lingering_descendants_immediately() {
    let mut group = lingering();
    let _ = all_exit(&mut group, &PIDS, DONE);
    let effects = group.on_input(Input::Stop(TERM_30));
    assert_eq!(effects, [Effect::Sweep(AT_ONCE)]);
    assert_eq!(end(&group.on_input(swept())).map(|e| e.outcome), Some(Outcome::Stopped));
}

#[test]
fn a_later_stop_can_only_shorten_the_grace_period() {
    let mut group = lingering();
    let _ = group.on_input(Input::Stop(TERM_30));
    let effects = group.on_input(Input::Stop(TERM_30));
    assert!(effects.contains(&Effect::Hasten(Deadline::Kill, TERM_30.grace)), "{effects:?}");
    let _ = group.on_input(exited(100, DONE));
    let effects = group.on_input(Input::Stop(KILL));
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)));
    assert_eq!(killed(&effects), [(vec![1, 2, 3], KillReason::Request, 0)]);
    assert_eq!(group.on_input(Input::Stop(TERM_30)), [], "nothing is softer than SIGKILL already sent");
}

#[test]
fn a_paused_worker_is_reported_after_a_delay_and_continued_by_a_stop() {
    let mut group = lingering();
    let effects = group.on_input(Input::Paused { pid: 102, signal: 19 });
    assert_eq!(effects, [Effect::Arm(Deadline::Paused(2), PAUSE_REPORT_DELAY)]);
    let effects = group.on_input(Input::Expired(Deadline::Paused(2)));
    assert_eq!(effects, [Effect::Report(Event::WorkerPaused { local_rank: 2, pid: 102, signal: 19 })]);
    let effects = group.on_input(Input::Stop(TERM_30));
    assert_eq!(signals(&effects).last(), Some(&(102, Signal::CONT)), "after the signal, or it could be missed");
}

#[test]
fn a_short_pause_is_not_reported() {
    let mut group = lingering();
    let _ = group.on_input(Input::Paused { pid: 102, signal: 19 });
    assert_eq!(group.on_input(Input::Continued { pid: 102 }), [Effect::Disarm(Deadline::Paused(2))]);
    assert_eq!(group.on_input(Input::Expired(Deadline::Paused(2))), []);
}

#[test]
fn workers_of_a_suspended_group_are_not_reported_as_paused() {
    let mut group = lingering();
    let effects = group.on_input(Input::Suspend);
    assert_eq!(effects[0], Effect::Freeze);
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::STOP)));
    assert_eq!(group.on_input(Input::Paused { pid: 100, signal: 19 }), []);
    let effects = group.on_input(Input::Resume);
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::CONT)));
    assert_eq!(effects.last(), Some(&Effect::Thaw));
}

#[test]
fn deadlines_are_unfrozen_when_a_suspended_group_ends() {
    let mut group = lingering();
    let _ = group.on_input(Input::Stop(KILL));
    assert_eq!(group.on_input(Input::Suspend)[0], Effect::Freeze);
    let _ = all_exit(&mut group, &PIDS, FAILED);
    let effects = group.on_input(swept());
    assert!(matches!(effects[..], [Effect::Thaw, Effect::ReportEnd(_)]), "{effects:?}");
    assert_eq!(group.on_input(Input::Resume), [], "it comes too late to do that");
}

#[test]
fn a_resume_continues_a_suspended_group_that_is_being_stopped() {
    let mut group = lingering();
    let _ = group.on_input(Input::Stop(TERM_30));
    let _ = group.on_input(Input::Suspend);
    assert_eq!(group.on_input(Input::Paused { pid: 100, signal: 19 }), []);
    assert_eq!(signals(&group.on_input(Input::Resume)), PIDS.map(|pid| (pid, Signal::CONT)));
}

#[test]
fn losing_the_nursery_ends_the_group_exactly_once() {
    let mut group = lingering();
    let exit = KILLED;
    let killed = NurseryExit { exit, hung: false };
    let effects = group.on_input(Input::NurseryLost(killed));
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)));
    let _ = all_exit(&mut group, &PIDS, WorkerExit::Unknown);
    let effects = group.on_input(swept());
    let end = end(&effects).expect("all are gone and swept");
    assert_eq!((end.outcome, end.nursery), (Outcome::Lost, Some(killed)));
    assert_eq!(group.on_input(swept()), []);
}

#[test]
fn a_fenced_group_is_killed_and_reported_as_stopped() {
    let mut group = lingering();
    let _ = group.on_input(Input::Suspend);
    let effects = group.on_input(Input::Fenced);
    assert_eq!(effects[0], Effect::Thaw);
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)), "and no SIGCONT");
    let mut effects = Vec::new();
    for pid in PIDS {
        effects = group.on_input(exited(pid, KILLED));
        assert!(
            matches!(&effects[0], Effect::Report(Event::WorkerExited { sent: Some(Signal::KILL), .. })),
            "SUP-7: {effects:?}"
        );
    }
    assert!(effects.iter().any(|e| matches!(e, Effect::Sweep(_))));
    assert_eq!(end(&group.on_input(swept())).map(|e| e.outcome), Some(Outcome::Stopped));
}

#[test]
fn the_fence_does_not_hide_an_earlier_failure() {
    let mut group = lingering();
    let _ = group.on_input(exited(101, FAILED));
    let effects = group.on_input(Input::Fenced);
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)));
    let _ = all_exit(&mut group, &[100, 102, 103], FAILED);
    assert_eq!(end(&group.on_input(swept())).map(|e| e.outcome), Some(Outcome::Failed));
}

#[test]
fn an_exit_before_a_signal_is_not_attributed_to_that_signal() {
    let mut group = lingering();
    let _ = group.on_input(Input::Dead(vec![102]));
    let effects = group.on_input(exited(101, FAILED));
    assert!(effects.iter().any(|e| matches!(e, Effect::ReportFailure { siblings: 2, .. })), "{effects:?}");
    let sent = |effects: &[Effect]| match effects.first() {
        Some(Effect::Report(Event::WorkerExited { sent, .. })) => *sent,
        other => panic!("{other:?}"),
    };
    // Rank 3 is reported with SIGTERM, because it died after SIGTERM and before SIGKILL was sent.
    let _ = group.on_input(Input::Dead(vec![103]));
    let _ = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(sent(&group.on_input(exited(102, FAILED))), None);
    assert_eq!(sent(&group.on_input(exited(103, FAILED))), Some(Signal::TERM));
    assert_eq!(sent(&group.on_input(exited(100, FAILED))), Some(Signal::KILL));
}

#[test]
fn a_worker_adopted_into_a_stopping_group_is_killed() {
    let mut group = group_of(&[], Descendants::Keep, StopScope::Group, false);
    let _ = group.on_input(Input::Adopted { local_rank: 0, pid: 50 });
    let _ = group.on_input(exited(50, FAILED));
    let effects = group.on_input(Input::Adopted { local_rank: 1, pid: 51 });
    assert_eq!(signals(&effects), [(51, Signal::KILL)]);
}

fn saving() -> Group {
    group_of(&PIDS, LINGER, StopScope::Worker, false)
}

fn to_worker(pid: i32, signal: Signal) -> Effect {
    Effect::Signal { pid, to: StopScope::Worker, signal }
}

fn only_signals(effects: Vec<Effect>) -> Vec<Effect> {
    effects.into_iter().filter(|e| matches!(e, Effect::Signal { .. })).collect()
}

#[test]
fn the_process_group_of_a_worker_is_stopped_after_the_worker_exits() {
    let mut group = saving();
    let _ = group.on_input(exited(103, DONE));
    let effects = only_signals(group.on_input(Input::Stop(TERM_30)));
    let living = [100, 101, 102].map(|pid| to_worker(pid, Signal::TERM));
    assert_eq!(effects, [&living[..], &[to_group(103, Signal::TERM)]].concat(), "nobody needs what 103 has left");
    assert_eq!(only_signals(group.on_input(exited(101, DONE))), [to_group(101, Signal::TERM)]);
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(only_signals(effects), PIDS.map(|pid| to_group(pid, Signal::KILL)), "SUP-4");
    assert_eq!(only_signals(group.on_input(exited(100, FAILED))), [], "SIGKILL was for all");
}

#[test]
fn the_last_worker_exit_starts_the_cleanup_and_sends_no_signals() {
    let mut group = saving();
    let _ = group.on_input(exited(101, FAILED));
    let _ = group.on_input(exited(100, DONE));
    let _ = group.on_input(exited(102, DONE));
    let effects = group.on_input(exited(103, DONE));
    assert!(effects.iter().any(|e| matches!(e, Effect::Sweep(_))));
    assert_eq!(only_signals(effects), []);
}

#[test]
fn the_process_group_of_a_failed_worker_is_stopped_with_its_siblings() {
    let mut group = saving();
    let _ = group.on_input(Input::Dead(vec![102]));
    let effects = only_signals(group.on_input(exited(101, FAILED)));
    let (worker, group_of) = (|pid| to_worker(pid, Signal::TERM), |pid| to_group(pid, Signal::TERM));
    assert_eq!(effects, [worker(100), group_of(102), worker(103), group_of(101)]);
    assert_eq!(only_signals(group.on_input(exited(102, FAILED))), [], "its group has got it");
}

#[test]
fn a_signal_sent_by_the_user_has_the_same_scope_as_a_stop() {
    let usr1 = Signal::new(10).expect("it exists");
    for (mut group, to) in [(saving(), StopScope::Worker), (lingering(), StopScope::Group)] {
        let effects = group.on_input(Input::Signal(usr1, Some(vec![2])));
        assert_eq!(effects, [Effect::Signal { pid: 102, to, signal: usr1 }]);
        assert_eq!(group.on_input(Input::Signal(Signal::KILL, Some(vec![2]))), [to_group(102, Signal::KILL)]);
    }
}

#[test]
fn a_worker_killed_by_a_forwarded_signal_counts_as_failed() {
    let usr1 = Signal::new(10).expect("it exists");
    let mut group = saving();
    let _ = group.on_input(exited(103, DONE));
    let effects = group.on_input(Input::Forward(usr1, vec![0, 1, 3]));
    assert_eq!(effects, [100, 101].map(|pid| to_worker(pid, usr1)));
    let effects = group.on_input(exited(101, WorkerExit::Signaled { signal: 10 }));
    assert!(effects.iter().any(|e| matches!(e, Effect::ReportFailure { local_rank: 1, .. })));
    assert!(effects.iter().any(|e| matches!(e, Effect::Report(Event::WorkerExited { sent: None, .. }))), "{effects:?}");
}

#[test]
fn a_forwarded_signal_is_not_sent_to_the_process_group_of_a_dead_worker() {
    let usr1 = Signal::new(10).expect("it exists");
    let mut group = lingering();
    let forward = Input::Forward(usr1, vec![0, 1]);
    assert!(group.may_signal(&forward), "an exit that is not reported yet must be known");
    let _ = group.on_input(Input::Dead(vec![101]));
    assert_eq!(group.on_input(forward), [Effect::Signal { pid: 100, to: StopScope::Group, signal: usr1 }]);
}

fn expired(local_rank: u32, pid: i32, signal: Option<Signal>) -> Input {
    let (scope, at, seen) = ("epoch".to_owned(), None, Stamp(7));
    Input::TimerExpired(TimerExpired { local_rank, pid, scope, at, deadline_ms: 0, others: 0, signal, seen })
}

#[test]
fn an_expired_timer_signals_its_worker_and_fails_the_group() {
    let usr1 = Signal::new(10).expect("it exists");
    let mut group = lingering();
    let effects = after_evidence(&mut group, expired(1, 101, Some(usr1)));
    assert_eq!(effects[0], Effect::SignalProcess { pid: 101, signal: usr1 });
    assert_eq!(signals(&effects), [100, 102, 103].map(|pid| (pid, Signal::TERM)));
    assert!(effects.contains(&Effect::Hasten(Deadline::Kill, TERM_30.grace)));
    let reports: Vec<_> = effects.iter().skip_while(|e| !matches!(e, Effect::Report(_))).collect();
    let [Effect::Report(Event::TimerExpired(_)), Effect::ReportFailure { local_rank: 1, siblings: 3, .. }] =
        reports[..]
    else {
        panic!("SUP-3: {effects:?}");
    };
    assert_eq!(group.on_input(expired(2, 102, Some(usr1))), [], "the stop has its own deadline");
    let killed = signals(&group.on_input(Input::Expired(Deadline::Kill)));
    assert!(killed.contains(&(101, Signal::KILL)), "SUP-4");
    let _ = all_exit(&mut group, &PIDS, DONE);
    assert_eq!(end(&group.on_input(swept())).map(|end| end.outcome), Some(Outcome::Failed), "whatever it exits with");
}

#[test]
fn an_expired_timer_of_a_descendant_kills_it_and_stops_all_workers() {
    let mut group = lingering();
    let effects = after_evidence(&mut group, expired(1, 555, Some(Signal::KILL)));
    assert_eq!(effects[0], Effect::SignalProcess { pid: 555, signal: Signal::KILL });
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::TERM)));
}

#[test]
fn an_expired_timer_without_a_signal_is_only_reported() {
    let mut group = lingering();
    let effects = group.on_input(expired(1, 101, None));
    assert!(matches!(effects[..], [Effect::Report(Event::TimerExpired(_))]));
    let _ = group.on_input(exited(101, FAILED));
    assert_eq!(group.on_input(expired(1, 101, Some(Signal::KILL))), [], "it has ended");
}

fn any_exit() -> impl Strategy<Value = WorkerExit> {
    prop_oneof![
        3 => Just(DONE),
        1 => Just(FAILED),
        1 => Just(KILLED),
        1 => Just(ENDED),
        1 => Just(ABORTED),
        1 => Just(WorkerExit::Unknown),
    ]
}

fn any_input() -> impl Strategy<Value = Input> {
    let pid = || prop::sample::select(vec![100, 101, 102, 103, 999]);
    let timer = prop_oneof![
        Just(Deadline::Kill),
        Just(Deadline::GiveUp),
        Just(Deadline::Hang),
        Just(Deadline::Copies),
        (0..4_u32).prop_map(Deadline::Paused),
        (0..4_u32).prop_map(Deadline::Condemned)
    ];
    prop_oneof![
        6 => (pid(), any_exit()).prop_map(|(pid, exit)| exited(pid, exit)),
        2 => pid().prop_map(|pid| Input::Paused { pid, signal: 19 }),
        2 => pid().prop_map(|pid| Input::Continued { pid }),
        1 => Just(Input::Stop(TERM_30)),
        1 => Just(Input::Stop(KILL)),
        1 => Just(Input::Forward(Signal::new(10).expect("it exists"), vec![0, 1])),
        1 => Just(Input::Suspend),
        1 => Just(Input::Resume),
        2 => timer.prop_map(Input::Expired),
        1 => any::<bool>().prop_map(|hung| Input::NurseryLost(NurseryExit { exit: FAILED, hung })),
        1 => Just(Input::Fenced),
        1 => (0..4_u32, any::<bool>()).prop_map(|(rank, reaps)| expired(rank, 100, reaps.then_some(Signal::KILL))),
        1 => Just(Input::Watch(FOUR_SECONDS)),
        1 => Just(Input::Watch(DELAYED)),
        1 => Just(Input::StopForHang(TERM_30, remote_hang())),
        2 => Just(Input::Evidence(Vec::new())),
        2 => Just(Input::Recorded),
        2 => (0..4_u32).prop_map(raised),
        2 => (0..4_u32).prop_map(lost_peer),
        2 => (0..4_u32).prop_map(failed_by_itself),
        2 => (0..4_u32, any::<Option<bool>>()).prop_map(|(rank, progressed)| sampled(rank, progressed)),
        2 => prop::collection::vec(pid(), 0..3).prop_map(Input::Dead),
        4 => (0..4_u32, any::<bool>()).prop_map(|(rank, keeps)| keeping::keeper(rank, keeps.then_some(0))),
        2 => (0..4_u32).prop_map(|local_rank| Input::Copied { local_rank }),
        2 => Just(swept()),
    ]
}

/// Test double of the executor. Records the effects that the group returns, and checks that they are consistent.
#[derive(Default)]
struct Seen {
    exits: BTreeSet<u32>,
    ends: Vec<Outcome>,
    failures: u32,
    any_failed_exit: bool,
    armed: BTreeSet<Deadline>,
    owed_sweeps: u32,
    is_frozen: bool,
    takes_evidence: bool,
    records: Records,
    /// 1 while workers are copying their states after an order of the group, otherwise 0.
    open_orders: u32,
    /// Pids of all exited workers, whether or not their exits have been reported.
    gone: BTreeSet<i32>,
    stopped_groups: BTreeSet<i32>,
}

impl Seen {
    fn take(&mut self, effects: &[Effect]) -> Result<(), TestCaseError> {
        for effect in effects {
            prop_assert!(self.ends.is_empty(), "SUP-5: {effect:?} after the end");
            match effect {
                Effect::Report(Event::WorkerExited { local_rank, pid, exit, .. }) => {
                    self.gone.insert(*pid);
                    prop_assert!(self.exits.insert(*local_rank), "SUP-2: rank {local_rank} told twice");
                    self.any_failed_exit |= !exit.is_success();
                }
                Effect::ReportFailure { .. } => self.failures += 1,
                Effect::ReportEnd(end) => {
                    prop_assert!(!self.is_frozen, "the deadlines of the next group would stand still");
                    self.ends.push(end.outcome);
                }
                Effect::Arm(timer, _) | Effect::Hasten(timer, _) => {
                    self.armed.insert(*timer);
                }
                Effect::Disarm(timer) => {
                    self.armed.remove(timer);
                }
                Effect::Sweep(_) => self.owed_sweeps += 1,
                Effect::SweepOthers(_, savers) => {
                    self.owed_sweeps += 1;
                    let told = savers.workers.iter().all(|pid| self.stopped_groups.contains(pid));
                    prop_assert!(told, "SUP-8: they save because they have got the signal");
                    // The sweep kills the processes that the other workers left behind.
                    self.stopped_groups.extend(PIDS);
                }
                Effect::SweepWorker { .. } => panic!("nobody is replaced: {effect:?}"),
                Effect::TakeEvidence { .. } => {
                    prop_assert!(!self.takes_evidence, "one after the other");
                    self.takes_evidence = true;
                }
                Effect::TakeRecords => {
                    prop_assert_eq!(self.records, Records::NotRequested, "a second request removes the first records");
                    self.records = Records::Requested;
                }
                Effect::OrderCopies(_) => self.open_orders += 1,
                Effect::ReportCopies { .. } => {
                    prop_assert_eq!(std::mem::take(&mut self.open_orders), 1, "KEEP-1: one report for each order");
                }
                Effect::Freeze | Effect::Thaw => {
                    self.is_frozen = !self.is_frozen;
                    prop_assert_eq!(self.is_frozen, *effect == Effect::Freeze, "they take turns");
                }
                Effect::Signal { signal: Signal::CONT, .. } => {
                    prop_assert!(!self.is_frozen || effects.contains(&Effect::Thaw), "nobody goes on alone");
                }
                Effect::Signal { pid, to: StopScope::Group, signal: Signal::TERM | Signal::KILL } => {
                    self.stopped_groups.insert(*pid);
                }
                Effect::Signal { .. } | Effect::SignalProcess { .. } | Effect::Report(_) => {}
            }
        }
        if self.armed.contains(&Deadline::Kill) {
            let ended = self.exits.iter().map(|rank| PIDS[*rank as usize]);
            let left: Vec<_> = ended.filter(|pid| !self.stopped_groups.contains(pid)).collect();
            prop_assert_eq!(left, Vec::<i32>::new(), "SUP-8: nobody ends what they have left");
        }
        Ok(())
    }

    /// Answers the pending request for flight records. Returns true if there was such a request.
    fn takes_records(&mut self) -> bool {
        let is_due = self.records == Records::Requested;
        if is_due {
            self.records = Records::Done;
        }
        is_due
    }

    /// Checks that the helpers of a running worker get no stop signal, because the worker may need them to save a
    /// checkpoint.
    fn check_scope(&self, effects: &[Effect]) -> Result<(), TestCaseError> {
        for effect in effects {
            if let Effect::Signal { pid, to: StopScope::Group, signal: Signal::TERM } = effect {
                prop_assert!(self.gone.contains(pid), "SUP-8: {effect:?}, and it runs");
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Checks that the group finishes exactly once, whatever inputs it received before all workers exited and their
    /// leftover processes were cleaned up.
    #[test]
    fn the_group_ends_exactly_once_after_any_sequence_of_inputs(
        history in prop::collection::vec((any_input(), 0..5_u64, prop::array::uniform4(prop::option::of(0..5_u64))), 0..40),
        spares_helpers in any::<bool>(),
    ) {
        let mut group = if spares_helpers { saving() } else { lingering() };
        let mut seen = Seen::default();
        let mut now = 10;
        for (input, passed, beats) in history {
            now += passed;
            if input == swept() && seen.owed_sweeps == 0 {
                continue;
            }
            if let Input::Expired(timer) = &input && !seen.armed.remove(timer) {
                continue;
            }
            if let Input::Dead(pids) = &input {
                seen.gone.extend(pids.iter().filter(|pid| PIDS.contains(pid)));
            }
            if let Input::Evidence(_) = &input && !std::mem::take(&mut seen.takes_evidence) {
                continue;
            }
            if input == Input::Recorded && !seen.takes_records() {
                continue;
            }
            let looks_for_dead = group.may_signal(&input);
            if group.needs_snapshot(&input) {
                seen.take(&group.on_input(snapshot(now, beats.map(|ago| Some(now - ago?)))))?;
            }
            let is_passed_on = matches!(input, Input::Forward(..));
            if is_passed_on && looks_for_dead {
                let _ = group.on_input(Input::Dead(seen.gone.iter().copied().collect()));
            }
            let effects = group.on_input(input);
            if is_passed_on {
                prop_assert!(looks_for_dead, "who has died by itself must be known before");
                // The stop signals of exits that were held may be among the effects.
                let mut passed_on = signals(&effects).into_iter().filter(|(_, signal)| signal.number() == 10);
                prop_assert!(passed_on.all(|(pid, _)| !seen.gone.contains(&pid)), "SUP-6: {effects:?}");
            }
            let fails = effects.iter().any(|effect| matches!(effect, Effect::ReportFailure { .. }));
            prop_assert!(looks_for_dead || !fails, "who has died by itself must be known before");
            seen.take(&effects)?;
            if spares_helpers {
                seen.check_scope(&effects)?;
            }
        }
        if seen.takes_records() {
            seen.take(&group.on_input(Input::Recorded))?;
        }
        prop_assert!(!group.is_holding(), "an exit is never handled");
        if seen.open_orders > 0 {
            prop_assert!(seen.armed.contains(&Deadline::Copies), "nothing ends the wait");
            seen.take(&group.on_input(Input::Expired(Deadline::Copies)))?;
        }
        let stopping = seen.armed.contains(&Deadline::Kill) && group.phase != Phase::Saving;
        if stopping && seen.ends.is_empty() {
            let effects = group.on_input(Input::Expired(Deadline::Kill));
            let killed: BTreeSet<_> =
                signals(&effects).into_iter().filter(|(_, s)| *s == Signal::KILL).map(|(pid, _)| pid).collect();
            let spared = group.members.iter().filter(|m| m.is_excused()).map(|m| m.pid).collect();
            prop_assert!(killed.is_disjoint(&spared), "their exit has a limit of its own");
            prop_assert_eq!(killed.len() + spared.len(), PIDS.len(), "SUP-4");
            seen.take(&effects)?;
        }
        for pid in PIDS {
            seen.take(&group.on_input(exited(pid, KILLED)))?;
        }
        if seen.takes_records() {
            seen.take(&group.on_input(Input::Recorded))?;
        }
        if seen.ends.is_empty() {
            prop_assert!(seen.owed_sweeps > 0, "all are gone, and nobody sweeps");
            seen.take(&group.on_input(swept()))?;
        }
        prop_assert_eq!(seen.ends.len(), 1);
        prop_assert!(group.has_ended());
        prop_assert!(seen.failures <= 1);
        let exits = (0..4).map(Deadline::Exit).filter(|timer| seen.armed.contains(timer));
        prop_assert!(exits.count() == 0 || seen.exits.len() < PIDS.len(), "a deadline of a worker that has exited");
        if seen.ends[0] == Outcome::Succeeded {
            prop_assert!(!seen.any_failed_exit && seen.exits.len() == PIDS.len());
        }
    }
}
