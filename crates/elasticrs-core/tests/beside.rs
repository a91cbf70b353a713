//! Tests for a second warm nursery, which imports modules again while the first one has workers.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::fs::{read_dir, read_link, read_to_string, write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::groups::{HANG, TERM, close, event, group, kill, run, warm, warm_image};
use common::image;
use elasticrs_core::supervisor::{Config, Event, NurseryExit, Outcome, Supervisor};
use elasticrs_nursery::tree::children_of_self;
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::exit::WorkerExit;
use elasticrs_sys::priority;
use elasticrs_testkit::nursery::{hold, worker};
use elasticrs_testkit::{wait_for_end, wait_until};
use nix::sys::ptrace;
use tempfile::TempDir;

/// A supervisor whose next nursery executes what the test has written to a file.
struct Job {
    supervisor: Supervisor,
    folder: TempDir,
}

impl Job {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("what");
        write(&path, "").unwrap();
        let nursery = vec![warm_image(&format!("reads {}", path.display()), HANG), image()];
        Self { supervisor: Supervisor::new(Config { nursery, owns_process: true }).unwrap(), folder }
    }

    fn import_beside(&self, what: &str, limit: Duration) {
        write(self.folder.path().join("what"), what).unwrap();
        self.supervisor.import_beside(limit).unwrap();
    }

    fn run_warm(&self) -> i32 {
        self.supervisor.start(warm(group(vec![worker(&["sleep"])]))).unwrap();
        let Event::GroupStarted { pids, .. } = event(&self.supervisor) else { panic!("it starts") };
        pids[0]
    }

    fn is_ready(&self) {
        let expected = Event::Warmed { failure: None, is_beside: true };
        assert_eq!(event(&self.supervisor), expected);
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

/// Returns the nurseries that are children of this process, but not their sentinels (the processes that guard
/// them).
fn nurseries() -> Vec<i32> {
    let is_nursery = |pid: &i32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).contains("test-nursery")
    };
    children_of_self().into_iter().filter(is_nursery).collect()
}

fn stat(pid: i32) -> Vec<String> {
    let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().map(str::to_owned).collect()
}

fn parent(pid: i32) -> i32 {
    stat(pid)[1].parse().unwrap()
}

fn nice(pid: i32) -> i32 {
    stat(pid)[16].parse().unwrap()
}

#[test]
fn the_second_nursery_takes_over_only_between_groups() {
    let job = Job::new();
    assert!(!job.supervisor.take_over().unwrap(), "there is no second nursery");
    let worker = job.run_warm();
    let first = job.nursery();
    job.import_beside("", HANG);
    job.is_ready();
    assert!(!job.supervisor.take_over().unwrap(), "a group runs");
    assert_eq!((job.nursery(), parent(worker)), (first, first));
    job.stop();
    assert!(job.supervisor.take_over().unwrap());
    wait_for_end(first);
    let worker = job.run_warm();
    assert_ne!(job.nursery(), first);
    assert_eq!(parent(worker), job.nursery());
    assert_eq!(nice(worker), nice(std::process::id().cast_signed()), "the low priority is for the import only");
    job.stop();
    close(job.supervisor);
}

#[test]
fn the_second_nursery_imports_at_low_priority_if_that_can_be_undone() {
    let job = Job::new();
    let first = job.nursery();
    job.import_beside("hangs", HANG);
    wait_until("the second nursery", || nurseries().len() == 2);
    let second = nurseries().into_iter().find(|&pid| pid != first).unwrap();
    let own = nice(std::process::id().cast_signed());
    let expected = if priority::restorable().is_some() { priority::BACKGROUND } else { own };
    assert_eq!(nice(second), expected);
    assert!(!job.supervisor.take_over().unwrap(), "it still imports");
    close(job.supervisor);
}

#[test]
fn a_new_second_nursery_replaces_the_earlier_one() {
    let job = Job::new();
    for what in ["hangs", "", "hangs", ""] {
        job.import_beside(what, HANG);
        if what.is_empty() {
            job.is_ready();
        }
    }
    wait_until("the end of the others", || nurseries().len() == 2);
    close(job.supervisor);
}

#[test]
fn a_failed_import_keeps_the_group_running_and_makes_later_groups_cold() {
    for (what, limit) in [("dies", HANG), ("hangs", Duration::from_millis(50)), ("is of another build", HANG)] {
        let job = Job::new();
        let worker = job.run_warm();
        job.import_beside(what, limit);
        let Event::Warmed { failure: Some(end), is_beside: true } = event(&job.supervisor) else { panic!("{what}") };
        let killed = WorkerExit::Signaled { signal: libc::SIGKILL };
        let exit = if what == "dies" { WorkerExit::Exited { code: 3 } } else { killed };
        assert_eq!(end, NurseryExit { exit, hung: what == "hangs" });
        assert_eq!(parent(worker), job.nursery());
        job.stop();
        job.import_beside("", HANG);
        assert!(!job.supervisor.take_over().unwrap(), "there is no further import");
        run(&job.supervisor, &[&["sleep"]]);
        job.stop();
        close(job.supervisor);
    }
}

#[test]
fn killing_a_ready_second_nursery_is_reported_as_a_failed_import() {
    let job = Job::new();
    let first = job.nursery();
    job.import_beside("", HANG);
    job.is_ready();
    nurseries().into_iter().filter(|&pid| pid != first).for_each(kill);
    assert!(matches!(event(&job.supervisor), Event::Warmed { failure: Some(_), is_beside: true }));
    close(job.supervisor);
}

#[test]
fn the_second_nursery_can_take_over_after_the_first_one_was_killed() {
    let job = Job::new();
    let worker = job.run_warm();
    job.import_beside("", HANG);
    job.is_ready();
    kill(job.nursery());
    assert_eq!(job.outcome(), Outcome::Lost);
    wait_for_end(worker);
    // Make any further warm nursery hang, because none must be started here.
    write(job.folder.path().join("what"), "hangs").unwrap();
    run(&job.supervisor, &[&["sleep"]]);
    job.stop();
    assert!(job.supervisor.take_over().unwrap());
    let worker = job.run_warm();
    assert_eq!(parent(worker), job.nursery());
    job.stop();
    close(job.supervisor);
}

#[test]
fn a_nursery_that_has_taken_over_holds_the_connection_and_enforces_the_fence() {
    let job = Job::new();
    let (connection, _peer) = UnixStream::pair().unwrap();
    let socket = read_link(format!("/proc/self/fd/{}", connection.as_raw_fd())).unwrap();
    job.supervisor.guard_connection(connection.into()).unwrap();
    job.import_beside("", HANG);
    job.is_ready();
    assert!(job.supervisor.take_over().unwrap());
    job.run_warm();
    let open = read_dir(format!("/proc/{}/fd", job.nursery())).unwrap();
    assert!(open.filter_map(|entry| read_link(entry.unwrap().path()).ok()).any(|link| link == socket));
    job.supervisor.fence().set(Some(boot_now()));
    assert!(matches!(event(&job.supervisor), Event::Fenced));
    assert_eq!(job.outcome(), Outcome::Stopped);
    close(job.supervisor);
}

#[test]
fn an_exiting_first_nursery_does_not_consume_the_fence_of_the_second_one() {
    let job = Job::new();
    let first = job.nursery();
    job.import_beside("", HANG);
    job.is_ready();
    let held = hold(first);
    assert!(job.supervisor.take_over().unwrap());
    job.run_warm();
    // The first nursery wakes up first. It finds both that its link is closed and that the deadline has passed.
    let second = hold(job.nursery());
    job.supervisor.fence().set(Some(boot_now()));
    ptrace::detach(held, None).unwrap();
    wait_for_end(first);
    ptrace::detach(second, None).unwrap();
    assert!(matches!(event(&job.supervisor), Event::Fenced));
    assert_eq!(job.outcome(), Outcome::Stopped);
    close(job.supervisor);
}
