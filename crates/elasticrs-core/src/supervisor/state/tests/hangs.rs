//! Tests of hang detection, and of the diagnostics about hung workers.

use super::*;
use crate::timer::hang::{Activity, Beat, Limits, RankState, RemoteHang, StepLimit};

pub(super) const FOUR_SECONDS: Limits = Limits {
    step: StepLimit::Fixed(Duration::from_secs(4)),
    startup: Some(Duration::from_secs(4)),
    exit: None,
    stop_delay: Duration::ZERO,
};

/// Returns an [`Input::Snapshot`] that is taken at the time `now`. `beats` contains the time of each rank's last
/// heartbeat, or `None` if the rank has sent none. All times are in seconds.
pub(super) fn snapshot(now: u64, beats: [Option<u64>; 4]) -> Input {
    let nanoseconds = |seconds| seconds * 1_000_000_000;
    let seen = beats.map(|last| match last {
        Some(last) => RankState::Heartbeat(Beat { last: nanoseconds(last), ..Beat::default() }),
        None => RankState::NoHeartbeat,
    });
    Input::Snapshot(Snapshot { at: Stamp(nanoseconds(now)), seen: seen.into(), line: None })
}

pub(super) fn remote_hang() -> RemoteHang {
    RemoteHang { silence: Duration::from_secs(4), step: None, frame: None }
}

pub(super) fn after_evidence(group: &mut Group, input: Input) -> Vec<Effect> {
    after(group, input, Vec::new())
}

fn after(group: &mut Group, input: Input, found: Vec<WorkerEvidence>) -> Vec<Effect> {
    let effects = group.on_input(input);
    assert!(matches!(effects[..], [Effect::TakeEvidence { .. }]), "{effects:?}");
    group.on_input(Input::Evidence(found))
}

/// Returns a group that has not checked its heartbeats yet. Rank 2 has been silent for four seconds, and the other
/// ranks for one second.
fn silent() -> Group {
    let mut group = lingering();
    let _ = group.on_input(snapshot(0, [Some(0); 4]));
    let _ = group.on_input(Input::Watch(FOUR_SECONDS));
    let _ = group.on_input(snapshot(4, [Some(3), Some(3), Some(0), Some(3)]));
    group
}

fn reports(effects: &[Effect]) -> Vec<&Effect> {
    effects.iter().skip_while(|effect| !matches!(effect, Effect::Report(_))).collect()
}

const LOOK: Input = Input::Expired(Deadline::Hang);

#[test]
fn a_hung_worker_is_killed_at_once_and_its_siblings_are_stopped() {
    let mut group = silent();
    let effects = after_evidence(&mut group, LOOK);
    assert_eq!(effects[0], to_group(102, Signal::KILL));
    assert_eq!(signals(&effects)[1..], [100, 101, 103].map(|pid| (pid, Signal::TERM)));
    let [Effect::Report(Event::WorkerHung(hung)), Effect::ReportFailure { local_rank: 2, siblings: 3, .. }] =
        reports(&effects)[..]
    else {
        panic!("SUP-3: {effects:?}");
    };
    assert_eq!((hung.local_rank, hung.ranks.len()), (2, 4));
    assert_eq!(group.on_input(LOOK), [], "the stop has its own deadline");
}

#[test]
fn a_worker_that_continues_while_evidence_is_gathered_has_not_hung() {
    let mut group = silent();
    let _ = group.on_input(LOOK);
    let _ = group.on_input(snapshot(5, [Some(3), Some(3), Some(5), Some(3)]));
    let effects = group.on_input(Input::Evidence(Vec::new()));
    assert_eq!(effects, [Effect::Arm(Deadline::Hang, Duration::from_secs(2))], "HANG-6");
}

#[test]
fn no_worker_is_reported_as_hung_while_the_group_is_suspended() {
    let mut group = silent();
    let _ = group.on_input(LOOK);
    let _ = group.on_input(Input::Suspend);
    let effects = group.on_input(Input::Evidence(Vec::new()));
    assert!(matches!(effects[..], [Effect::Arm(Deadline::Hang, _)]), "HANG-5: {effects:?}");
}

#[test]
fn a_hang_is_reported_before_the_failure_of_the_hung_worker() {
    let mut group = silent();
    let _ = group.on_input(LOOK);
    let effects = group.on_input(exited(100, DONE));
    assert!(matches!(effects[..], [Effect::Report(Event::WorkerExited { .. })]), "it leaves the others their time");
    let _ = group.on_input(Input::Dead(vec![102]));
    let effects = group.on_input(exited(102, FAILED));
    let [
        Effect::Report(Event::WorkerHung(_)),
        Effect::ReportFailure { local_rank: 2, siblings: 2, .. },
        Effect::Report(Event::WorkerExited { sent: Some(Signal::KILL), .. }),
    ] = reports(&effects)[..]
    else {
        panic!("{effects:?}");
    };
    assert_eq!(group.on_input(Input::Evidence(Vec::new())), [], "it comes too late");
}

#[test]
fn a_hang_is_reported_although_another_worker_that_died_with_the_hung_one_is_reported_first() {
    let mut group = lingering();
    let _ = group.on_input(snapshot(0, [Some(0); 4]));
    let _ = group.on_input(Input::Watch(FOUR_SECONDS));
    let _ = group.on_input(snapshot(4, [Some(3), Some(3), Some(0), Some(1)]));
    let _ = group.on_input(LOOK);
    let _ = group.on_input(Input::Dead(vec![102, 103]));
    let effects = group.on_input(exited(103, FAILED));
    assert_eq!(hung(&effects), [2], "rank 3 has not exceeded its limit: {effects:?}");
}

#[test]
fn an_expired_timer_is_reported_before_the_exit_that_ends_the_group() {
    let timer = || expired(1, 101, Some(Signal::KILL));
    let mut group = lingering();
    let _ = group.on_input(timer());
    let effects = group.on_input(exited(103, DONE));
    assert!(matches!(effects[..], [Effect::Report(Event::WorkerExited { .. })]));
    let effects = group.on_input(exited(100, FAILED));
    assert!(matches!(
        reports(&effects)[..2],
        [Effect::Report(Event::TimerExpired(_)), Effect::ReportFailure { local_rank: 1, .. }]
    ));
    let mut group = lingering();
    let _ = all_exit(&mut group, &[100, 102, 103], DONE);
    let _ = group.on_input(timer());
    let effects = group.on_input(exited(101, FAILED));
    assert!(matches!(reports(&effects)[0], Effect::Report(Event::TimerExpired(_))), "{effects:?}");
}

#[test]
fn members_that_go_on_are_spared_if_only_hung_ones_are_replaced() {
    for (replaces, expected) in [(true, vec![0, 1, 3]), (false, vec![])] {
        let mut group = group_of(&PIDS, LINGER, StopScope::Group, replaces);
        let _ = group.on_input(snapshot(0, [Some(0); 4]));
        let _ = group.on_input(Input::Watch(FOUR_SECONDS));
        let _ = group.on_input(snapshot(4, [Some(3), Some(3), Some(0), Some(3)]));
        let effects = group.on_input(LOOK);
        let [Effect::TakeEvidence { spared, .. }] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!(*spared, expected);
    }
}

/// Returns true if the effects report a failure, or signal a worker.
fn fails(effects: &[Effect]) -> bool {
    !signals(effects).is_empty() || effects.iter().any(|effect| matches!(effect, Effect::ReportFailure { .. }))
}

#[test]
fn an_exit_with_code_0_before_a_signal_cancels_a_hang_or_an_expired_timer() {
    let cancelled = [LOOK, expired(2, 102, Some(Signal::KILL)), expired(2, 555, Some(Signal::KILL))];
    for cause in cancelled {
        let mut group = silent();
        assert!(matches!(group.on_input(cause)[..], [Effect::TakeEvidence { .. }]));
        let effects = group.on_input(exited(102, DONE));
        assert!(!fails(&effects), "HANG-11: {effects:?}");
        assert!(matches!(effects[0], Effect::Report(Event::Degraded { .. })), "{effects:?}");
        assert!(!fails(&group.on_input(Input::Evidence(Vec::new()))), "the others continue");
        let _ = all_exit(&mut group, &[100, 101, 103], DONE);
        assert_eq!(end(&group.on_input(swept())).map(|end| end.outcome), Some(Outcome::Succeeded));
    }
}

#[test]
fn an_exit_with_code_0_after_the_signal_does_not_cancel_a_hang() {
    let mut group = silent();
    let _ = after_evidence(&mut group, LOOK);
    let effects = group.on_input(exited(102, DONE));
    assert!(matches!(
        effects[..],
        [Effect::Report(Event::WorkerExited { exit: DONE, sent: Some(Signal::KILL), .. }), ..]
    ));
    let _ = all_exit(&mut group, &[100, 101, 103], DONE);
    assert_eq!(end(&group.on_input(swept())).map(|end| end.outcome), Some(Outcome::Failed));
}

#[test]
fn a_dead_worker_is_judged_only_when_its_exit_code_is_known() {
    for (exit, is_hung) in [(DONE, false), (FAILED, true), (KILLED, true)] {
        let mut group = silent();
        let _ = group.on_input(LOOK);
        let _ = group.on_input(Input::Dead(vec![102]));
        assert_eq!(group.on_input(Input::Evidence(Vec::new())), [], "nobody knows how it exited");
        let effects = group.on_input(exited(102, exit));
        assert_eq!(hung(&effects), if is_hung { vec![2] } else { vec![] }, "{effects:?}");
        assert_eq!(fails(&effects), is_hung);
        assert_eq!(effects.iter().any(|effect| matches!(effect, Effect::Arm(Deadline::Hang, _))), !is_hung);
    }
}

#[test]
fn the_time_limits_of_waiting_workers_restart_when_the_hung_worker_succeeds() {
    let mut group = lingering();
    let _ = group.on_input(snapshot(0, [Some(0); 4]));
    let _ = group.on_input(Input::Watch(FOUR_SECONDS));
    let _ = group.on_input(snapshot(4, [Some(0); 4]));
    let _ = group.on_input(LOOK);
    let _ = group.on_input(exited(102, DONE));
    let effects = group.on_input(Input::Evidence(Vec::new()));
    assert_eq!(effects, [Effect::Arm(Deadline::Hang, Duration::from_secs(4))], "HANG-11");
    let _ = group.on_input(snapshot(8, [Some(0); 4]));
    assert!(matches!(group.on_input(LOOK)[..], [Effect::TakeEvidence { .. }]), "they have hung after all");
}

#[test]
fn an_exit_with_code_0_does_not_cancel_a_hang_that_other_nodes_know_of() {
    let mut group = silent_beside_others();
    let _ = group.on_input(Input::Evidence(Vec::new()));
    let effects = group.on_input(exited(102, DONE));
    assert!(effects.iter().any(|effect| matches!(effect, Effect::ReportFailure { local_rank: 2, .. })));
}

/// Returns a strategy for inputs about exits, hangs, expired timers, stops and suspensions of a group's workers.
fn any_input_about_hangs() -> impl Strategy<Value = Input> {
    let pid = || prop::sample::select(PIDS.to_vec());
    prop_oneof![
        4 => (pid(), any_exit()).prop_map(|(pid, exit)| exited(pid, exit)),
        4 => Just(LOOK),
        3 => Just(Input::Evidence(Vec::new())),
        2 => prop::collection::vec(pid(), 0..3).prop_map(Input::Dead),
        2 => (0..4_u32, prop::sample::select(vec![100, 101, 555]))
            .prop_map(|(rank, pid)| expired(rank, pid, Some(Signal::KILL))),
        1 => Just(Input::StopForHang(TERM_30, remote_hang())),
        1 => Just(Input::Stop(TERM_30)),
        1 => Just(Input::Suspend),
        1 => Just(Input::Resume),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Checks **HANG-11**: no failure is reported for a worker that exits with code 0 without having been signalled.
    #[test]
    fn a_worker_that_succeeds_without_a_signal_is_never_blamed(
        history in prop::collection::vec((any_input_about_hangs(), 0..5_u64), 0..30),
        replaces in any::<bool>(),
    ) {
        let mut group = group_of(&PIDS, LINGER, StopScope::Group, replaces);
        let _ = group.on_input(snapshot(0, [Some(0); 4]));
        let _ = group.on_input(Input::Watch(FOUR_SECONDS));
        let (mut now, mut takes_evidence) = (0, false);
        let (mut gone, mut reported, mut signalled) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let (mut blamed, mut innocent) = (BTreeSet::new(), BTreeSet::new());
        for (input, passed) in history {
            now += passed;
            if matches!(input, Input::Evidence(_)) && !std::mem::take(&mut takes_evidence) {
                continue;
            }
            match &input {
                Input::Dead(pids) => gone.extend(pids.iter().copied()),
                Input::Exited { pid, exit, .. } => {
                    gone.insert(*pid);
                    let is_first = reported.insert(*pid);
                    let local_rank = PIDS.iter().position(|known| known == pid);
                    innocent.extend(local_rank.filter(|_| *exit == DONE && is_first && !signalled.contains(pid)));
                }
                _ => {}
            }
            if group.may_signal(&input) {
                let _ = group.on_input(Input::Dead(gone.iter().copied().collect()));
            }
            let _ = group.on_input(snapshot(now, [Some(0); 4]));
            for effect in group.on_input(input) {
                blamed.extend(match &effect {
                    Effect::Report(Event::WorkerHung(hung)) => Some(hung.local_rank as usize),
                    Effect::Report(Event::TimerExpired(timer)) => Some(timer.local_rank as usize),
                    Effect::ReportFailure { local_rank, .. } => Some(*local_rank as usize),
                    _ => None,
                });
                match effect {
                    Effect::TakeEvidence { .. } => takes_evidence = true,
                    Effect::Signal { pid, .. } | Effect::SignalProcess { pid, .. } => signalled.extend(Some(pid)),
                    _ => {}
                }
            }
        }
        prop_assert!(blamed.is_disjoint(&innocent), "HANG-11: {:?} of {:?}", innocent, blamed);
    }
}

#[test]
fn only_the_first_expired_timer_sends_its_signal() {
    let mut group = lingering();
    let _ = group.on_input(expired(1, 101, Some(Signal::TERM)));
    for rank in [1, 2] {
        assert_eq!(group.on_input(expired(rank, 555, Some(Signal::KILL))), []);
    }
    let effects = group.on_input(Input::Evidence(Vec::new()));
    let sent: Vec<_> = effects.iter().filter(|effect| matches!(effect, Effect::SignalProcess { .. })).collect();
    assert_eq!(sent, [&Effect::SignalProcess { pid: 101, signal: Signal::TERM }]);
}

#[test]
fn a_stop_during_evidence_gathering_still_reports_the_hung_worker() {
    let mut group = silent();
    let _ = group.on_input(LOOK);
    let effects = group.on_input(Input::Stop(TERM_30));
    assert_eq!(effects[0], to_group(102, Signal::KILL));
    assert!(matches!(reports(&effects)[..2], [Effect::Report(Event::WorkerHung(_)), Effect::ReportFailure { .. }]));
    assert!(effects.contains(&Effect::Hasten(Deadline::Kill, TERM_30.grace)));
}

#[test]
fn a_worker_that_may_block_another_node_is_reported_and_gets_a_grace_period() {
    let is_stopped = || vec![WorkerEvidence { local_rank: 2, state: 'T', ..WorkerEvidence::default() }];
    let mut group = silent();
    let _ = group.on_input(snapshot(3, [Some(3), Some(3), Some(0), Some(3)]));
    let effects = after(&mut group, Input::StopForHang(TERM_30, remote_hang()), is_stopped());
    assert!(matches!(&effects[0], Effect::Report(Event::WorkerHung(hung)) if hung.local_rank == 2), "{effects:?}");
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::TERM)));
    let effects = after(&mut silent(), Input::StopForHang(TERM_30, remote_hang()), is_stopped());
    assert_eq!(effects[0], to_group(102, Signal::KILL), "it has hung here as well");
    let effects = after_evidence(&mut silent(), Input::StopForHang(TERM_30, remote_hang()));
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::TERM)), "nothing says that it is this one");
    let effects = lingering().on_input(Input::StopForHang(TERM_30, remote_hang()));
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::TERM)), "nobody is watched");
}

/// Time limits for a job that runs on several nodes.
pub(super) const DELAYED: Limits = Limits { stop_delay: Duration::from_secs(1), ..FOUR_SECONDS };

/// Returns the group from [`silent`], configured to stop its workers one second after a hang is reported.
fn silent_beside_others() -> Group {
    let mut group = silent();
    let _ = group.on_input(Input::Watch(DELAYED));
    let _ = group.on_input(snapshot(4, [Some(3), Some(3), Some(0), Some(3)]));
    group
}

#[test]
fn a_hung_worker_is_reported_at_once_but_killed_after_the_stop_delay() {
    let mut group = silent_beside_others();
    let effects = group.on_input(Input::Evidence(Vec::new()));
    let [Effect::Report(Event::WorkerHung(hung)), Effect::Arm(Deadline::Hang, delay)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert_eq!((hung.local_rank, *delay), (2, DELAYED.stop_delay));
    assert_eq!(group.on_input(Input::StopForHang(TERM_30, remote_hang())), [], "another node reports a hang as well");
    assert_eq!(group.on_input(LOOK), [], "the delay is not over");
    let _ = group.on_input(snapshot(5, [Some(3), Some(3), Some(0), Some(3)]));
    let effects = group.on_input(LOOK);
    assert_eq!(effects[0], to_group(102, Signal::KILL));
    assert_eq!(signals(&effects)[1..4], [100, 101, 103].map(|pid| (pid, Signal::TERM)));
    assert!(matches!(reports(&effects)[..], []), "the hang is reported only once: {effects:?}");
    assert!(effects.iter().any(|effect| matches!(effect, Effect::ReportFailure { local_rank: 2, .. })));
}

#[test]
fn a_failure_or_another_stop_ends_the_stop_delay() {
    let mut group = silent_beside_others();
    let _ = group.on_input(Input::Evidence(Vec::new()));
    let effects = group.on_input(exited(100, FAILED));
    let failures: Vec<_> = effects.iter().filter(|effect| matches!(effect, Effect::ReportFailure { .. })).collect();
    assert_eq!(effects[0], to_group(102, Signal::KILL));
    assert!(matches!(failures[..], [Effect::ReportFailure { local_rank: 2, .. }]), "rank 2 hung first: {effects:?}");
    let mut group = silent_beside_others();
    let _ = group.on_input(Input::Evidence(Vec::new()));
    assert_eq!(group.on_input(Input::Stop(TERM_30))[0], to_group(102, Signal::KILL));
}

#[test]
fn a_group_is_stopped_after_the_stop_delay_if_another_node_hangs() {
    let mut group = lingering();
    let _ = group.on_input(snapshot(0, [Some(0); 4]));
    let _ = group.on_input(Input::Watch(DELAYED));
    let _ = group.on_input(snapshot(1, [Some(1); 4]));
    let effects = after_evidence(&mut group, Input::StopForHang(TERM_30, remote_hang()));
    assert_eq!(effects, [Effect::Arm(Deadline::Hang, DELAYED.stop_delay)]);
    let _ = group.on_input(snapshot(2, [Some(1); 4]));
    assert_eq!(signals(&group.on_input(LOOK)), PIDS.map(|pid| (pid, Signal::TERM)));
}

/// Creates a group whose failed workers are replaced. Rank 2 of the group hangs, and rank 1 waits for rank 2. Both
/// ranks have therefore stopped sending heartbeats.
fn waiting_for_one() -> Group {
    let mut group = group_of(&PIDS, LINGER, StopScope::Group, true);
    let _ = group.on_input(snapshot(0, [Some(0); 4]));
    let _ = group.on_input(Input::Watch(FOUR_SECONDS));
    let _ = group.on_input(snapshot(5, [Some(5), Some(0), Some(1), Some(5)]));
    group
}

/// Returns the heartbeats of the group created by [`waiting_for_one`] one second later, after rank 2 has exited.
fn without_rank_2() -> Input {
    let Input::Snapshot(mut snapshot) = snapshot(6, [Some(6), Some(0), None, Some(6)]) else { unreachable!() };
    snapshot.seen[2] = RankState::Exited;
    Input::Snapshot(snapshot)
}

fn hung(effects: &[Effect]) -> Vec<u32> {
    let rank = |effect: &Effect| match effect {
        Effect::Report(Event::WorkerHung(hung)) => Some(hung.local_rank),
        _ => None,
    };
    effects.iter().filter_map(rank).collect()
}

#[test]
fn a_worker_that_waited_for_a_replaced_worker_has_not_hung() {
    let mut group = waiting_for_one();
    let stopped = WorkerEvidence { local_rank: 2, state: 'T', ..WorkerEvidence::default() };
    let effects = after(&mut group, LOOK, vec![stopped]);
    assert_eq!(hung(&effects), [2]);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::TakeEvidence { .. })), "{effects:?}");
    assert_eq!(group.on_input(LOOK), [], "it has to end first");
    let effects = group.on_input(exited(102, WorkerExit::Signaled { signal: 9 }));
    assert!(effects.contains(&Effect::Arm(Deadline::Hang, Duration::ZERO)), "{effects:?}");
    let _ = group.on_input(without_rank_2());
    let effects = group.on_input(LOOK);
    assert!(matches!(effects[..], [Effect::Arm(Deadline::Hang, _)]), "{effects:?}");
}

#[test]
fn a_failure_during_evidence_gathering_blames_no_waiting_worker() {
    let mut group = waiting_for_one();
    assert!(matches!(group.on_input(LOOK)[..], [Effect::TakeEvidence { .. }]));
    let effects = group.on_input(exited(102, FAILED));
    assert_eq!(hung(&effects), [] as [u32; 0], "rank 1, whose sign of activity is older, waited for it");
    let _ = group.on_input(without_rank_2());
    let effects = group.on_input(Input::Evidence(Vec::new()));
    assert!(matches!(effects[..], [Effect::Arm(Deadline::Hang, _)]), "{effects:?}");
}

#[test]
fn a_hung_worker_that_exits_during_evidence_gathering_is_reported_as_hung() {
    let mut group = waiting_for_one();
    assert!(matches!(group.on_input(LOOK)[..], [Effect::TakeEvidence { .. }]));
    assert_eq!(hung(&group.on_input(exited(101, FAILED))), [1]);
}

fn frame(local_rank: u32, frame: &str) -> WorkerEvidence {
    WorkerEvidence { local_rank, frame: Some(frame.to_owned()), ..WorkerEvidence::default() }
}

const REDUCE: &str = "File \"/lib/torch/distributed/distributed_c10d.py\", line 4181 in all_reduce";
const LOADS: &str = "File \"/job/train.py\", line 7 in load";

fn busy(local_rank: u32) -> WorkerEvidence {
    WorkerEvidence { activity: Activity::Works, ..frame(local_rank, LOADS) }
}

fn waiting(local_rank: u32) -> WorkerEvidence {
    WorkerEvidence { activity: Activity::Waits, ..frame(local_rank, REDUCE) }
}

/// Returns a group in which no rank has sent a heartbeat for four seconds.
fn all_silent() -> Group {
    let mut group = silent();
    let _ = group.on_input(snapshot(4, [Some(0); 4]));
    group
}

#[test]
fn a_rank_that_works_outside_of_collectives_is_slow_and_not_hung() {
    let mut group = all_silent();
    let found = || vec![busy(0), waiting(1), waiting(2), waiting(3)];
    let effects = group.on_input(LOOK);
    assert!(matches!(effects[..], [Effect::TakeEvidence { measures_work: true, .. }]), "{effects:?}");
    let effects = group.on_input(Input::Evidence(found()));
    assert!(
        matches!(effects[..], [Effect::Report(Event::Degraded { .. }), Effect::Arm(Deadline::Hang, _)]),
        "HANG-12: {effects:?}"
    );
    let _ = group.on_input(snapshot(8, [Some(0); 4]));
    let effects = after(&mut group, LOOK, found());
    assert!(matches!(effects[..], [Effect::Arm(Deadline::Hang, _)]), "the user knows already: {effects:?}");
    let _ = group.on_input(snapshot(12, [Some(0); 4]));
    let effects = after(&mut group, LOOK, vec![waiting(0), waiting(1), waiting(2), waiting(3)]);
    assert_eq!(hung(&effects).len(), 1, "now all wait: {effects:?}");
}

#[test]
fn a_slow_rank_does_not_excuse_a_blocked_rank_or_a_rank_of_unknown_activity() {
    for other in [WorkerEvidence { activity: Activity::Blocked, ..frame(1, LOADS) }, frame(1, LOADS)] {
        let effects = after(&mut all_silent(), LOOK, vec![busy(0), other, waiting(2), waiting(3)]);
        assert_eq!(hung(&effects).len(), 1, "{effects:?}");
    }
    let effects = after(&mut all_silent(), LOOK, vec![waiting(0), waiting(1), waiting(2), waiting(3)]);
    assert_eq!(hung(&effects).len(), 1, "they wait for each other: {effects:?}");
}

#[test]
fn a_slow_rank_counts_as_hung_after_the_generous_limit() {
    let mut group = all_silent();
    let mut now = 4;
    while now < 40 {
        let _ = group.on_input(snapshot(now, [Some(0); 4]));
        let effects = after(&mut group, LOOK, (0..4).map(busy).collect());
        assert_eq!(hung(&effects), [] as [u32; 0], "after {now} s");
        now += 4;
    }
    let _ = group.on_input(snapshot(now, [Some(0); 4]));
    let effects = after(&mut group, LOOK, (0..4).map(busy).collect());
    assert_eq!(hung(&effects).len(), 1, "HANG-12: {effects:?}");
}

/// Returns a group in which rank 0 is in a section without a time limit, and the other ranks have sent no heartbeat for
/// four seconds.
fn beside_a_section() -> Group {
    let mut group = silent();
    let section = Some(crate::timer::hang::Section { name: "checkpoint".to_owned(), limit: None });
    let mut seen = vec![RankState::Heartbeat(Beat { section, ..Beat::default() })];
    seen.extend([0; 3].map(|last| RankState::Heartbeat(Beat { last, ..Beat::default() })));
    let _ = group.on_input(Input::Snapshot(Snapshot { at: Stamp(4_000_000_000), seen, line: None }));
    group
}

#[test]
fn ranks_that_wait_for_a_rank_in_a_section_are_not_killed() {
    let mut group = beside_a_section();
    let effects = after(&mut group, LOOK, (1..4).map(|rank| frame(rank, REDUCE)).collect());
    assert_eq!(signals(&effects), []);
    assert!(matches!(reports(&effects)[0], Effect::Report(Event::Degraded { .. })), "{effects:?}");
}

#[test]
fn a_section_does_not_excuse_a_rank_that_does_not_wait() {
    let mut group = beside_a_section();
    let found = vec![frame(1, REDUCE), frame(2, LOADS), frame(3, REDUCE)];
    let effects = after(&mut group, LOOK, found);
    assert_eq!(effects.iter().filter(|effect| **effect == to_group(102, Signal::KILL)).count(), 1, "{effects:?}");
}
