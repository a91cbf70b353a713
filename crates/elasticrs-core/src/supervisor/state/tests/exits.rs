//! Workers that have raised.

use super::*;

pub(super) fn raised(local_rank: u32) -> Input {
    let (pid, limit) = (PIDS[local_rank as usize], Some(Duration::from_secs(10)));
    Input::Raised(WorkerRaised { local_rank, pid, text: String::new(), seen: Stamp(5), limit, is_overdue: false })
}

#[test]
fn a_worker_that_raised_and_does_not_end_has_failed() {
    let mut group = lingering();
    let effects = group.on_input(raised(2));
    let [Effect::Tell(Event::WorkerRaised(told)), Effect::Arm(Timer::Exit(2), limit)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert_eq!((told.is_overdue, *limit), (false, Duration::from_secs(10)));
    let effects = after_evidence(&mut group, Input::Expired(Timer::Exit(2)));
    assert_eq!(
        signals(&effects),
        [(102, Signal::KILL), (100, Signal::TERM), (101, Signal::TERM), (103, Signal::TERM)],
        "it has had its time; the others get theirs"
    );
    let told: Vec<_> = effects.iter().skip_while(|e| !matches!(e, Effect::Tell(_))).collect();
    let [
        Effect::Tell(Event::WorkerRaised(WorkerRaised { is_overdue: true, .. })),
        Effect::TellFailure { local_rank: 2, seen: Stamp(5), siblings: 3 },
    ] = told[..]
    else {
        panic!("SUP-3: {effects:?}");
    };
}

#[test]
fn a_worker_that_ends_in_time_or_may_take_any_time_is_not_ended() {
    let mut group = lingering();
    let _ = group.on_input(raised(2));
    let effects = group.on_input(exited(102, FAILED));
    assert!(effects.contains(&Effect::Disarm(Timer::Exit(2))));
    assert_eq!(group.on_input(Input::Expired(Timer::Exit(2))), []);
    assert_eq!(group.on_input(raised(1)), [], "the stop has its own deadline");
    let mut group = lingering();
    let Input::Raised(raised) = raised(2) else { unreachable!() };
    let effects = group.on_input(Input::Raised(WorkerRaised { limit: None, ..raised }));
    assert!(matches!(effects[..], [Effect::Tell(Event::WorkerRaised(_))]));
    assert_eq!(after_evidence(&mut group, Input::Expired(Timer::Exit(0))), [], "it has not raised");
}
