//! Helpers for tests that start processes. They wait for state changes, and check for leaked processes and descriptors.
//!
//! The time limits in this module only keep tests from hanging. They are not part of what a test measures. A helper
//! that fails panics, so that the test fails.
//!
//! | item | contents |
//! | --- | --- |
//! | this module | waits for processes and conditions; lists children and descriptors |
//! | [`nursery`] | a client of the nursery without the supervisor, and agents that are killed |
//! | [`hung_file`] | a file whose reader hangs in the kernel, and a file whose opening blocks |
//! | program `testkit-worker` (`main.rs`) | a worker that misbehaves as its command line requests |
//!
//! `cargo build --bins` builds the program; the tests of other crates do not.
#![allow(clippy::missing_panics_doc)]

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use elasticrs_sys::process::{self, Waited};
use elasticrs_sys::procfs::Stat;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

pub mod hung_file;
pub mod nursery;

/// Maximum time to wait for a condition before the test fails.
pub(crate) const HANG_GUARD: Duration = Duration::from_secs(40);

/// Returns the path of the program `testkit-worker`. It is in the folder of the running test, or in one of that
/// folder's ancestors.
pub fn worker_program() -> PathBuf {
    built("testkit-worker")
}

fn built(program: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let built = test.ancestors().map(|folder| folder.join(program)).find(|path| path.is_file());
    built.unwrap_or_else(|| panic!("{program} is built by `cargo build --bins`"))
}

/// Blocks until a descriptor is readable. A pidfd becomes readable when its process exits.
pub fn wait_readable(fd: impl AsFd, what: &str) {
    let mut polled = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(HANG_GUARD).expect("seconds fit");
    loop {
        match poll(&mut polled, timeout) {
            Ok(0) => panic!("waited {HANG_GUARD:?} for {what}"),
            Ok(_) => return,
            Err(Errno::EINTR) => {}
            Err(error) => panic!("poll for {what}: {error}"),
        }
    }
}

/// Polls until a condition is true. Use this only for changes that cannot be waited for in another way.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < HANG_GUARD, "waited {HANG_GUARD:?} for {what}");
        sleep(Duration::from_millis(1));
    }
}

/// Polls until the process is in this state, because the kernel reports state changes only to the parent.
pub fn wait_for_state(pid: i32, letter: char) {
    wait_until(&format!("process {pid} in state {letter}"), || state(pid) == Some(letter));
}

/// Opens a pidfd for a process. Returns `None` if no process has this pid.
pub fn pidfd(pid: i32) -> Option<OwnedFd> {
    match process::open_pidfd(pid) {
        Ok(pidfd) => Some(pidfd),
        Err(Errno::ESRCH) => None,
        Err(error) => panic!("pidfd_open({pid}): {error}"),
    }
}

/// Blocks until the process has exited. It may still be a zombie afterwards.
pub fn wait_for_end(pid: i32) {
    if let Some(pidfd) = pidfd(pid) {
        wait_readable(pidfd, &format!("the end of process {pid}"));
    }
}

/// Returns true if the process exists and is not a zombie.
pub fn is_running(pid: i32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Returns the state letter of a process from `/proc/PID/stat`, or `None` if there is no such process.
pub fn state(pid: i32) -> Option<char> {
    Stat::of(pid)?.field(3)
}

/// Returns the pids of the children of this process, including zombies.
pub fn children() -> Vec<i32> {
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted");
    let lists = tasks.flatten().map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    lists
        .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// Returns the open descriptors of this process in ascending order, except the one that is used to list them.
pub fn open_fds() -> Vec<RawFd> {
    let folder = nix::dir::Dir::open("/proc/self/fd", nix::fcntl::OFlag::O_RDONLY, nix::sys::stat::Mode::empty());
    let mut folder = folder.expect("/proc is mounted");
    let own = folder.as_raw_fd();
    let names = folder.iter().flatten().filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok());
    let mut fds: Vec<RawFd> = names.filter(|&fd| fd != own).collect();
    fds.sort_unstable();
    fds
}

/// Asserts that this process has no children, not even zombies. In a child subreaper, orphaned descendants are
/// children, too.
pub fn assert_no_children() {
    let waited = process::any_child();
    assert_eq!(waited, Waited::NoChildren, "children are left: {:?}", children());
}
