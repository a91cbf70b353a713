//! Tests for workers that are forked from their nursery.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::fs::read_to_string;
use std::time::{Duration, Instant};

use common::groups::{HANG, KILL, TERM, close, event, group, telling_group, warm, warm_image};
use common::image;
use elasticrs_core::supervisor::{Config, Event, NurseryExit, Outcome, StartFailure, Supervisor};
use elasticrs_nursery::spec::PassedFd;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::stage::Stage;
use elasticrs_testkit::nursery::{c_string, worker};
use elasticrs_testkit::{wait_for_end, wait_until};

fn supervisor(what: &str, limit: Duration) -> Supervisor {
    Supervisor::new(Config { nursery: vec![warm_image(what, limit), image()], owns_process: true }).unwrap()
}

fn started(supervisor: &Supervisor) -> Vec<i32> {
    let Event::GroupStarted { pids, .. } = event(supervisor) else { panic!("it starts") };
    pids
}

fn outcome(supervisor: &Supervisor) -> Outcome {
    loop {
        if let Event::GroupEnded { outcome, .. } = event(supervisor) {
            return outcome;
        }
    }
}

fn descriptors(pid: i32) -> Vec<i32> {
    let numbers = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut numbers: Vec<i32> = numbers.map(|e| e.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    numbers.sort_unstable();
    numbers
}

/// Returns the pid of the parent process.
fn parent(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn warm_workers_are_forks_of_the_nursery_without_its_descriptors() {
    let supervisor = supervisor("", HANG);
    let nursery = supervisor.nursery_pid().unwrap();
    let (mut spec, mut lines) = telling_group(&[&["sleep"], &["sleep"]]);
    spec = warm(spec);
    supervisor.start(spec).unwrap();
    let pids = started(&supervisor);
    lines.until_ready();
    lines.until_ready();
    for &pid in &pids {
        assert_eq!(parent(pid), nursery);
        assert_eq!(descriptors(pid), [0, 1, 2], "nothing of the nursery's is open in it");
    }
    supervisor.stop(TERM).unwrap();
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_passed_descriptor_may_have_a_number_that_the_nursery_uses() {
    let supervisor = supervisor("", HANG);
    let (mut spec, mut lines) = telling_group(&[&["sleep"]]);
    spec = warm(spec);
    spec.processes[0].pass_fds.extend((3..40).map(|target| PassedFd { source: 0, target }));
    supervisor.start(spec).unwrap();
    let pids = started(&supervisor);
    lines.until_ready();
    assert_eq!(descriptors(pids[0]), (0..40).collect::<Vec<_>>());
    supervisor.stop(TERM).unwrap();
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_start_that_hangs_is_reported_with_its_rank_and_stage() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("nobody reads it");
    nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for hangs in [0, 2] {
        let supervisor = supervisor("", HANG);
        let mut spec = warm(group(vec![worker(&["sleep"]), worker(&["sleep"]), worker(&["sleep"])]));
        spec.processes[hangs].stdio[1] = Some(c_string(log.clone()));
        spec.policy.start_deadline = Duration::from_secs(3);
        supervisor.start(spec).unwrap();
        let Event::StartFailed(failure) = event(&supervisor) else { panic!("it does not start") };
        let StartFailure::Hung { local_rank, stage, .. } = failure else { panic!("{failure:?}") };
        assert_eq!((local_rank as usize, stage), (hangs, Some(Stage::OpenLog)));
        close(supervisor);
    }
}

#[test]
fn a_fork_that_cannot_change_its_directory_is_a_failed_start() {
    let supervisor = supervisor("", HANG);
    let mut spec = warm(group(vec![worker(&["sleep"]), worker(&["sleep"])]));
    spec.processes[1].cwd = Some(c"/does/not/exist".into());
    supervisor.start(spec).unwrap();
    let Event::StartFailed(failure) = event(&supervisor) else { panic!("it does not start") };
    let StartFailure::Worker { local_rank, stage, errno, subject } = failure else { panic!("{failure:?}") };
    assert_eq!((local_rank, stage, errno), (1, Stage::ChangeDir, libc::ENOENT));
    assert_eq!(subject, "/does/not/exist");
    close(supervisor);
}

#[test]
fn a_fork_that_hangs_in_an_at_fork_handler_is_reported() {
    let supervisor = supervisor("hangs at forks", HANG);
    let mut spec = warm(group(vec![worker(&["sleep"]), worker(&["sleep"])]));
    spec.policy.start_deadline = Duration::from_secs(3);
    supervisor.start(spec).unwrap();
    let Event::StartFailed(failure) = event(&supervisor) else { panic!("it does not start") };
    let StartFailure::Hung { local_rank: 0, stage: Some(Stage::Forked), .. } = failure else { panic!("{failure:?}") };
    close(supervisor);
}

#[test]
fn a_fork_that_hangs_in_the_nursery_is_attributed_to_its_worker() {
    let supervisor = supervisor("hangs before the second fork", HANG);
    let mut spec = warm(group(vec![worker(&["sleep"]), worker(&["sleep"]), worker(&["sleep"])]));
    spec.policy.start_deadline = Duration::from_secs(3);
    supervisor.start(spec).unwrap();
    let Event::StartFailed(failure) = event(&supervisor) else { panic!("it does not start") };
    let StartFailure::Hung { local_rank: 1, stage: Some(Stage::Fork), .. } = failure else { panic!("{failure:?}") };
    close(supervisor);
}

#[test]
fn a_fork_that_exits_and_leaves_a_child_is_reported_as_a_failed_start() {
    let supervisor = supervisor("ends and leaves a process", HANG);
    supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
    let Event::StartFailed(failure) = event(&supervisor) else { panic!("it does not start") };
    assert!(matches!(failure, StartFailure::Worker { errno: libc::ECHILD, .. }), "{failure:?}");
    close(supervisor);
}

#[test]
fn a_fork_that_hangs_does_not_delay_closing_the_supervisor() {
    let supervisor = supervisor("hangs at forks", HANG);
    let mut spec = warm(group(vec![worker(&["sleep"])]));
    spec.policy.start_deadline = Duration::MAX;
    supervisor.start(spec).unwrap();
    let nursery = supervisor.nursery_pid().unwrap();
    wait_until("the fork", || !read_to_string(format!("/proc/{nursery}/task/{nursery}/children")).unwrap().is_empty());
    let begun = Instant::now();
    close(supervisor);
    assert!(begun.elapsed() < HANG);
}

#[test]
fn one_warm_nursery_starts_several_attempts_with_their_own_logs() {
    let folder = tempfile::tempdir().unwrap();
    let supervisor = supervisor("", HANG);
    for attempt in 0..3 {
        let log = folder.path().join(attempt.to_string());
        let mut spec = warm(group(vec![worker(&["exit", "0"])]));
        spec.processes[0].stdio[1] = Some(c_string(log.clone()));
        supervisor.start(spec).unwrap();
        started(&supervisor);
        assert_eq!(outcome(&supervisor), Outcome::Succeeded);
        assert!(log.exists());
    }
    close(supervisor);
}

#[test]
fn workers_start_cold_if_the_warm_nursery_dies_before_it_is_ready() {
    let supervisor = supervisor("dies", HANG);
    supervisor.start(warm(group(vec![worker(&["exit", "0"])]))).unwrap();
    let Event::Warmed { failure: Some(end), .. } = event(&supervisor) else { panic!("it dies") };
    assert_eq!(end, NurseryExit { exit: WorkerExit::Exited { code: 3 }, hung: false });
    started(&supervisor);
    assert_eq!(outcome(&supervisor), Outcome::Succeeded);
    close(supervisor);
}

#[test]
fn workers_start_cold_if_the_warm_nursery_hangs_before_it_is_ready() {
    let supervisor = supervisor("hangs", Duration::from_millis(50));
    supervisor.start(warm(group(vec![worker(&["exit", "0"])]))).unwrap();
    let Event::Warmed { failure: Some(end), .. } = event(&supervisor) else { panic!("it hangs") };
    assert!(end.hung);
    started(&supervisor);
    assert_eq!(outcome(&supervisor), Outcome::Succeeded);
    close(supervisor);
}

#[test]
fn workers_start_cold_if_the_warm_nursery_is_of_another_build() {
    let supervisor = supervisor("is of another build", HANG);
    for _ in 0..2 {
        supervisor.start(warm(group(vec![worker(&["exit", "0"])]))).unwrap();
        let first = event(&supervisor);
        if let Event::Warmed { failure, .. } = first {
            assert_eq!(failure.unwrap().exit, WorkerExit::Signaled { signal: libc::SIGKILL });
            started(&supervisor);
        } else {
            assert!(matches!(first, Event::GroupStarted { .. }), "the second one is cold from the start: {first:?}");
        }
        assert_eq!(outcome(&supervisor), Outcome::Succeeded);
    }
    close(supervisor);
}

#[test]
fn a_stop_does_not_wait_for_the_imports_of_the_nursery() {
    for policy in [TERM, KILL] {
        let supervisor = supervisor("hangs", HANG);
        supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
        supervisor.stop(policy).unwrap();
        assert_eq!(outcome(&supervisor), Outcome::Stopped);
        close(supervisor);
    }
}

#[test]
fn a_lost_warm_nursery_is_replaced_for_the_next_warm_group() {
    let supervisor = supervisor("", HANG);
    supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
    let pids = started(&supervisor);
    let nursery = elasticrs_testkit::pidfd(supervisor.nursery_pid().unwrap()).unwrap();
    elasticrs_sys::process::send_signal(nursery, libc::SIGKILL).unwrap();
    assert_eq!(outcome(&supervisor), Outcome::Lost);
    pids.into_iter().for_each(wait_for_end);
    supervisor.start(warm(group(vec![worker(&["exit", "0"])]))).unwrap();
    started(&supervisor);
    assert_eq!(outcome(&supervisor), Outcome::Succeeded);
    close(supervisor);
}

#[test]
fn a_warm_nursery_can_also_start_cold_workers() {
    let supervisor = supervisor("", HANG);
    supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    started(&supervisor);
    assert_eq!(outcome(&supervisor), Outcome::Succeeded);
    close(supervisor);
}
