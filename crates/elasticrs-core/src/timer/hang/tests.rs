use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn fixed(seconds: u64) -> Limits {
    Limits {
        step: StepLimit::Fixed(Duration::from_secs(seconds)),
        startup: None,
        exit: None,
        stop_delay: Duration::ZERO,
    }
}

fn beat(at: u64) -> RankState {
    RankState::Heartbeat(Beat { last: at * SECOND, ..Beat::default() })
}

fn section(at: u64, limit: Option<u64>) -> RankState {
    let section = Some(Section { name: "checkpoint".into(), limit: limit.map(|limit| limit * SECOND) });
    RankState::Heartbeat(Beat { last: at * SECOND, section, ..Beat::default() })
}

/// Checks for hangs (`look`) once per second from `from` to `to`, until a hang is found. Returns the second in which it
/// was found, and the ranks whose time limit had passed.
fn watch(watch: &mut Watch, from: u64, to: u64, seen: &[RankState], line: Option<u64>) -> Option<(u64, Vec<usize>)> {
    (from..=to).find_map(|now| match watch.look(now * SECOND, seen, line.map(|at| at * SECOND)) {
        Verdict::LookAgain(_) => None,
        Verdict::Hung(hung) => Some((now, hung.iter().filter(|late| late.is_due).map(|late| late.rank).collect())),
    })
}

#[test]
fn a_rank_is_watched_from_its_first_heartbeat() {
    let mut ranks = Watch::new(fixed(10), 2, 0);
    assert_eq!(watch(&mut ranks, 1, 100, &[RankState::NoHeartbeat, RankState::NoHeartbeat], None), None);
    assert_eq!(watch(&mut ranks, 101, 200, &[RankState::NoHeartbeat, beat(100)], None), Some((110, vec![1])));
}

#[test]
fn ranks_without_a_heartbeat_are_reported_once_after_the_step_limit() {
    // Checks invariant HANG-7.
    let told = |limits, seen: &[RankState], line: Option<u64>| {
        let mut ranks = Watch::new(limits, seen.len(), 0);
        let tell = |now: u64| Some((now, ranks.unwatched(now * SECOND, seen, line.map(|at| at * SECOND))?.0));
        (1..=30).filter_map(tell).collect::<Vec<_>>()
    };
    let nobody = [RankState::NoHeartbeat, RankState::NoHeartbeat];
    assert_eq!(told(fixed(10), &nobody, None), [(10, vec![0, 1])]);
    assert_eq!(told(fixed(10), &[RankState::NoHeartbeat, beat(1), RankState::Exited], None), [(10, vec![0])]);
    assert_eq!(told(fixed(10), &[beat(1), section(1, None)], None), [], "who has given one is watched by its limits");
    assert_eq!(told(fixed(10), &nobody, Some(3)), [], "their lines are watched");
    assert_eq!(told(Limits { startup: Some(Duration::from_secs(40)), ..fixed(10) }, &nobody, None), []);
}

#[test]
fn ranks_that_wait_for_a_rank_in_a_section_are_not_hung_until_it_ends() {
    // Checks invariant HANG-10.
    let excused = || std::collections::BTreeSet::from([1]);
    let mut ranks = Watch::new(fixed(10), 2, 0);
    let busy = [section(1, Some(60)), beat(1)];
    assert_eq!(watch(&mut ranks, 1, 11, &busy, None), Some((11, vec![1])));
    assert!(ranks.excuse(excused(), 0, &busy));
    assert_eq!(watch(&mut ranks, 12, 60, &busy, None), None);
    assert_eq!(watch(&mut ranks, 61, 61, &busy, None), Some((61, vec![0])), "the section has its own limit");
    let mut ranks = Watch::new(fixed(10), 2, 0);
    assert_eq!(watch(&mut ranks, 1, 11, &busy, None), Some((11, vec![1])));
    assert!(ranks.excuse(excused(), 0, &busy));
    assert_eq!(watch(&mut ranks, 12, 40, &busy, None), None);
    // The section has ended, so the time limit of the waiting rank restarts.
    let after = [beat(41), beat(1)];
    assert_eq!(watch(&mut ranks, 41, 100, &after, None), Some((51, vec![1, 0])));
    assert!(!ranks.excuse(excused(), 0, &after), "no rank is in a section");
}

#[test]
fn the_exit_limit_applies_to_a_rank_whose_program_has_returned() {
    // Checks invariant HANG-9.
    let exiting = |at| RankState::Heartbeat(Beat { last: at * SECOND, is_exiting: true, ..Beat::default() });
    let seen = [exiting(1), beat(1000)];
    assert_eq!(watch(&mut Watch::new(fixed(10), 2, 0), 1, 500, &seen, None), None);
    let limits = Limits { exit: Some(Duration::from_secs(300)), ..fixed(10) };
    let mut ranks = Watch::new(limits, 2, 0);
    assert_eq!(watch(&mut ranks, 1, 500, &seen, None), Some((301, vec![0])));
    let mut ranks = Watch::new(limits, 2, 0);
    let tell = |now: u64| Some((now, ranks.still_exiting(now * SECOND, &[exiting(1), exiting(4)])?));
    let limit = Duration::from_secs(10);
    assert_eq!((1..100).filter_map(tell).collect::<Vec<_>>(), [(11, (vec![0], limit)), (14, (vec![1], limit))]);
}

#[test]
fn a_rank_that_waits_for_a_replaced_rank_is_not_hung() {
    // Checks invariant HANG-8.
    let mut ranks = Watch::new(Limits { startup: Some(Duration::from_secs(40)), ..fixed(10) }, 2, 0);
    assert_eq!(watch(&mut ranks, 1, 100, &[beat(99), beat(99)], None), None);
    ranks.lose(1);
    assert_eq!(watch(&mut ranks, 101, 130, &[beat(100), RankState::Exited], None), None);
    ranks.restart(1, 130 * SECOND);
    assert_eq!(watch(&mut ranks, 131, 160, &[beat(100), RankState::NoHeartbeat], None), None);
    assert_eq!(watch(&mut ranks, 161, 200, &[beat(100), beat(161)], None), Some((171, vec![0, 1])));
}

#[test]
fn replacing_a_rank_restarts_the_limits_of_waiting_ranks() {
    // Checks invariant HANG-8.
    let mut ranks = Watch::new(fixed(10), 2, 0);
    assert_eq!(watch(&mut ranks, 1, 9, &[beat(0), beat(0)], None), None);
    ranks.lose(1);
    assert_eq!(watch(&mut ranks, 10, 10, &[beat(0), RankState::Exited], None), None);
    ranks.restart(1, 10 * SECOND);
    assert_eq!(watch(&mut ranks, 11, 40, &[beat(0), beat(10)], None), Some((20, vec![1])), "its own time counts");
    assert_eq!(watch(&mut ranks, 21, 40, &[beat(0), beat(20)], None), Some((21, vec![0])));
}

#[test]
fn the_startup_limit_applies_to_a_replaced_rank() {
    let limits = Limits { startup: Some(Duration::from_secs(40)), ..fixed(10) };
    let mut ranks = Watch::new(limits, 2, 0);
    assert_eq!(watch(&mut ranks, 1, 100, &[beat(99), beat(99)], None), None);
    ranks.lose(1);
    ranks.restart(1, 100 * SECOND);
    assert_eq!(watch(&mut ranks, 101, 200, &[beat(100), RankState::NoHeartbeat], None), Some((140, vec![1])));
}

#[test]
fn without_heartbeats_an_output_line_ends_the_wait_for_a_replacement() {
    let nobody = [RankState::NoHeartbeat, RankState::NoHeartbeat];
    let mut ranks = Watch::new(fixed(10), 2, 0);
    ranks.lose(1);
    ranks.restart(1, 20 * SECOND);
    assert_eq!(watch(&mut ranks, 21, 60, &nobody, Some(19)), None);
    assert_eq!(watch(&mut ranks, 61, 100, &nobody, Some(61)), Some((71, vec![0, 1])));
}

#[test]
fn suspended_time_does_not_count_toward_the_report_of_unwatched_ranks() {
    let seen = [RankState::NoHeartbeat];
    let mut ranks = Watch::new(fixed(10), 1, 0);
    assert_eq!(watch(&mut ranks, 1, 3, &seen, None), None);
    ranks.freeze(3 * SECOND);
    assert_eq!(ranks.unwatched(50 * SECOND, &seen, None), None);
    ranks.thaw(90 * SECOND, &seen, None);
    assert_eq!(ranks.unwatched(96 * SECOND, &seen, None), None);
    assert_eq!(ranks.unwatched(97 * SECOND, &seen, None), Some((vec![0], Duration::from_secs(10))));
}

#[test]
fn the_startup_limit_applies_before_the_first_heartbeat() {
    let limits = Limits { startup: Some(Duration::from_secs(40)), ..fixed(10) };
    let mut ranks = Watch::new(limits, 2, 0);
    assert_eq!(watch(&mut ranks, 1, 60, &[RankState::NoHeartbeat, beat(39)], None), Some((40, vec![0])));
}

#[test]
fn a_section_has_its_own_limit_or_no_limit() {
    let mut ranks = Watch::new(fixed(10), 1, 0);
    assert_eq!(watch(&mut ranks, 1, 100, &[section(0, Some(50))], None), Some((50, vec![0])));
    assert_eq!(watch(&mut Watch::new(fixed(10), 1, 0), 1, 1000, &[section(0, None)], None), None);
    assert_eq!(watch(&mut Watch::new(fixed(10), 1, 0), 1, 9, &[section(0, Some(3))], None), Some((3, vec![0])));
}

#[test]
fn without_heartbeats_a_hang_is_detected_from_the_last_output_line() {
    let nobody = [RankState::NoHeartbeat, RankState::NoHeartbeat];
    assert_eq!(watch(&mut Watch::new(fixed(10), 2, 0), 1, 60, &nobody, Some(5)), Some((15, vec![0, 1])));
    // Checks invariant HANG-4.
    let one = [RankState::NoHeartbeat, beat(58)];
    assert_eq!(watch(&mut Watch::new(fixed(10), 2, 0), 1, 60, &one, Some(5)), None);
}

#[test]
fn an_exited_rank_is_not_hung() {
    assert_eq!(
        watch(&mut Watch::new(fixed(10), 2, 0), 1, 60, &[RankState::Exited, RankState::NoHeartbeat], None),
        None
    );
}

#[test]
fn hung_ranks_are_ordered_by_the_age_of_their_last_heartbeat() {
    let mut ranks = Watch::new(fixed(10), 3, 0);
    assert_eq!(ranks.look(3 * SECOND, &[beat(2), beat(1), beat(0)], None), Verdict::LookAgain(10 * SECOND), "HANG-3");
    let mut ranks = Watch::new(fixed(2), 3, 0);
    let Verdict::Hung(hung) = ranks.look(4 * SECOND, &[beat(2), beat(1), beat(3)], None) else {
        panic!("two are hung")
    };
    assert_eq!(
        hung.iter().map(|late| (late.rank, late.is_due)).collect::<Vec<_>>(),
        [(1, true), (0, true), (2, false)]
    );
}

#[test]
fn a_tiny_limit_leaves_a_minimum_time_between_hang_checks() {
    for nanoseconds in [0, 1] {
        let limits = Limits { step: StepLimit::Fixed(Duration::from_nanos(nanoseconds)), ..fixed(0) };
        let mut ranks = Watch::new(limits, 1, 0);
        let next = SECOND + u64::try_from(LEAST_WAIT.as_nanos()).unwrap();
        assert_eq!(ranks.look(SECOND, &[RankState::NoHeartbeat], None), Verdict::LookAgain(next), "HANG-3");
    }
}

#[test]
fn a_pause_of_the_agent_or_machine_does_not_count_toward_hang_limits() {
    // No rank ran from second 3 to second 103, so this time must not be counted (HANG-2).
    let mut ranks = Watch::new(fixed(10), 1, 0);
    assert_eq!(watch(&mut ranks, 1, 3, &[beat(2)], None), None);
    assert_eq!(watch(&mut ranks, 103, 200, &[beat(2)], None), Some((112, vec![0])));
    // Now only the agent is paused. The rank continues to run, and sends its last heartbeat at second 50.
    let mut ranks = Watch::new(fixed(10), 1, 0);
    assert_eq!(watch(&mut ranks, 1, 3, &[beat(2)], None), None);
    assert_eq!(watch(&mut ranks, 53, 200, &[beat(50)], None), Some((63, vec![0])));
}

#[test]
fn hang_checks_from_before_or_during_a_suspension_are_invalid() {
    let mut watch = Watch::new(fixed(10), 1, 0);
    assert!(watch.holds(SECOND));
    watch.freeze(2 * SECOND);
    assert!(!watch.holds(SECOND), "HANG-5");
    watch.thaw(3 * SECOND, &[RankState::NoHeartbeat], None);
    assert!(!watch.holds(SECOND), "HANG-5");
    assert!(watch.holds(3 * SECOND));
}

#[test]
fn suspended_time_does_not_count_toward_hang_limits() {
    let mut ranks = Watch::new(fixed(10), 1, 0);
    let seen = [beat(2)];
    assert_eq!(watch(&mut ranks, 1, 3, &seen, None), None);
    ranks.freeze(3 * SECOND);
    assert_eq!(watch(&mut ranks, 4, 90, &seen, None), None);
    ranks.thaw(90 * SECOND, &seen, None);
    assert_eq!(watch(&mut ranks, 91, 200, &seen, None), Some((99, vec![0])));
}

#[test]
fn the_step_limit_is_learned_from_earlier_steps() {
    assert_eq!(learned(vec![SECOND; ENOUGH_STEPS - 1], LEAST_LEARNED), None);
    assert_eq!(learned(vec![SECOND; 100], LEAST_LEARNED), Some(LEAST_LEARNED));
    assert_eq!(learned(vec![20 * SECOND; 100], LEAST_LEARNED), Some(Duration::from_secs(200)));
    let mut steps = vec![SECOND; 99];
    steps.push(50 * SECOND);
    assert_eq!(learned(steps, LEAST_LEARNED), Some(Duration::from_secs(150)));
    let limits = Limits { step: StepLimit::Learned(LEAST_LEARNED), ..fixed(0) };
    let seen = |steps| RankState::Heartbeat(Beat { last: SECOND, steps, ..Beat::default() });
    let few = [seen(vec![SECOND; 3])];
    assert_eq!(watch(&mut Watch::new(limits, 1, 0), 1, 2000, &few, None), Some((1801, vec![0])));
    // One rank has too few steps to compute a time limit, so the steps of both ranks are used together.
    let many = [seen(vec![7 * SECOND; 8]), seen(vec![7 * SECOND; 8])];
    assert_eq!(watch(&mut Watch::new(limits, 2, 0), 1, 2000, &many, None), Some((71, vec![0, 1])));
}

fn suspect(step: u64, last: u64, frame: &str) -> Suspect {
    let frame = (!frame.is_empty()).then(|| frame.to_owned());
    Suspect { is_late: true, is_due: false, is_stopped: false, step: Some(step), last, frame }
}

#[test]
fn the_rank_that_blocks_the_other_ranks_is_blamed() {
    let waits = |last| suspect(7, last, "all_reduce");
    let behind = |last, frame| suspect(6, last, frame);
    let in_a_section = Suspect { is_due: true, ..waits(9) };
    let stopped = Suspect { is_stopped: true, ..suspect(9, 9, "") };
    let fine = Suspect { is_late: false, ..suspect(1, 1, "read") };
    let cases: [(&str, &[Suspect], _); 11] = [
        ("a step behind", &[waits(1), behind(3, "all_reduce"), waits(2)], Some((1, Ground::Behind))),
        ("elsewhere", &[waits(1), waits(3), suspect(7, 4, "read"), waits(2)], Some((2, Ground::Elsewhere))),
        ("its last sign is the oldest", &[waits(3), waits(1), suspect(7, 4, "")], Some((1, Ground::Oldest))),
        ("of two nobody is the odd one", &[waits(1), suspect(7, 4, "read")], Some((0, Ground::Apart))),
        (
            "two are behind, and one of them stands elsewhere",
            &[waits(1), behind(4, "read"), behind(3, "all_reduce"), waits(2)],
            Some((1, Ground::Elsewhere)),
        ),
        ("the older one of those behind", &[waits(1), behind(4, "read"), behind(3, "write")], Some((2, Ground::Apart))),
        (
            "nobody waits for one that is ahead",
            &[suspect(7, 1, "read"), behind(4, "all_reduce"), behind(3, "all_reduce")],
            Some((2, Ground::Oldest)),
        ),
        ("its limit is shorter, and has passed", &[waits(1), in_a_section, waits(2)], Some((1, Ground::Oldest))),
        ("a signal has stopped it", &[suspect(1, 1, "read"), stopped], Some((1, Ground::Stopped))),
        ("the other one is not late", &[fine.clone(), waits(5)], Some((1, Ground::Oldest))),
        ("nobody is late", &[fine], None),
    ];
    for (why, suspects, blamed) in cases {
        assert_eq!(blame(suspects), blamed, "{why}");
    }
}

#[test]
fn the_only_rank_that_does_not_wait_in_torch_is_blamed() {
    let in_all_reduce =
        |last| suspect(7, last, r#"File "/lib/torch/distributed/distributed_c10d.py", line 3 in all_reduce"#);
    let in_backward = |last| suspect(7, last, r#"File "/lib/torch/autograd/graph.py", line 4 in _engine_run_backward"#);
    let cases: [(&str, &[Suspect], _); 6] = [
        ("the other one waits", &[in_all_reduce(1), suspect(7, 4, "loop")], Some((1, Ground::Elsewhere))),
        ("all others wait", &[in_all_reduce(1), suspect(7, 4, "loop"), in_backward(2)], Some((1, Ground::Elsewhere))),
        ("two do not wait", &[in_all_reduce(1), suspect(7, 4, "a"), suspect(7, 3, "b")], Some((0, Ground::Apart))),
        ("both wait", &[in_all_reduce(3), in_backward(1)], Some((1, Ground::Apart))),
        ("nobody knows of the other", &[in_all_reduce(1), suspect(7, 4, "")], Some((0, Ground::Oldest))),
        ("it waits alone", &[in_all_reduce(1)], Some((0, Ground::Oldest))),
    ];
    for (why, suspects, blamed) in cases {
        assert_eq!(blame(suspects), blamed, "{why}");
    }
}

#[test]
fn a_rank_can_be_suspected_of_a_remote_hang_before_its_limit_passes() {
    let mut group = Watch::new(fixed(60), 3, 0);
    let seen = [beat(41), beat(52), section(0, None)];
    let suspects = |group: &mut Watch, silence: u64| -> Vec<usize> {
        let late = group.suspects(70 * SECOND, &seen, None, silence * SECOND);
        assert!(late.iter().all(|overdue| !overdue.is_due));
        late.iter().map(|overdue| overdue.rank).collect()
    };
    assert_eq!(watch(&mut group, 0, 69, &seen, None), None);
    assert!(suspects(&mut group, 1000).is_empty(), "neither half of that nor of its own limit has passed");
    assert_eq!(suspects(&mut group, 58), [0], "29 of 58 seconds");
    assert_eq!(suspects(&mut group, 36), [0, 1]);
    assert_eq!(suspects(&mut group, 0), [0, 1], "a section without a limit may take any time");
    group.freeze(70 * SECOND);
    assert!(suspects(&mut group, 0).is_empty(), "it is suspended");
}

#[test]
fn blaming_a_local_rank_considers_the_hung_rank_of_another_node() {
    let beside = |suspects: &[Suspect], step: Option<u64>, frame: &str| {
        let frame = (!frame.is_empty()).then(|| frame.to_owned());
        blame_beside(suspects, &RemoteHang { silence: Duration::ZERO, step, frame })
    };
    let waits = |last| suspect(7, last, "all_reduce");
    let hangs = suspect(7, 4, "read");
    assert_eq!(beside(&[waits(1), hangs.clone()], Some(7), "all_reduce"), Some((1, Ground::Elsewhere)));
    assert_eq!(beside(&[waits(1), waits(2)], Some(7), "read"), None, "that one stands elsewhere");
    assert_eq!(beside(&[waits(1), waits(2)], Some(7), "all_reduce"), None, "nothing speaks against these");
    assert_eq!(beside(&[hangs], Some(7), "all_reduce"), None, "of two nobody is the odd one");
    assert_eq!(beside(&[suspect(6, 3, "")], Some(7), ""), Some((0, Ground::Behind)));
    assert_eq!(beside(&[suspect(8, 3, "")], Some(7), ""), None, "that one is behind");
    assert_eq!(beside(&[suspect(6, 3, ""), suspect(6, 2, "")], Some(7), ""), Some((1, Ground::Oldest)));
    assert_eq!(beside(&[suspect(6, 3, "")], None, ""), None, "it may be in an earlier step");
    assert_eq!(beside(&[Suspect { is_stopped: true, ..suspect(8, 3, "") }], Some(7), ""), Some((0, Ground::Stopped)));
    assert_eq!(beside(&[Suspect { is_late: false, ..suspect(6, 3, "") }], Some(7), ""), None);
    assert_eq!(beside(&[], Some(7), ""), None);
}

#[test]
fn a_rank_without_a_step_number_can_be_blamed() {
    let begins_late = Suspect { step: None, is_due: true, last: 0, ..suspect(0, 0, "") };
    assert_eq!(blame(&[suspect(0, 5, ""), begins_late]), Some((1, Ground::Oldest)));
}

fn any_seen() -> impl Strategy<Value = RankState> {
    let at = 0_u64..200 * SECOND;
    prop_oneof![
        Just(RankState::Exited),
        Just(RankState::NoHeartbeat),
        (
            at,
            proptest::option::of(1_u64..9),
            proptest::option::of(proptest::option::of(SECOND..90 * SECOND)),
            any::<bool>()
        )
            .prop_map(|(last, step, limit, is_exiting)| {
                let section = limit.map(|limit| Section { name: String::new(), limit });
                RankState::Heartbeat(Beat { last, step, section, is_exiting, ..Beat::default() })
            }),
    ]
}

proptest! {
    /// Checks that hangs are reported after their limit (HANG-1) and promptly (HANG-3) if every check is on time.
    #[test]
    fn a_hang_is_reported_only_after_its_limit_and_without_delay(
        seen in proptest::collection::vec(any_seen(), 1..6),
        limit in 1_u64..30,
        startup in proptest::option::of(1_u64..60),
        exit in proptest::option::of(1_u64..90),
        line in proptest::option::of(0..200 * SECOND),
    ) {
        let [startup, exit] = [startup, exit].map(|limit| limit.map(Duration::from_secs));
        let limits = Limits { startup, exit, ..fixed(limit) };
        let mut watch = Watch::new(limits, seen.len(), 0);
        let mut now = SECOND;
        let mut planned = now;
        while now < 400 * SECOND {
            match watch.look(now, &seen, line) {
                Verdict::LookAgain(next) => {
                    prop_assert!(next > now, "it makes progress");
                    prop_assert!(next <= now + limit * SECOND);
                    planned = next;
                    now = next.min(now + nanoseconds(LOOK_EVERY));
                }
                Verdict::Hung(hung) => {
                    for overdue in hung.iter().filter(|late| late.is_due) {
                        prop_assert!(overdue.since + nanoseconds(overdue.limit) <= now);
                        prop_assert!(seen[overdue.rank] != RankState::Exited);
                    }
                    let first = hung.iter().filter(|late| late.is_due).map(|o| o.since + nanoseconds(o.limit)).min().unwrap_or(0);
                    // Accept any report time if the limit passed before the first check, because no check was in time.
                    prop_assert!(first <= SECOND || now <= first || now <= planned);
                    return Ok(());
                }
            }
        }
        for seen in &seen {
            let watched = match seen {
                RankState::Heartbeat(Beat { section: None, is_exiting: true, .. }) => exit.is_some(),
                RankState::Heartbeat(beat) => beat.section.as_ref().is_none_or(|section| section.limit.is_some()),
                _ => false,
            };
            prop_assert!(!watched, "a rank that has stopped is found");
        }
    }

    /// Checks HANG-2: the time between a late call to `look` and the previous call never counts toward a limit.
    #[test]
    fn time_before_a_late_hang_check_does_not_count_toward_the_limit(gaps in proptest::collection::vec(0_u64..100, 1..30), limit in 20_u64..100) {
        let mut watch = Watch::new(fixed(limit), 1, 0);
        let (mut now, mut ran) = (0, 0);
        let seen = [beat(0)];
        for gap in gaps {
            now += gap;
            ran += if gap > 6 { 0 } else { gap };
            let verdict = watch.look(now * SECOND, &seen, None);
            prop_assert_eq!(matches!(verdict, Verdict::Hung(_)), ran >= limit);
            if ran >= limit {
                break;
            }
        }
    }

    #[test]
    fn the_learned_limit_is_within_its_bounds(steps in proptest::collection::vec(0_u64..10_000 * SECOND, 0..300)) {
        let limit = learned(steps.clone(), LEAST_LEARNED);
        prop_assert_eq!(limit.is_some(), steps.len() >= ENOUGH_STEPS);
        if let Some(limit) = limit {
            let longest = steps.iter().copied().max().unwrap_or(0);
            prop_assert!(limit >= LEAST_LEARNED && nanoseconds(limit) >= longest * 3);
            prop_assert!(nanoseconds(limit) <= (longest * 10).max(nanoseconds(LEAST_LEARNED)));
        }
    }
}

#[test]
fn a_rank_that_shows_activity_after_the_check_is_not_hung() {
    let overdue = |rank, missed| Overdue { rank, missed, since: 10, limit: Duration::ZERO, is_due: true };
    let beat = |last| RankState::Heartbeat(Beat { last, ..Beat::default() });
    let late = vec![overdue(0, Missed::Step), overdue(1, Missed::Section), overdue(2, Missed::Startup)];
    let left =
        |seen: &[RankState]| still_late(late.clone(), seen, None).iter().map(|late| late.rank).collect::<Vec<_>>();
    assert_eq!(left(&[beat(10), beat(10), RankState::NoHeartbeat]), [0, 1, 2]);
    assert_eq!(left(&[beat(10), beat(11), beat(11)]), [0], "HANG-6");
    let exiting = RankState::Heartbeat(Beat { last: 11, is_exiting: true, ..Beat::default() });
    assert_eq!(left(&[exiting.clone(), beat(11), beat(11)]), [0], "leaving is no sign of activity");
    let RankState::Heartbeat(exiting) = exiting else { unreachable!() };
    let alive = RankState::Heartbeat(Beat { before_exit: Some(11), ..exiting });
    assert_eq!(left(&[alive, beat(11), beat(11)]), [0_usize; 0], "it gave a heartbeat before it left");
    assert_eq!(
        left(&[RankState::Exited, RankState::Exited, RankState::Exited]),
        [0, 1, 2],
        "who has ended was late before"
    );
    let silent = vec![overdue(0, Missed::Line), overdue(1, Missed::Line)];
    let nobody = [RankState::NoHeartbeat, RankState::NoHeartbeat];
    assert_eq!(still_late(silent.clone(), &nobody, Some(10)), silent);
    assert_eq!(still_late(silent.clone(), &nobody, Some(11)), []);
    assert_eq!(still_late(silent, &[RankState::NoHeartbeat, beat(5)], Some(10)), [], "HANG-4");
}

const CALL: &str = "File \"/lib/torch/distributed/distributed_c10d.py\", line 4181 in all_reduce";
const SAVE: &str = "File \"/lib/torch/distributed/checkpoint/filesystem.py\", line 7 in write";
const BACKWARD: &str = "File \"/lib/torch/autograd/graph.py\", line 865 in _engine_run_backward";
const ITEM: &str = "File \"/job/train.py\", line 9 in evaluate";

#[test]
fn a_rank_in_a_collective_waits_even_if_it_uses_the_cpu() {
    use Collectives::{Complete, Pending, Unknown, Unused};
    let done = |frame, collectives| activity(Some(frame), collectives, || true);
    for (frame, collectives, expected) in [
        (ITEM, Pending, Activity::Waits),
        (CALL, Pending, Activity::Waits),
        (CALL, Complete, Activity::Waits),
        (CALL, Unused, Activity::Waits),
        (BACKWARD, Pending, Activity::Waits),
        (BACKWARD, Complete, Activity::Works),
        (SAVE, Complete, Activity::Works),
        (ITEM, Complete, Activity::Works),
        (ITEM, Unused, Activity::Works),
        (ITEM, Unknown, Activity::Unknown),
    ] {
        assert_eq!(done(frame, collectives), expected, "{frame}, {collectives:?}");
    }
    assert_eq!(activity(None, Complete, || true), Activity::Unknown);
    assert_eq!(activity(Some(ITEM), Complete, || false), Activity::Blocked);
    assert_eq!(activity(Some(CALL), Complete, || panic!("the measurement takes time")), Activity::Waits);
}

fn overdue_step(rank: usize, since: u64, limit: u64) -> Overdue {
    let limit = Duration::from_secs(limit);
    Overdue { rank, missed: Missed::Step, since: since * SECOND, limit, is_due: true }
}

#[test]
fn slow_ranks_are_examined_again_until_the_generous_limit() {
    // Checks HANG-12 for two ranks that count as slow at every examination.
    for (limits, step, generous) in [
        (fixed(10), 10, 100),
        (fixed(300), 300, 1800),
        (fixed(3600), 3600, 3600),
        (Limits { step: StepLimit::Learned(LEAST_LEARNED), ..fixed(1) }, 60, 1800),
    ] {
        let mut ranks = Watch::new(limits, 2, 0);
        let steps = if step == 60 { vec![SECOND; ENOUGH_STEPS] } else { Vec::new() };
        let seen = [0, 1].map(|last| RankState::Heartbeat(Beat { last, steps: steps.clone(), ..Beat::default() }));
        let (mut now, mut told) = (0, Vec::new());
        loop {
            now += 1;
            let Verdict::Hung(late) = ranks.look(now * SECOND, &seen, None) else { continue };
            let Some((limit, is_new)) = ranks.slow(&late, &seen) else { break };
            assert_eq!(limit, Duration::from_secs(generous));
            told.push((now, is_new));
        }
        assert!((generous..=generous + 1).contains(&now), "{now} of {generous}");
        let examined = usize::try_from(generous / step - 1).unwrap();
        assert_eq!(told.len(), examined, "{told:?}");
        assert_eq!(told.iter().filter(|(_, is_new)| *is_new).count(), examined.min(1), "a line is printed once");
        let again = [(now + 1) * SECOND; 2]
            .map(|last| RankState::Heartbeat(Beat { last, steps: steps.clone(), ..Beat::default() }));
        let next = watch(&mut ranks, now + 1, now + 2 + step, &again, None);
        assert_eq!(next.map(|(at, _)| at), Some(now + 1 + step), "the usual limit applies again");
    }
}

fn any_activity() -> impl Strategy<Value = Activity> {
    prop::sample::select(vec![Activity::Unknown, Activity::Waits, Activity::Works, Activity::Blocked])
}

proptest! {
    /// Checks HANG-12: late ranks are slow, and not hung, only if one of them works and each other rank works or waits
    /// in a collective. All of them must be late for a step, and not, for example, for their first heartbeat.
    #[test]
    fn ranks_are_slow_only_if_one_works_and_no_other_may_hang(
        late in prop::collection::vec((any_activity(), prop::sample::select(vec![
            Missed::Step, Missed::Line, Missed::Section, Missed::Exit, Missed::Startup,
        ])), 0..6),
    ) {
        let overdue: Vec<Overdue> =
            late.iter().enumerate().map(|(rank, (_, missed))| Overdue { missed: *missed, ..overdue_step(rank, 0, 1) }).collect();
        let working = slow(&overdue, |rank| late[rank].0);
        prop_assert!(working.iter().all(|rank| late[*rank].0 == Activity::Works));
        let has_own_limit = late.iter().any(|(_, missed)| !matches!(missed, Missed::Step | Missed::Line));
        let may_hang = late.iter().any(|(activity, _)| matches!(activity, Activity::Unknown | Activity::Blocked));
        let works = late.iter().any(|(activity, _)| *activity == Activity::Works);
        prop_assert_eq!(!working.is_empty(), works && !may_hang && !has_own_limit);
    }

    /// Checks HANG-12: a rank that has sent no heartbeat for ten times its time limit counts as hung, even if it is busy.
    /// Before one rank has exceeded its time limit, no rank counts as late.
    #[test]
    fn every_silent_rank_is_hung_after_the_generous_limit(
        limit in 1_u64..40,
        measured in prop::collection::vec(prop::array::uniform3(any_activity()), 1..40),
        since in prop::array::uniform3(0_u64..20),
    ) {
        let mut ranks = Watch::new(fixed(limit), 3, 0);
        let (seen, last) = (since.map(beat), since.into_iter().min().unwrap_or(0));
        let mut measured = measured.iter().cycle();
        for now in 20..20 + 12 * limit {
            let Verdict::Hung(late) = ranks.look(now * SECOND, &seen, None) else { continue };
            prop_assert!(now >= last + limit);
            let at = measured.next().expect("it repeats");
            let working = slow(&late, |rank| at[rank]);
            if working.is_empty() || ranks.slow(&late, &seen).is_none() {
                return Ok(());
            }
        }
        prop_assert!(false, "a rank that is silent for 10 limits is hung");
    }
}
