//! Tests that after some failures, the group requests the flight records before it stops the other workers.

use super::exits::{failed_by_itself, lost_peer};
use super::*;

/// Returns a group whose workers write flight records.
fn recording() -> Group {
    let mut group = lingering();
    let _ = group.on_input(snapshot(0, [Some(0); 4]));
    let _ = group.on_input(Input::Watch(FOUR_SECONDS));
    group
}

fn failed(effects: &[Effect]) -> Option<(u32, Stamp)> {
    effects.iter().find_map(|effect| match effect {
        Effect::ReportFailure { local_rank, seen, .. } => Some((*local_rank, *seen)),
        _ => None,
    })
}

fn exits(effects: &[Effect]) -> Vec<u32> {
    let exits = effects.iter().filter_map(|effect| match effect {
        Effect::Report(Event::WorkerExited { local_rank, .. }) => Some(*local_rank),
        _ => None,
    });
    exits.collect()
}

#[test]
fn after_an_abort_the_siblings_are_stopped_when_the_records_are_written() {
    let mut group = recording();
    assert_eq!(group.on_input(exited(101, ABORTED)), [Effect::TakeRecords]);
    // A sibling also fails, because it has lost its connection to the aborted worker.
    let effects = group.on_input(lost_peer(2));
    assert!(matches!(effects[..], [Effect::Report(Event::WorkerRaised(_)), ..]), "{effects:?}");
    assert_eq!(group.on_input(exited(102, FAILED)), []);
    assert!(group.may_signal(&Input::Recorded));
    let effects = group.on_input(Input::Recorded);
    assert_eq!((failed(&effects), exits(&effects)), (Some((1, Stamp(7))), vec![1, 2]));
    assert!(signals(&effects).contains(&(100, Signal::TERM)), "{effects:?}");
    assert_eq!(group.on_input(Input::Recorded), [], "it comes too late");
}

#[test]
fn the_records_are_requested_at_an_exception_that_reports_a_lost_peer() {
    let mut group = recording();
    let effects = group.on_input(lost_peer(1));
    assert!(effects.contains(&Effect::TakeRecords), "{effects:?}");
    assert_eq!(group.on_input(exited(101, FAILED)), [], "the records are not written yet");
    assert_eq!(failed(&group.on_input(Input::Recorded)), Some((1, Stamp(7))));

    let mut group = recording();
    let _ = group.on_input(lost_peer(1));
    assert_eq!(group.on_input(Input::Recorded), []);
    assert_eq!(failed(&group.on_input(exited(101, FAILED))), Some((1, Stamp(7))), "nothing to wait for");
}

#[test]
fn all_other_failures_stop_the_siblings_at_once() {
    for exit in [FAILED, KILLED, WorkerExit::Signaled { signal: 11 }] {
        assert!(failed(&recording().on_input(exited(101, exit))).is_some(), "{exit:?}");
    }
    assert!(failed(&recording().on_input(failed_by_itself(1))).is_some());
    let mut group = recording();
    assert!(!group.on_input(raised(1)).contains(&Effect::TakeRecords));
    assert!(failed(&group.on_input(exited(101, FAILED))).is_some());
    // The workers of this group write no flight records.
    assert!(failed(&lingering().on_input(exited(101, ABORTED))).is_some());
    // No other worker is running.
    let mut group = recording();
    let _ = all_exit(&mut group, &[100, 102, 103], DONE);
    assert!(failed(&group.on_input(exited(101, ABORTED))).is_some());
}

#[test]
fn a_stop_or_an_exception_of_another_worker_does_not_wait_for_the_records() {
    for input in [Input::Stop(TERM_30), failed_by_itself(3), Input::Fenced, Input::Suspend] {
        let mut group = recording();
        let _ = group.on_input(exited(101, ABORTED));
        assert!(group.may_signal(&input));
        let effects = group.on_input(input.clone());
        assert_eq!(failed(&effects), Some((1, Stamp(7))), "{input:?}: the abort came first");
        assert!(!group.is_holding() && !group.is_running());
    }
}

#[test]
fn the_others_do_not_hang_while_their_records_are_written() {
    let mut group = recording();
    let _ = group.on_input(exited(101, ABORTED));
    let _ = group.on_input(snapshot(60, [Some(0); 4]));
    assert_eq!(group.on_input(Input::Expired(Deadline::Hang)), []);
}
