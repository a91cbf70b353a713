//! Tests of workers that have recorded an uncaught exception.

use super::*;

const AFTER_TERM: KillReason = KillReason::AfterSignal(Signal::TERM);

/// Returns the record of an exception of a worker's own process.
fn exception(local_rank: u32, is_own: bool) -> WorkerRaised {
    exception_from(local_rank, if is_own { Origin::Own } else { Origin::Unknown })
}

fn exception_from(local_rank: u32, origin: Origin) -> WorkerRaised {
    let (pid, limit) = (PIDS[local_rank as usize], Some(Duration::from_secs(10)));
    WorkerRaised { local_rank, pid, text: String::new(), seen: Stamp(5), limit, origin, exit: ExitStage::Begun }
}

fn all_raised(workers: Vec<WorkerRaised>) -> Input {
    Input::Raised { workers, dying: Vec::new() }
}

/// Creates the input for an exception that another worker's exit may have caused.
pub(super) fn raised(local_rank: u32) -> Input {
    all_raised(vec![exception(local_rank, false)])
}

/// Creates the input for an exception that reports a lost peer.
pub(super) fn lost_peer(local_rank: u32) -> Input {
    all_raised(vec![exception_from(local_rank, Origin::Peer)])
}

/// Creates the input for an exception that another worker's exit cannot have caused.
pub(super) fn failed_by_itself(local_rank: u32) -> Input {
    all_raised(vec![exception(local_rank, true)])
}

fn failures(effects: &[Effect]) -> Vec<(u32, Stamp, u32)> {
    let found = effects.iter().filter_map(|effect| match effect {
        Effect::ReportFailure { local_rank, seen, siblings } => Some((*local_rank, *seen, *siblings)),
        _ => None,
    });
    found.collect()
}

#[test]
fn an_exception_of_its_own_stops_the_siblings_at_once_but_not_the_worker() {
    let mut group = lingering();
    let effects = group.on_input(failed_by_itself(2));
    assert_eq!(signals(&effects), [100, 101, 103].map(|pid| (pid, Signal::TERM)));
    assert_eq!(failures(&effects), [(2, Stamp(5), 3)], "at the time of the exception");
    assert!(effects.contains(&Effect::Hasten(Deadline::Kill, TERM_30.grace)));
    let effects = group.on_input(exited(102, DONE));
    let is_own = |e: &Effect| matches!(e, Effect::Report(Event::WorkerExited { sent: None, .. }));
    assert!(effects.iter().any(is_own), "{effects:?}");
    assert_eq!(signals(&effects), [(102, Signal::TERM)], "what it has left in its group");
    let _ = all_exit(&mut group, &[100, 101, 103], FAILED);
    assert_eq!(end(&group.on_input(swept())).map(|end| end.outcome), Some(Outcome::Failed), "whatever it exits with");
}

#[test]
fn exceptions_of_the_same_moment_all_end_by_themselves_and_the_earliest_is_the_failure() {
    let mut group = lingering();
    let earlier = WorkerRaised { seen: Stamp(4), ..exception(3, true) };
    let effects = group.on_input(all_raised(vec![exception(0, true), exception(1, false), earlier]));
    assert_eq!(signals(&effects), [(101, Signal::TERM), (102, Signal::TERM)]);
    assert_eq!(failures(&effects), [(3, Stamp(4), 2)]);
}

#[test]
fn an_exception_that_the_worker_may_survive_stops_nobody() {
    let of_descendant = WorkerRaised { pid: 555, ..exception(2, true) };
    for workers in [vec![of_descendant], vec![exception(2, false)]] {
        let mut group = lingering();
        let effects = group.on_input(all_raised(workers));
        assert_eq!((signals(&effects), failures(&effects)), (vec![], vec![]));
        assert!(group.is_running());
    }
    let mut group = group_of(&PIDS, LINGER, StopScope::Group, true);
    let effects = group.on_input(failed_by_itself(2));
    assert_eq!((signals(&effects), failures(&effects)), (vec![], vec![]), "it is replaced after its exit");
}

#[test]
fn an_exception_beside_a_dying_worker_waits_for_that_exit() {
    let dying = || Input::Raised { workers: vec![exception(2, true)], dying: vec![101] };
    let mut group = lingering();
    let _ = group.on_input(dying());
    assert!(group.is_running());
    assert_eq!(failures(&group.on_input(exited(101, KILLED))), [(1, Stamp(7), 3)], "it came first");

    let mut group = lingering();
    let _ = group.on_input(Input::Dead(vec![101]));
    let _ = group.on_input(failed_by_itself(2));
    assert!(group.is_running());
    assert!(group.may_signal(&exited(101, DONE)));
    assert_eq!(failures(&group.on_input(exited(101, DONE))), [(2, Stamp(5), 2)], "it was innocent");
}

#[test]
fn a_worker_whose_exception_stopped_the_group_keeps_the_limit_of_its_exit() {
    let mut group = lingering();
    let _ = group.on_input(failed_by_itself(2));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(signals(&effects), [100, 101, 103].map(|pid| (pid, Signal::KILL)));
    assert_eq!(killed(&effects), [(vec![0, 1, 3], AFTER_TERM, 30)]);
    let _ = group.on_input(sampled(2, None));
    let effects = group.on_input(sampled(2, Some(true)));
    let [Effect::Report(Event::WorkerRaised(report)), Effect::Arm(Deadline::Condemned(2), grace), _] = &effects[..]
    else {
        panic!("{effects:?}");
    };
    assert_eq!((report.exit, *grace), (ExitStage::Slow, TERM_30.grace));
    assert!(matches!(group.on_input(sampled(2, Some(true)))[..], [Effect::Arm(Deadline::Exit(2), _)]), "told once");
    let effects = group.on_input(Input::Expired(Deadline::Condemned(2)));
    assert_eq!(killed(&effects), [(vec![2], KillReason::SlowExit, 30)]);
    assert_eq!(signals(&effects)[0], (102, Signal::KILL));
    assert!(effects.contains(&Effect::Arm(Deadline::GiveUp, GIVE_UP_AFTER)), "nobody is left with time");
}

#[test]
fn a_stalled_exit_after_the_stop_is_examined_and_killed() {
    let mut group = lingering();
    let _ = group.on_input(failed_by_itself(2));
    let _ = group.on_input(sampled(2, None));
    let effects = after_evidence(&mut group, sampled(2, Some(false)));
    let [
        Effect::Signal { pid: 102, signal: Signal::KILL, .. },
        Effect::Report(Event::WorkerRaised(WorkerRaised { exit: ExitStage::Stalled, .. })),
    ] = effects[..]
    else {
        panic!("{effects:?}");
    };
    assert_eq!(killed(&group.on_input(Input::Expired(Deadline::Kill))), [(vec![0, 1, 3], AFTER_TERM, 30)]);
}

#[test]
fn a_stop_with_sigkill_spares_only_the_worker_that_raised() {
    let policy = GroupPolicy { on_failure: KILL, on_success: LINGER, ..policy() };
    let mut group = Group::new(&PIDS, policy);
    assert_eq!(signals(&group.on_input(failed_by_itself(2))), [100, 101, 103].map(|pid| (pid, Signal::KILL)));
    let effects = group.on_input(exited(102, FAILED));
    assert!(effects.contains(&Effect::Arm(Deadline::GiveUp, GIVE_UP_AFTER)), "{effects:?}");
}

#[test]
fn a_requested_stop_is_also_for_a_worker_that_is_exiting_after_an_exception() {
    let mut group = lingering();
    let _ = group.on_input(failed_by_itself(2));
    assert_eq!(signals(&group.on_input(Input::Stop(TERM_30))), PIDS.map(|pid| (pid, Signal::TERM)));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)));
}

/// Creates the input for a progress check of an exiting worker. `progressed` is the result of the check.
pub(super) fn sampled(local_rank: u32, progressed: Option<bool>) -> Input {
    Input::ExitSampled { local_rank, progressed }
}

/// Returns the contents of all events that report killed workers: the local ranks, the reason, and the exceeded time
/// limit in seconds.
pub(super) fn killed(effects: &[Effect]) -> Vec<(Vec<u32>, KillReason, u64)> {
    let reports = effects.iter().filter_map(|effect| match effect {
        Effect::Report(Event::WorkersKilled(killed)) => Some(killed),
        _ => None,
    });
    let ranks = |killed: &WorkersKilled| killed.workers.iter().map(|(local_rank, _)| *local_rank).collect();
    reports.map(|killed| (ranks(killed), killed.reason, killed.limit.as_secs())).collect()
}

#[test]
fn a_worker_that_stalls_after_an_exception_is_killed_and_reported_as_failed() {
    let mut group = lingering();
    let effects = group.on_input(raised(2));
    let [Effect::Report(Event::WorkerRaised(report)), Effect::Arm(Deadline::Exit(2), limit)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert_eq!((report.exit, *limit), (ExitStage::Begun, Duration::from_secs(5)), "half of its time, for two samples");
    assert_eq!(group.on_input(sampled(2, None)), [Effect::Arm(Deadline::Exit(2), *limit)]);
    let effects = after_evidence(&mut group, sampled(2, Some(false)));
    assert_eq!(
        signals(&effects),
        [(102, Signal::KILL), (100, Signal::TERM), (101, Signal::TERM), (103, Signal::TERM)],
        "it has had its time; the others get theirs"
    );
    let reports: Vec<_> = effects.iter().skip_while(|e| !matches!(e, Effect::Report(_))).collect();
    let [
        Effect::Report(Event::WorkerRaised(WorkerRaised { exit: ExitStage::Stalled, .. })),
        Effect::ReportFailure { local_rank: 2, seen: Stamp(5), siblings: 3 },
    ] = reports[..]
    else {
        panic!("SUP-3: {effects:?}");
    };
}

#[test]
fn a_worker_that_exits_in_time_or_has_no_exit_limit_is_not_killed() {
    let mut group = lingering();
    let _ = group.on_input(raised(2));
    let effects = group.on_input(exited(102, FAILED));
    assert!(effects.contains(&Effect::Disarm(Deadline::Exit(2))));
    assert_eq!(group.on_input(sampled(2, Some(false))), []);
    let mut group = lingering();
    let effects = group.on_input(all_raised(vec![WorkerRaised { limit: None, ..exception(2, false) }]));
    assert!(matches!(effects[..], [Effect::Report(Event::WorkerRaised(_))]));
    assert_eq!(group.on_input(sampled(2, Some(false))), [], "it may take any time");
    assert_eq!(group.on_input(sampled(0, Some(false))), [], "it has not raised");
}

#[test]
fn a_slow_exit_with_progress_fails_the_group_but_is_not_signalled() {
    let mut group = lingering();
    let _ = group.on_input(raised(2));
    let _ = group.on_input(sampled(2, None));
    let effects = group.on_input(sampled(2, Some(true)));
    assert_eq!(signals(&effects), [100, 101, 103].map(|pid| (pid, Signal::TERM)), "the failed worker is left alone");
    let reports: Vec<_> = effects.iter().skip_while(|e| !matches!(e, Effect::Report(_))).collect();
    let [
        Effect::Report(Event::WorkerRaised(WorkerRaised { exit: ExitStage::Slow, .. })),
        Effect::ReportFailure { local_rank: 2, seen: Stamp(5), siblings: 3 },
        Effect::Arm(Deadline::Exit(2), _),
    ] = reports[..]
    else {
        panic!("SUP-3: {effects:?}");
    };
    assert!(matches!(group.on_input(sampled(2, Some(true)))[..], [Effect::Arm(Deadline::Exit(2), _)]));
    let effects = group.on_input(exited(102, FAILED));
    let is_reported =
        effects.iter().any(|e| matches!(e, Effect::Report(Event::WorkerExited { sent: None, exit: FAILED, .. })));
    assert!(is_reported, "it ended by itself: {effects:?}");
}

#[test]
fn a_worker_that_exits_too_slowly_is_killed_with_the_reason_slow_exit() {
    let mut group = lingering();
    let _ = group.on_input(raised(2));
    let _ = group.on_input(sampled(2, Some(true)));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(killed(&effects), [(vec![0, 1, 3], AFTER_TERM, 30), (vec![2], KillReason::SlowExit, 30)]);
}

#[test]
fn the_kill_reason_of_a_slow_exit_is_the_signal_of_a_second_stop() {
    let mut group = lingering();
    let _ = group.on_input(raised(2));
    let _ = group.on_input(sampled(2, Some(true)));
    let _ = group.on_input(Input::Stop(StopPolicy { grace: Duration::from_secs(3), ..TERM_30 }));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(killed(&effects), [(vec![0, 1, 2, 3], AFTER_TERM, 3)]);
}

#[test]
fn the_kill_reason_after_an_expired_timer_is_the_signal_of_the_timer() {
    let usr1 = Signal::new(10).expect("it exists");
    let mut group = lingering();
    let _ = after_evidence(&mut group, expired(1, 101, Some(usr1)));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(killed(&effects), [(vec![0, 2, 3], AFTER_TERM, 30), (vec![1], KillReason::AfterSignal(usr1), 30)]);
}

#[test]
fn a_stopped_worker_that_raised_and_stalls_is_killed_before_the_grace_is_over() {
    let mut group = lingering();
    let _ = group.on_input(exited(101, FAILED));
    let effects = group.on_input(raised(0));
    assert!(matches!(effects[..], [Effect::Arm(Deadline::Exit(0), _)]), "a consequence is not told: {effects:?}");
    let _ = group.on_input(sampled(0, None));
    assert_eq!(signals(&group.on_input(sampled(0, Some(true)))), [], "it may be saving");
    let effects = group.on_input(sampled(0, Some(false)));
    assert_eq!(signals(&effects), [(100, Signal::KILL)]);
    assert_eq!(killed(&effects), [(vec![0], KillReason::StalledExit, 5)]);
    assert_eq!(group.on_input(sampled(0, Some(false))), [], "once");
    assert_eq!(group.on_input(sampled(2, Some(false))), [], "this one has not raised, and may be saving");
}

#[test]
fn killed_workers_are_reported_once_with_the_stop_signal_and_grace_period() {
    let mut group = lingering();
    let _ = group.on_input(Input::Stop(StopPolicy { grace: Duration::from_secs(4), ..TERM_30 }));
    let _ = group.on_input(exited(101, DONE));
    let _ = group.on_input(Input::Dead(vec![103]));
    let effects = group.on_input(Input::Expired(Deadline::Kill));
    assert_eq!(killed(&effects), [(vec![0, 2], AFTER_TERM, 4)]);
    let last_signal = effects.iter().rposition(|effect| matches!(effect, Effect::Signal { .. }));
    let report = effects.iter().position(|effect| matches!(effect, Effect::Report(_)));
    assert!(report > last_signal, "the signals come first");
    let mut group = lingering();
    assert_eq!(killed(&group.on_input(Input::Stop(KILL))), [], "it was asked for");
}
