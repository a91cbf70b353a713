//! Tests for nurseries whose program blocks when it is executed, because its file system does not respond.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use common::groups::{HANG, TERM, close, event, group, kill, run, warm, warm_image};
use common::nursery_program;
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{Config, Event, Outcome, StartFailure, Supervisor};
use elasticrs_nursery::launch::NurseryImage;
use elasticrs_nursery::tree::children_of_self;
use elasticrs_sys::clock::boot_now;
use elasticrs_testkit::hung_file::SlowFile;
use elasticrs_testkit::nursery::worker;
use elasticrs_testkit::{is_running, wait_for_end};
use tempfile::TempDir;

/// A supervisor, and a nursery program that the test can make slow to execute.
struct Job {
    supervisor: Supervisor,
    program: PathBuf,
    _folder: TempDir,
}

impl Job {
    fn new(images: impl FnOnce(&Path) -> Vec<NurseryImage>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", nursery_program().display())).unwrap();
        set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let config = Config { nursery: images(&program), owns_process: true };
        Self { supervisor: Supervisor::new(config).unwrap(), program, _folder: folder }
    }

    /// Creates a job in which only sentinels execute `program`.
    fn warm() -> Self {
        Self::new(|program| vec![warm_image("", HANG), elasticrs_testkit::nursery::image(program.to_owned())])
    }

    /// Creates a job in which all nurseries execute `program`.
    fn cold() -> Self {
        Self::new(|program| vec![elasticrs_testkit::nursery::image(program.to_owned())])
    }

    /// Kills the nursery, and then makes `program` slow to execute for the next nursery.
    fn without_nursery(&self) -> SlowFile {
        run(&self.supervisor, &[&["sleep"]]);
        kill(self.supervisor.nursery_pid().unwrap());
        assert_eq!(self.outcome(), Outcome::Lost);
        SlowFile::new(&self.program)
    }

    /// Kills the sentinel. The supervisor replaces it at the next check of the workers, or at the next start.
    fn without_sentinel(&self) -> SlowFile {
        let nursery = self.supervisor.nursery_pid().unwrap();
        let others = children_of_self().into_iter().filter(|&pid| pid != nursery);
        let [sentinel] = others.collect::<Vec<_>>()[..] else { panic!("there is one") };
        kill(sentinel);
        wait_for_end(sentinel);
        SlowFile::new(&self.program)
    }

    fn run_warm(&self) -> Vec<i32> {
        self.supervisor.start(warm(group(vec![worker(&["sleep"]), worker(&["sleep"])]))).unwrap();
        let Event::GroupStarted { pids, .. } = event(&self.supervisor) else { panic!("it starts") };
        pids
    }

    fn outcome(&self) -> Outcome {
        loop {
            if let Event::GroupEnded { outcome, .. } = event(&self.supervisor) {
                return outcome;
            }
        }
    }
}

#[test]
fn siblings_are_signalled_while_a_new_sentinel_is_slow_to_execute() {
    let job = Job::warm();
    let workers = job.run_warm();
    let slow = job.without_sentinel();
    slow.wait_until_opened();
    kill(workers[0]);
    assert!(matches!(event(&job.supervisor), Event::FailureSeen { local_rank: 0, siblings: 1, .. }));
    assert_eq!(job.outcome(), Outcome::Failed);
    drop(slow);
    close(job.supervisor);
}

#[test]
fn the_fence_is_renewed_while_a_new_sentinel_is_slow_to_execute() {
    let job = Job::warm();
    let workers = job.run_warm();
    let (renewed, renewals) = channel();
    let fence = job.supervisor.fence();
    let keep = async move {
        let mut ticks = tokio::time::interval(Duration::from_millis(100));
        while renewed.send(fence.set(Some(boot_now() + 1_000_000_000))).is_ok() {
            ticks.tick().await;
        }
    };
    job.supervisor.spawn(Box::new(|| Box::pin(keep))).unwrap();
    let slow = job.without_sentinel();
    slow.wait_until_opened();
    // Renew the deadline for three seconds, because a missed renewal would fence the workers after one second.
    for _ in 0..30 {
        assert!(renewals.recv_timeout(HANG).unwrap(), "the deadline has passed");
    }
    assert!(workers.iter().all(|&pid| is_running(pid)));
    assert_eq!(job.supervisor.next(Some(Duration::ZERO)).unwrap(), Next::TimedOut);
    drop(slow);
    close(job.supervisor);
}

#[test]
fn a_start_that_waits_for_a_slow_nursery_can_be_stopped() {
    let job = Job::cold();
    let slow = job.without_nursery();
    for _ in 0..2 {
        job.supervisor.start(group(vec![worker(&["sleep"])])).unwrap();
        slow.wait_until_opened();
        job.supervisor.stop(TERM).unwrap();
        assert_eq!(job.outcome(), Outcome::Stopped);
    }
    drop(slow);
    run(&job.supervisor, &[&["sleep"]]);
    close(job.supervisor);
}

#[test]
fn closing_does_not_wait_for_the_nursery_of_a_start() {
    let job = Job::cold();
    let slow = job.without_nursery();
    job.supervisor.start(group(vec![worker(&["sleep"])])).unwrap();
    slow.wait_until_opened();
    close(job.supervisor);
    drop(slow);
}

#[test]
fn a_start_fails_if_its_nursery_is_not_executed_in_time() {
    let job = Job::cold();
    let slow = job.without_nursery();
    let mut spec = group(vec![worker(&["exit", "0"])]);
    spec.policy.start_deadline = Duration::from_millis(300);
    job.supervisor.start(spec).unwrap();
    let Event::StartFailed(failure) = event(&job.supervisor) else { panic!("it does not start") };
    let StartFailure::Nursery { message, errno: None } = failure else { panic!("{failure:?}") };
    assert!(message.contains(job.program.to_str().unwrap()) && message.contains("300ms"), "{message}");
    drop(slow);
    job.supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    assert!(matches!(event(&job.supervisor), Event::GroupStarted { .. }));
    assert_eq!(job.outcome(), Outcome::Succeeded);
    close(job.supervisor);
}

#[test]
fn a_start_fails_if_no_nursery_can_be_executed() {
    let job = Job::cold();
    drop(job.without_nursery());
    std::fs::remove_file(&job.program).unwrap();
    job.supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    let Event::StartFailed(failure) = event(&job.supervisor) else { panic!("it does not start") };
    let expected = "could not start the nursery: could not execute: No such file or directory".to_owned();
    assert_eq!(failure, StartFailure::Nursery { message: expected, errno: Some(libc::ENOENT) });
    close(job.supervisor);
}

#[test]
fn a_start_that_waits_for_a_slow_nursery_ends_at_the_fence() {
    let job = Job::cold();
    let slow = job.without_nursery();
    // Set the deadline before the start, as agents do, because a start checks for a deadline only once.
    job.supervisor.fence().set(Some(boot_now() + 1_000_000_000));
    job.supervisor.start(group(vec![worker(&["sleep"])])).unwrap();
    slow.wait_until_opened();
    assert!(matches!(event(&job.supervisor), Event::Fenced));
    assert_eq!(job.outcome(), Outcome::Stopped);
    close(job.supervisor);
    drop(slow);
}

#[test]
fn a_start_waits_for_a_new_sentinel_and_can_be_stopped() {
    let job = Job::warm();
    let slow = job.without_sentinel();
    job.supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
    slow.wait_until_opened();
    job.supervisor.stop(TERM).unwrap();
    assert_eq!(job.outcome(), Outcome::Stopped);
    drop(slow);
    job.run_warm();
    close(job.supervisor);
}

#[test]
fn a_start_that_goes_on_cold_with_a_slow_nursery_can_be_stopped() {
    // Only nurseries that import no modules execute the slow program.
    let job =
        Job::new(|program| vec![warm_image("hangs", HANG), elasticrs_testkit::nursery::image(program.to_owned())]);
    job.supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
    let slow = SlowFile::new(&job.program);
    kill(job.supervisor.nursery_pid().unwrap());
    assert!(matches!(event(&job.supervisor), Event::Warmed { failure: Some(_) }));
    slow.wait_until_opened();
    job.supervisor.stop(TERM).unwrap();
    assert_eq!(job.outcome(), Outcome::Stopped);
    drop(slow);
    run(&job.supervisor, &[&["sleep"]]);
    close(job.supervisor);
}
