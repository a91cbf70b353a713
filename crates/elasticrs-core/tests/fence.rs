//! Tests for the fence (the deadline at which the nursery kills all workers) while the supervisor's process runs.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use common::groups::{HANG, KILL, KILLED, close, event, group, hanging_worker, run, supervisor, telling_group};
use elasticrs_core::spec::Descendants;
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{Event, Outcome, StartFailure, Supervisor};
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::signal::Signal;
use elasticrs_sys::stage::Stage;
use elasticrs_testkit::nursery::{c_string, worker};
use elasticrs_testkit::{pidfd, wait_for_end};

/// Checks that the first event is that of the fence and that all workers were killed. Returns the outcome.
fn until_fenced_end(supervisor: &Supervisor) -> Outcome {
    assert!(matches!(event(supervisor), Event::Fenced), "told first");
    loop {
        match event(supervisor) {
            Event::WorkerExited { exit, sent, .. } => assert_eq!((exit, sent), (KILLED, Some(Signal::KILL))),
            Event::GroupEnded { outcome, .. } => return outcome,
            other => panic!("{other:?}"),
        }
    }
}

fn after(delay: Duration) -> u64 {
    boot_now() + u64::try_from(delay.as_nanos()).unwrap()
}

#[test]
fn the_fence_is_enforced_without_the_nursery_if_a_start_hangs() {
    let supervisor = supervisor();
    let dir = tempfile::tempdir().unwrap();
    let hangs = hanging_worker(dir.path());
    assert!(supervisor.fence().set(Some(after(Duration::from_millis(300)))));
    supervisor.start(group(vec![worker(&["sleep"]), hangs])).unwrap();
    assert_eq!(until_fenced_end(&supervisor), Outcome::Stopped);

    assert!(!supervisor.fence().set(None), "it says that the one before had passed");
    run(&supervisor, &[&["sleep"]]);
    close(supervisor);
}

#[test]
fn workers_are_killed_at_the_fence_deadline_and_start_after_a_new_one() {
    let supervisor = supervisor();
    let (_, mut lines) = run(&supervisor, &[&["ignore-term"], &["daemonise"], &["sleep"]]);
    assert!(supervisor.fence().set(Some(after(Duration::from_millis(50)))));
    assert_eq!(until_fenced_end(&supervisor), Outcome::Stopped);
    assert_eq!(lines.rest(), Vec::<String>::new(), "the daemon is gone as well");

    supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    let Event::StartFailed(failure) = event(&supervisor) else { panic!("behind the deadline nothing starts") };
    assert!(matches!(failure, StartFailure::Worker { local_rank: 0, stage: Stage::Fence, .. }), "{failure:?}");
    let expected = "could not start a worker for local rank 0: the lease of the connection to the store has expired";
    assert_eq!(failure.to_string(), expected);

    assert!(!supervisor.fence().set(Some(after(HANG))), "it says that the one before had passed");
    run(&supervisor, &[&["sleep"]]);
    assert!(supervisor.fence().set(None));
    supervisor.stop(KILL).unwrap();
    while !matches!(event(&supervisor), Event::GroupEnded { outcome: Outcome::Stopped, .. }) {}
    close(supervisor);
}

#[test]
fn a_fence_deadline_kills_no_worker_while_it_is_renewed() {
    const LEASE: Duration = Duration::from_millis(500);
    let supervisor = supervisor();
    run(&supervisor, &[&["sleep"], &["ignore-term"]]);
    let fence = supervisor.fence();
    assert!(fence.set(Some(after(LEASE))));
    let end = boot_now() + 3 * u64::try_from(LEASE.as_nanos()).unwrap();
    while boot_now() < end {
        let renewed = fence.set(Some(after(LEASE)));
        let next = supervisor.next(Some(Duration::from_millis(1))).unwrap();
        assert!(renewed && next == Next::TimedOut, "killed early: {next:?}");
    }
    let deadline = after(LEASE);
    fence.set(Some(deadline));
    assert_eq!(until_fenced_end(&supervisor), Outcome::Stopped);
    assert!(boot_now() >= deadline);
    close(supervisor);
}

#[test]
fn an_earlier_fence_deadline_takes_effect_immediately() {
    let supervisor = supervisor();
    run(&supervisor, &[&["sleep"]]);
    supervisor.fence().set(Some(after(Duration::from_secs(3600))));
    supervisor.fence().set(Some(after(Duration::ZERO)));
    assert_eq!(until_fenced_end(&supervisor), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_suspended_group_is_fenced_and_an_earlier_failure_stays_the_cause() {
    let supervisor = supervisor();
    run(&supervisor, &[&["sleep"], &["sleep"]]);
    supervisor.suspend().unwrap();
    supervisor.fence().set(Some(after(Duration::ZERO)));
    assert_eq!(until_fenced_end(&supervisor), Outcome::Stopped);

    supervisor.fence().set(None);
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["ignore-term"]]);
    elasticrs_sys::process::send_signal(pidfd(pids[0]).unwrap(), libc::SIGKILL).unwrap();
    while !matches!(event(&supervisor), Event::WorkerExited { local_rank: 0, sent: None, .. }) {}
    supervisor.fence().set(Some(after(Duration::ZERO)));
    assert_eq!(until_fenced_end(&supervisor), Outcome::Failed);
    close(supervisor);
}

#[test]
fn lingering_descendants_are_fenced_and_reported_once() {
    let supervisor = supervisor();
    let (mut spec, mut lines) = telling_group(&[&[]]);
    spec.processes[0].argv = ["sh", "-c", "sleep 1000 & echo READY"].map(c_string).into();
    spec.policy.on_success = Descendants::Linger(HANG);
    supervisor.start(spec).unwrap();
    lines.until_ready();
    while !matches!(event(&supervisor), Event::WorkerExited { .. }) {}
    supervisor.fence().set(Some(after(Duration::ZERO)));
    assert!(matches!(event(&supervisor), Event::Fenced));
    let Event::GroupEnded { outcome: Outcome::Stopped, swept, .. } = event(&supervisor) else { panic!("it ends") };
    assert_eq!(swept.ended.len(), 1, "{swept:?}");
    assert_eq!(lines.rest(), Vec::<String>::new());
    // Start another group. A reply to the sweep that arrived too late would make this start fail.
    supervisor.fence().set(None);
    run(&supervisor, &[&["sleep"]]);
    close(supervisor);
}

#[test]
fn a_nursery_that_replaces_a_lost_one_takes_over_connection_and_fence() {
    let supervisor = supervisor();
    let (connection, _peer) = UnixStream::pair().unwrap();
    let socket = fs::read_link(format!("/proc/self/fd/{}", connection.as_raw_fd())).unwrap();
    supervisor.guard_connection(connection.into()).unwrap();
    run(&supervisor, &[&["sleep"]]);
    let first = supervisor.nursery_pid().unwrap();
    assert!(open_in(first).contains(&socket));
    let lease = Duration::from_secs(2);
    supervisor.fence().set(Some(after(lease)));
    elasticrs_sys::process::send_signal(pidfd(first).unwrap(), libc::SIGKILL).unwrap();
    while !matches!(event(&supervisor), Event::GroupEnded { outcome: Outcome::Lost, .. }) {}

    run(&supervisor, &[&["sleep"]]);
    let second = supervisor.nursery_pid().unwrap();
    assert!(second != first && open_in(second).contains(&socket));
    assert_eq!(until_fenced_end(&supervisor), Outcome::Stopped, "at the deadline that was set before");
    supervisor.release_connection().unwrap();
    supervisor.drain(Duration::ZERO).unwrap();
    supervisor.fence().set(None);
    run(&supervisor, &[&["sleep"]]);
    assert!(!open_in(second).contains(&socket), "released before the worker was started");
    close(supervisor);
    wait_for_end(second);
}

#[test]
fn a_nursery_that_exits_before_its_agent_does_not_close_the_connection() {
    let supervisor = supervisor();
    let (connection, peer) = UnixStream::pair().unwrap();
    supervisor.guard_connection(connection.try_clone().unwrap().into()).unwrap();
    run(&supervisor, &[&["sleep"]]);
    close(supervisor);
    peer.set_nonblocking(true).unwrap();
    let error = (&peer).read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(connection);
    assert_eq!((&peer).read(&mut [0]).unwrap(), 0);
}

fn open_in(pid: i32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).collect()
}

#[test]
fn workers_do_not_inherit_the_guarded_connection_or_the_fence() {
    let supervisor = supervisor();
    let (connection, _peer) = UnixStream::pair().unwrap();
    supervisor.guard_connection(connection.try_clone().unwrap().into()).unwrap();
    supervisor.fence().set(Some(after(HANG)));
    let (_, lines) = run(&supervisor, &[&["fds"]]);
    let numbers: Vec<&str> = lines.said.iter().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(numbers, ["0", "1", "2"], "{:?}", lines.said);
    close(supervisor);
}
