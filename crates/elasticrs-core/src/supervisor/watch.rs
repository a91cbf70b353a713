//! Watches processes whose exits the nursery cannot report: adopted processes, and the workers of a lost nursery.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use elasticrs_nursery::sweep;
use elasticrs_nursery::token::Token;
use elasticrs_runtime::readiness::register;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::procfs;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use tokio::io::Interest;

use super::event::SweepOutcome;

/// Exit of a watched process.
#[derive(Debug)]
pub(super) struct MemberExit {
    pub(super) pid: i32,
    pub(super) exit: WorkerExit,
    pub(super) seen: Stamp,
}

/// Time limit for a parent to send the status of a child after the child's exit.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// Waits until a process exits, and returns its exit status.
///
/// A child of this process is not reaped, because Python reaps the children that it started. The exit status of any
/// other process is read from the pipe `status`, and is unknown without a pipe.
pub(super) async fn until_exit(pid: i32, pidfd: Arc<OwnedFd>, status: Option<OwnedFd>) -> MemberExit {
    let seen_by_epoll = match register(Arc::clone(&pidfd), Interest::READABLE) {
        Ok(watched) => watched.readable().await.is_ok(),
        Err(_) => false,
    };
    let seen = Stamp::now();
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    let own = waitid(Id::PIDFd(pidfd.as_fd()), flags).ok().filter(|_| seen_by_epoll);
    let exit = match (own.map_or(WorkerExit::Unknown, WorkerExit::of), status) {
        (WorkerExit::Unknown, Some(status)) => status_from_parent(status).await.unwrap_or(WorkerExit::Unknown),
        (exit, _) => exit,
    };
    MemberExit { pid, exit, seen }
}

/// Reads the status of an exited process from a pipe. The process's parent has written the four bytes that
/// `wait4` returned.
async fn status_from_parent(status: OwnedFd) -> Option<WorkerExit> {
    let pipe = register(status, Interest::READABLE).ok()?;
    // The pipe also becomes readable if the writer exits without writing anything.
    let _guard = tokio::time::timeout(STATUS_LIMIT, pipe.readable()).await.ok()?.ok()?;
    let mut bytes = [0; 4];
    // One read returns all four bytes, because pipes do not split such short writes.
    match nix::unistd::read(pipe.get_ref(), &mut bytes) {
        Ok(4) => WorkerExit::from_wait_status(i32::from_ne_bytes(bytes)),
        Ok(_) | Err(_) => None,
    }
}

/// Checks for each of these pidfds whether its process has exited.
pub(super) fn ended(pidfds: &[BorrowedFd<'_>]) -> Vec<bool> {
    let mut fds: Vec<PollFd<'_>> = pidfds.iter().map(|pidfd| PollFd::new(*pidfd, PollFlags::POLLIN)).collect();
    // If `poll` fails, treat all processes as running.
    let any = poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    fds.iter().map(|fd| any && fd.any() == Some(true)).collect()
}

/// Returns the kernel function in which a process waits. Empty if the process is running, has exited, or cannot be
/// inspected.
pub(super) fn wait_channel(pid: i32) -> String {
    procfs::read(pid, "wchan").filter(|name| name != "0").unwrap_or_default()
}

/// Returns the child that the nursery `pid` is still starting. It is the newest child of the nursery that executes the
/// same program as the nursery and is not one of `others`.
#[allow(clippy::disallowed_methods, reason = "links below /proc are read without blocking")]
pub(super) fn child_that_starts(pid: i32, others: &[i32]) -> Option<i32> {
    let program = |pid: i32| fs::read_link(procfs::folder(pid)?.join("exe")).ok();
    let own = program(pid);
    let children = procfs::read(pid, &format!("task/{pid}/children")).unwrap_or_default();
    let mut children = children.split_whitespace().rev().filter_map(|child| child.parse().ok());
    children.find(|child| !others.contains(child) && program(*child) == own)
}

/// Kills the processes that a dead nursery left behind. May block for slightly longer than `give_up`.
///
/// `sessions` contains the pids of the nursery's workers, each of which was a session leader. `adopted` contains
/// children of this process that must not be killed, because Python started and reaps them.
pub(super) fn sweep_after_loss(
    token: Token,
    owns_process: bool,
    adopted: &[i32],
    sessions: &[i32],
    give_up: Duration,
) -> SweepOutcome {
    if owns_process {
        sweep::sweep_children_of_self(adopted, sessions, give_up)
    } else {
        sweep::kill_by_token(token, give_up)
    }
}
