//! Tests for a sentinel (the process that guards a nursery): its agent is dead or does nothing, or its nursery
//! cannot act.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::os::fd::{AsFd, OwnedFd};

use common::groups::{HANG, TERM, close, event, run, warm_image};
use common::image;
use elasticrs_core::supervisor::{Config, Event, Supervisor};
use elasticrs_nursery::activity::{ActivityPage, Doing};
use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::launch::{Interrupt, Launched, launch};
use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_nursery::tree::children_of_self;
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::process;
use elasticrs_testkit::nursery::{Lines, pipe, with_stdout, worker};
use elasticrs_testkit::{assert_no_children, is_running, wait_for_end, wait_for_state, wait_readable, wait_until};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::{prctl, ptrace};
use nix::unistd::Pid;

/// A warm nursery and its sentinel. Their agent is this test, which does nothing.
struct Both {
    nursery: Launched,
    sentinel: Launched,
    activity: ActivityPage,
    fence: Fence,
}

impl Both {
    fn start(what: &str) -> Self {
        // Adopt the processes that a killed nursery leaves.
        prctl::set_child_subreaper(true).unwrap();
        let mut nursery = launch(&[warm_image(what, HANG), image()], None, &Interrupt::default()).unwrap();
        let mut sentinel = *nursery.sentinel.take().unwrap();
        let (activity, fence) = (ActivityPage::new().unwrap(), Fence::new().unwrap());
        let mut guarded = vec![nursery.pidfd.try_clone().unwrap()];
        guarded.extend(activity.descriptors().unwrap());
        sentinel.link.send(&Request::Guard, guarded).unwrap();
        sentinel.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()).unwrap();
        nursery.link.send(&Request::Activity, activity.descriptors().unwrap()).unwrap();
        nursery.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()).unwrap();
        Self { nursery, sentinel, activity, fence }
    }

    /// Starts two workers, of which the first leaves a daemon. Returns the daemon's pid.
    fn spawn(&mut self) -> i32 {
        let (reader, writer) = pipe();
        let spawn = |process| Request::Spawn { process, keep_ignored: Vec::new() };
        let warm = |process| ProcessSpec { warm: true, ..process };
        let first = spawn(warm(with_stdout(worker(&["daemonise"]))));
        self.nursery.link.send(&first, vec![writer]).unwrap();
        self.nursery.link.send(&spawn(warm(worker(&["sleep"]))), Vec::new()).unwrap();
        let mut lines = Lines::new(reader);
        lines.until_ready();
        lines.said[0].parse().unwrap()
    }

    /// Closes the links, as if the agent had been killed. Returns the exit statuses of the nursery and the sentinel.
    fn hang_up(self) -> [i32; 2] {
        let Self { nursery, sentinel, .. } = self;
        drop((nursery.link, sentinel.link));
        [end_of(nursery.pid, &nursery.pidfd), end_of(sentinel.pid, &sentinel.pidfd)]
    }
}

/// Waits until a child has exited, and returns its status.
fn end_of(pid: i32, pidfd: &OwnedFd) -> i32 {
    wait_readable(pidfd, "the end of a nursery");
    let process::Waited::Changed { status, .. } = process::reap(pid) else { panic!("it is our child") };
    status
}

/// Checks that all processes adopted from a killed nursery, including workers, exit by themselves.
fn assert_nothing_is_left() {
    for pid in children_of_self() {
        wait_for_end(pid);
        process::reap(pid);
    }
    assert_no_children();
}

#[test]
fn a_nursery_that_hangs_in_a_start_is_killed_when_its_agent_dies() {
    let mut both = Both::start("hangs before the second fork");
    let daemon = both.spawn();
    assert_eq!(both.hang_up(), [libc::SIGKILL, 0]);
    assert!(!is_running(daemon));
    assert_nothing_is_left();
}

#[test]
fn the_sentinel_kills_processes_left_by_a_nursery_killed_with_its_agent() {
    let mut both = Both::start("");
    let daemon = both.spawn();
    process::send_signal(&both.nursery.pidfd, libc::SIGKILL).unwrap();
    assert_eq!(both.hang_up(), [libc::SIGKILL, 0]);
    assert!(!is_running(daemon));
    assert_nothing_is_left();
}

#[test]
fn the_sentinel_does_not_kill_a_nursery_that_is_slowly_cleaning_up() {
    let mut both = Both::start("");
    let slow = Pid::from_raw(both.spawn());
    // Make the process stop while it exits, until the test lets it continue.
    ptrace::seize(slow, ptrace::Options::PTRACE_O_TRACEEXIT).unwrap();
    wait_until("the end of the start", || both.activity.look() == Doing::Waits);
    process::send_signal(&both.nursery.pidfd, libc::SIGSTOP).unwrap();
    wait_for_state(both.nursery.pid, 'T');
    let nursery = both.nursery.pidfd.try_clone().unwrap();
    let going_on = std::thread::spawn(move || both.hang_up());
    wait_for_state(slow.as_raw(), 't');
    // The sentinel checks the nursery several times in this period.
    assert_eq!(poll(&mut [PollFd::new(nursery.as_fd(), PollFlags::POLLIN)], 300_u16), Ok(0));
    ptrace::cont(slow, None).unwrap();
    wait_for_end(slow.as_raw());
    process::reap(slow.as_raw());
    assert_eq!(going_on.join().unwrap(), [0, 0], "it was not killed");
    assert_no_children();
}

#[test]
fn the_sentinel_enforces_the_fence_if_the_nursery_hangs_in_a_start() {
    let mut both = Both::start("hangs before the second fork");
    let daemon = both.spawn();
    let deadline = boot_now() + 300_000_000;
    both.fence.set(Some(deadline));
    wait_for_end(daemon);
    assert!(boot_now() >= deadline, "too early");
    assert!(!both.fence.set(None), "it is told to have passed");
    assert_eq!(both.hang_up(), [libc::SIGKILL, 0]);
    assert_nothing_is_left();
}

fn sentinels(supervisor: &Supervisor) -> Vec<i32> {
    let nursery = supervisor.nursery_pid();
    children_of_self().into_iter().filter(|&pid| Some(pid) != nursery).collect()
}

#[test]
fn a_sentinel_that_is_lost_is_replaced_at_the_next_start() {
    let nursery = vec![warm_image("", HANG), image()];
    let supervisor = Supervisor::new(Config { nursery, owns_process: true }).unwrap();
    run(&supervisor, &[&["sleep"]]);
    let [first] = sentinels(&supervisor)[..] else { panic!("there is one") };
    process::send_signal(elasticrs_testkit::pidfd(first).unwrap(), libc::SIGKILL).unwrap();
    wait_for_end(first);
    supervisor.stop(TERM).unwrap();
    while !matches!(event(&supervisor), Event::GroupEnded { .. }) {}
    run(&supervisor, &[&["sleep"]]);
    // The sentinel is launched on a thread of its own, for which the start of the group does not wait.
    wait_until("another sentinel", || matches!(sentinels(&supervisor)[..], [second] if second != first));
    close(supervisor);
}
