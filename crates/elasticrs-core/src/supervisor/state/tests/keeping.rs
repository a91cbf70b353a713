//! Tests that workers which keep their states copy them before they are stopped.

use super::exits::{failed_by_itself, raised};
use super::*;

/// Returns the input for a worker that can copy its state in `pace` seconds. If `pace` is `None`, the worker can no longer
/// copy its state.
pub(super) fn keeper(local_rank: u32, pace: Option<u64>) -> Input {
    Input::Keeper { local_rank, pace: pace.map(Duration::from_secs) }
}

fn copied(local_rank: u32) -> Input {
    Input::Copied { local_rank }
}

/// Returns a group whose workers 0, 1 and 2 keep their states.
fn keeping() -> Group {
    let mut group = lingering();
    for local_rank in 0..3 {
        assert_eq!(group.on_input(keeper(local_rank, Some(0))), []);
    }
    group
}

fn ordered(effects: &[Effect]) -> Vec<u32> {
    let orders = effects.iter().filter_map(|effect| match effect {
        Effect::OrderCopies(ranks) => Some(ranks.clone()),
        _ => None,
    });
    orders.flatten().collect()
}

fn report(effects: &[Effect]) -> Option<(Vec<u32>, Vec<u32>)> {
    effects.iter().find_map(|effect| match effect {
        Effect::ReportCopies { asked, answered } => Some((asked.clone(), answered.clone())),
        _ => None,
    })
}

fn limit(effects: &[Effect]) -> Option<Duration> {
    effects.iter().find_map(|effect| match effect {
        Effect::Arm(Deadline::Copies, limit) => Some(*limit),
        _ => None,
    })
}

#[test]
fn siblings_are_stopped_when_all_have_copied_their_states() {
    let mut group = keeping();
    let effects = group.on_input(exited(101, KILLED));
    assert_eq!(ordered(&effects), [0, 2]);
    // Worker 3 keeps no state, and worker 1 may have left processes.
    assert_eq!(signals(&effects), [(103, Signal::TERM), (101, Signal::TERM)]);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::ReportFailure { siblings: 3, .. })));
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Hasten(Deadline::Kill, _))), "KEEP-4: {effects:?}");
    assert_eq!(group.on_input(copied(2)), []);
    assert_eq!(group.on_input(copied(2)), [], "a second answer of the same worker");
    assert!(group.may_signal(&copied(0)));
    let effects = group.on_input(copied(0));
    assert_eq!(signals(&effects), [(100, Signal::TERM), (102, Signal::TERM)]);
    assert!(effects.contains(&Effect::Hasten(Deadline::Kill, TERM_30.grace)), "KEEP-4");
    assert!(effects.contains(&Effect::Disarm(Deadline::Copies)));
    assert_eq!(report(&effects), Some((vec![0, 2], vec![2, 0])));
    assert_eq!(group.on_input(copied(0)), [], "KEEP-1");
}

#[test]
fn the_wait_ends_with_its_limit_or_with_the_last_worker_that_could_answer() {
    let mut group = keeping();
    let _ = group.on_input(exited(101, KILLED));
    let effects = group.on_input(Input::Expired(Deadline::Copies));
    assert_eq!(signals(&effects), [(100, Signal::TERM), (102, Signal::TERM)]);
    assert_eq!(report(&effects), Some((vec![0, 2], vec![])));

    let mut group = keeping();
    let _ = group.on_input(exited(101, KILLED));
    let _ = group.on_input(copied(0));
    let effects = group.on_input(exited(102, FAILED));
    let is_own_exit = |effect: &Effect| matches!(effect, Effect::Report(Event::WorkerExited { sent: None, .. }));
    assert!(effects.iter().any(is_own_exit), "worker 2 has got no signal yet: {effects:?}");
    assert_eq!(report(&effects), Some((vec![0, 2], vec![0])));
    assert_eq!(signals(&effects), [(100, Signal::TERM), (102, Signal::TERM)], "102: the rest of its group");
}

#[test]
fn the_limit_depends_on_the_slowest_copy_and_is_never_longer_than_the_users() {
    for (pace, expected) in [(0, 500), (1, 3000), (60, 10_000)] {
        let mut group = keeping();
        let _ = group.on_input(keeper(2, Some(pace)));
        assert_eq!(limit(&group.on_input(exited(101, KILLED))), Some(Duration::from_millis(expected)), "{pace}");
    }
}

#[test]
fn a_worker_that_hangs_or_whose_timer_expires_copies_its_state_before_it_is_killed() {
    let mut group = keeping();
    let effects = after_evidence(&mut group, expired(1, 101, Some(Signal::KILL)));
    assert_eq!((ordered(&effects), signals(&effects)), (vec![0, 1, 2], vec![(103, Signal::TERM)]));
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::SignalProcess { .. })));
    let effects = group.on_input(Input::Expired(Deadline::Copies));
    assert!(effects.contains(&Effect::SignalProcess { pid: 101, signal: Signal::KILL }), "{effects:?}");
}

#[test]
fn the_worker_whose_exception_stops_the_group_gets_no_order() {
    let mut group = keeping();
    let effects = group.on_input(failed_by_itself(1));
    assert_eq!((ordered(&effects), signals(&effects)), (vec![0, 2], vec![(103, Signal::TERM)]));
    // The exception of a worker that has lost its peer stops nothing by itself.
    assert_eq!(ordered(&keeping().on_input(raised(1))), Vec::<u32>::new());
}

#[test]
fn a_stop_waits_for_the_copies_unless_it_is_sigkill() {
    let mut group = keeping();
    let effects = group.on_input(Input::Stop(TERM_30));
    assert_eq!((ordered(&effects), signals(&effects)), (vec![0, 1, 2], vec![(103, Signal::TERM)]));
    let effects = group.on_input(Input::Stop(KILL));
    let killed: Vec<_> = signals(&effects).into_iter().filter(|(_, signal)| *signal == Signal::KILL).collect();
    assert_eq!(killed, PIDS.map(|pid| (pid, Signal::KILL)), "KEEP-2");
    for at_once in [Input::Stop(KILL), Input::Fenced, Input::NurseryLost(NurseryExit { exit: FAILED, hung: false })] {
        let effects = keeping().on_input(at_once.clone());
        assert_eq!(ordered(&effects), Vec::<u32>::new(), "KEEP-2: {at_once:?}");
        assert_eq!(signals(&effects), PIDS.map(|pid| (pid, Signal::KILL)));
    }
}

#[test]
fn only_workers_that_can_answer_get_an_order() {
    let mut group = keeping();
    let _ = group.on_input(keeper(0, None));
    let _ = group.on_input(Input::Paused { pid: 102, signal: 19 });
    let effects = group.on_input(Input::Stop(TERM_30));
    assert_eq!(ordered(&effects), [1], "0 no longer keeps its state, KEEP-3: a signal has stopped 2");
    let mut off = Group::new(&PIDS, GroupPolicy { on_failure: TERM_30, ..policy() });
    let _ = off.on_input(keeper(0, Some(0)));
    assert_eq!(ordered(&off.on_input(exited(101, KILLED))), Vec::<u32>::new(), "orders are switched off");
}

proptest! {
    /// Compares a group whose workers can copy their states with a group whose workers cannot. In the end, both groups
    /// have sent the same signals. No worker is signalled before it has copied its state.
    #[test]
    fn the_same_signals_are_sent_after_the_copies(
        stops in prop::collection::vec(prop::sample::select(vec![0, 1, 2]), 1..3),
        answers in Just([0_u32, 1, 2]).prop_shuffle(),
        comes_late in 0..4_usize,
    ) {
        let inputs: Vec<Input> = stops.iter().map(|kind| match kind {
            0 => exited(103, KILLED),
            1 => Input::Stop(TERM_30),
            _ => Input::Forward(Signal::new(10).expect("it exists"), vec![3]),
        }).collect();
        let run = |keeps: bool| {
            let mut group = if keeps { keeping() } else { lingering() };
            let mut sent: Vec<_> = inputs.iter().flat_map(|input| group.on_input(input.clone())).collect();
            let mut open: BTreeSet<i32> = if keeps { [100, 101, 102].into() } else { BTreeSet::new() };
            assert!(signals(&sent).iter().all(|(pid, _)| !open.contains(pid)), "{sent:?}");
            for rank in answers.iter().take(comes_late) {
                sent.extend(group.on_input(copied(*rank)));
                open.remove(&PIDS[*rank as usize]);
                assert!(open.is_empty() || signals(&sent).iter().all(|(pid, _)| *pid == 103), "{sent:?}");
            }
            sent.extend(group.on_input(Input::Expired(Deadline::Copies)));
            let mut found = signals(&sent);
            found.sort_unstable_by_key(|(pid, signal)| (*pid, signal.number()));
            (found, group.phase)
        };
        prop_assert_eq!(run(true), run(false));
    }
}
