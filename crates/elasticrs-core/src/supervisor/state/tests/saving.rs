//! Tests for processes that are still saving after a stop signal has killed their worker.

use super::*;

/// Stops the group, and makes the workers exit with `exits`. Returns the effects of the last exit.
fn stopped_with(group: &mut Group, exits: [WorkerExit; 4]) -> Vec<Effect> {
    let _ = group.on_input(Input::Stop(TERM_30));
    PIDS.into_iter().zip(exits).map(|(pid, exit)| group.on_input(exited(pid, exit))).last().unwrap_or_default()
}

fn spared(effects: &[Effect]) -> Vec<(Duration, Vec<i32>, i32)> {
    let found = effects.iter().filter_map(|effect| match effect {
        Effect::SweepOthers(limits, savers) => Some((limits.give_up, savers.workers.clone(), savers.signal)),
        _ => None,
    });
    found.collect()
}

#[test]
fn processes_of_a_worker_that_the_stop_signal_ended_keep_the_grace_period() {
    for mut group in [lingering(), saving()] {
        let effects = stopped_with(&mut group, [DONE, ENDED, FAILED, ENDED]);
        assert_eq!(spared(&effects), [(TERM_30.grace + GIVE_UP_AFTER, vec![101, 103], 15)]);
        assert!(!effects.contains(&Effect::Disarm(Deadline::Kill)), "the grace period goes on");
        let last = to_group(103, Signal::TERM);
        assert_eq!(
            effects.contains(&last),
            group.policy.stop_scope == StopScope::Worker,
            "all have got the signal once"
        );
        let effects = group.on_input(Input::Expired(Deadline::Kill));
        assert_eq!(effects[0], Effect::Sweep(AT_ONCE));
        assert_eq!(killed(&effects), [(vec![1, 3], KillReason::AfterSignal(Signal::TERM), 30)]);
        assert_eq!(end(&group.on_input(swept())).map(|end| end.outcome), Some(Outcome::Stopped));
    }
}

#[test]
fn no_process_is_spared_if_each_worker_has_decided_itself() {
    for exits in [[DONE; 4], [FAILED; 4], [KILLED; 4]] {
        let effects = stopped_with(&mut lingering(), exits);
        assert!(effects.contains(&Effect::Sweep(AT_ONCE)), "{effects:?}");
    }
    let mut group = lingering();
    let _ = group.on_input(exited(101, ENDED));
    let effects = all_exit(&mut group, &[100, 102, 103], DONE);
    assert!(effects.contains(&Effect::Sweep(AT_ONCE)), "nobody stopped it when it ended: {effects:?}");
}

#[test]
fn the_siblings_of_a_failed_worker_may_save_as_well() {
    let mut group = lingering();
    let _ = group.on_input(exited(101, FAILED));
    let effects = all_exit(&mut group, &[100, 102, 103], ENDED);
    assert_eq!(spared(&effects), [(TERM_30.grace + GIVE_UP_AFTER, vec![100, 102, 103], 15)]);
    assert_eq!(end(&group.on_input(swept())).map(|end| end.outcome), Some(Outcome::Failed));
}

#[test]
fn a_second_stop_the_fence_or_the_loss_of_the_nursery_end_the_saves() {
    let lost = Input::NurseryLost(NurseryExit { exit: KILLED, hung: false });
    let requested = vec![(vec![0, 1, 2, 3], KillReason::Request, 0)];
    for (input, named) in [(Input::Stop(KILL), requested), (Input::Fenced, vec![]), (lost, vec![])] {
        let mut group = lingering();
        let _ = stopped_with(&mut group, [ENDED; 4]);
        let soon = StopPolicy { grace: Duration::from_secs(3), ..TERM_30 };
        assert_eq!(group.on_input(Input::Stop(soon)), [Effect::Hasten(Deadline::Kill, soon.grace)]);
        let effects = group.on_input(input);
        assert_eq!(effects[..2], [Effect::Sweep(AT_ONCE), Effect::Disarm(Deadline::Kill)]);
        assert_eq!((killed(&effects), effects.len()), (named.clone(), 2 + named.len()));
        assert_eq!(group.on_input(Input::Expired(Deadline::Kill)), [], "they are killed already");
    }
}
