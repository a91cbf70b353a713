//! Tests for stopping the nursery between two groups, so that a new nursery imports the changed modules.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::fs::{read_dir, read_link, write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::groups::{HANG, TERM, close, event, group, kill, run, warm, warm_image};
use common::image;
use elasticrs_core::supervisor::{Config, Event, NurseryExit, Outcome, Supervisor};
use elasticrs_nursery::tree::Status;
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::process::WorkerExit;
use elasticrs_testkit::nursery::{hold, worker};
use elasticrs_testkit::wait_for_end;
use nix::sys::ptrace;
use tempfile::TempDir;

/// A supervisor and a file. When a nursery starts, it behaves as the text in the file says.
struct Job {
    supervisor: Supervisor,
    folder: TempDir,
}

impl Job {
    fn new(limit: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("what");
        write(&path, "").unwrap();
        let nursery = vec![warm_image(&format!("reads {}", path.display()), limit), image()];
        Self { supervisor: Supervisor::new(Config { nursery, owns_process: true }).unwrap(), folder }
    }

    /// Stops the nursery. `what` tells the next nursery how to behave instead of importing modules.
    fn renew(&self, what: &str) {
        write(self.folder.path().join("what"), what).unwrap();
        assert!(self.supervisor.renew_nursery().unwrap());
    }

    fn start_warm(&self) {
        self.supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
    }

    fn run_warm(&self) -> i32 {
        self.start_warm();
        let Event::GroupStarted { pids, .. } = event(&self.supervisor) else { panic!("it starts") };
        assert_eq!(Status::of(pids[0]).unwrap().parent, self.nursery());
        pids[0]
    }

    fn outcome(&self) -> Outcome {
        loop {
            if let Event::GroupEnded { outcome, .. } = event(&self.supervisor) {
                return outcome;
            }
        }
    }

    fn stop(&self) {
        self.supervisor.stop(TERM).unwrap();
        assert_eq!(self.outcome(), Outcome::Stopped);
    }

    fn nursery(&self) -> i32 {
        self.supervisor.nursery_pid().unwrap()
    }
}

#[test]
fn the_nursery_is_renewed_only_between_groups() {
    let job = Job::new(HANG);
    let worker = job.run_warm();
    let first = job.nursery();
    assert!(!job.supervisor.renew_nursery().unwrap(), "a group runs");
    job.stop();
    wait_for_end(worker);
    job.renew("");
    job.renew("");
    wait_for_end(first);
    job.run_warm();
    assert_ne!(job.nursery(), first);
    job.stop();
    close(job.supervisor);
}

#[test]
fn a_nursery_that_still_imports_is_renewed() {
    let job = Job::new(HANG);
    job.renew("hangs");
    job.start_warm();
    job.supervisor.stop(TERM).unwrap();
    assert_eq!(job.outcome(), Outcome::Stopped);
    job.renew("");
    job.run_warm();
    job.stop();
    close(job.supervisor);
}

#[test]
fn a_failed_import_makes_this_group_and_later_groups_cold() {
    let millis = Duration::from_millis;
    for (what, limit) in [("dies", HANG), ("hangs", millis(300)), ("is of another build", HANG)] {
        let job = Job::new(limit);
        job.renew(what);
        job.start_warm();
        let Event::Warmed { failure: Some(end) } = event(&job.supervisor) else { panic!("{what}") };
        let killed = WorkerExit::Signaled { signal: libc::SIGKILL };
        let exit = if what == "dies" { WorkerExit::Exited { code: 3 } } else { killed };
        assert_eq!(end, NurseryExit { exit, hung: what == "hangs" });
        assert!(matches!(event(&job.supervisor), Event::GroupStarted { .. }));
        job.stop();
        job.renew("hangs");
        run(&job.supervisor, &[&["sleep"]]);
        job.stop();
        close(job.supervisor);
    }
}

#[test]
fn a_nursery_that_was_lost_can_be_renewed() {
    let job = Job::new(HANG);
    let worker = job.run_warm();
    kill(job.nursery());
    assert_eq!(job.outcome(), Outcome::Lost);
    wait_for_end(worker);
    job.renew("");
    job.run_warm();
    job.stop();
    close(job.supervisor);
}

#[test]
fn the_next_nursery_holds_the_connection_and_enforces_the_fence() {
    let job = Job::new(HANG);
    let (connection, _peer) = UnixStream::pair().unwrap();
    let socket = read_link(format!("/proc/self/fd/{}", connection.as_raw_fd())).unwrap();
    job.supervisor.guard_connection(connection.into()).unwrap();
    job.renew("");
    job.run_warm();
    let open = read_dir(format!("/proc/{}/fd", job.nursery())).unwrap();
    assert!(open.filter_map(|entry| read_link(entry.unwrap().path()).ok()).any(|link| link == socket));
    job.supervisor.fence().set(Some(boot_now()));
    assert!(matches!(event(&job.supervisor), Event::Fenced));
    assert_eq!(job.outcome(), Outcome::Stopped);
    assert!(!job.supervisor.renew_nursery().unwrap(), "the deadline has passed");
    close(job.supervisor);
}

#[test]
fn a_nursery_that_is_being_stopped_does_not_consume_the_fence_of_the_next_one() {
    let job = Job::new(HANG);
    // A nursery that still imports is killed when it is renewed.
    job.run_warm();
    job.stop();
    let first = job.nursery();
    let held = hold(first);
    job.renew("");
    job.run_warm();
    // Let the first nursery run before the second. The first nursery finds that its link is closed, and that the
    // deadline has passed.
    let second = hold(job.nursery());
    job.supervisor.fence().set(Some(boot_now()));
    ptrace::detach(held, None).unwrap();
    wait_for_end(first);
    ptrace::detach(second, None).unwrap();
    assert!(matches!(event(&job.supervisor), Event::Fenced));
    assert_eq!(job.outcome(), Outcome::Stopped);
    close(job.supervisor);
}
