//! Functions for processes. Some reap children and decode how they exited. Others send signals through pidfds, which
//! are file descriptors that refer to processes.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// Result of `wait4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// A child has exited (and was reaped), was stopped, or was continued.
    Changed { pid: i32, status: i32 },
    /// There are children, but none of them has changed its state.
    Pending,
    /// There is no child (`ECHILD`). In a subreaper, this proves that no descendant is left.
    NoChildren,
}

/// Checks for a child whose state has changed, without blocking. Reaps the child if it has exited.
pub fn any_child() -> Waited {
    wait(-1, libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED)
}

/// Returns true if the process has exited, without reaping it. Returns `None` if it is not a child of this
/// process.
pub fn child_has_ended(pid: i32) -> Option<bool> {
    peek(Id::Pid(Pid::from_raw(pid)))
}

/// Returns true if this process has any children.
pub fn has_children() -> bool {
    peek(Id::All).is_some()
}

fn peek(id: Id<'_>) -> Option<bool> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT | WaitPidFlag::__WALL;
    match waitid(id, flags) {
        Ok(WaitStatus::StillAlive) => Some(false),
        Err(Errno::ECHILD) => None,
        // Treat all other results as an exit, even errors, because nix returns an error for a process that a real-time
        // signal has killed.
        Ok(_) | Err(_) => Some(true),
    }
}

/// Reaps one child. Blocks until the child has exited, so use this only for a child that is about to exit.
pub fn reap(pid: i32) -> Waited {
    wait(pid, 0)
}

/// Reaps one child if it has exited.
pub fn try_reap(pid: i32) -> Waited {
    wait(pid, libc::WNOHANG)
}

/// Detaches from a stopped process that this process traces, so that it runs again. Returns false if this process does
/// not trace it.
///
/// `signal` is the signal that stopped the process. It is delivered to the process, except for SIGTRAP, because the
/// kernel generates that signal for the tracer, for example when a traced process executes a program.
pub fn release(pid: i32, signal: i32) -> bool {
    let signal = if signal == libc::SIGTRAP { 0 } else { usize::try_from(signal).unwrap_or(0) };
    let (unused, signal) = (ptr::null_mut::<libc::c_void>(), ptr::without_provenance_mut::<libc::c_void>(signal));
    // SAFETY: `PTRACE_DETACH` does not access memory of this process. It ignores `addr` and reads `data` as a number.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, unused, signal) == 0 }
}

fn wait(pid: i32, options: i32) -> Waited {
    let mut status = 0;
    loop {
        // SAFETY: the pointer points to a live local variable. `__WALL` includes children whose exit signal is not
        // SIGCHLD.
        let found = unsafe { libc::wait4(pid, &raw mut status, options | libc::__WALL, ptr::null_mut()) };
        return match Errno::result(found) {
            Ok(0) => Waited::Pending,
            Ok(pid) => Waited::Changed { pid, status },
            Err(Errno::EINTR) => continue,
            // The error is ECHILD. The only other possible error, EINVAL, cannot occur because the options are valid
            // constants.
            Err(_) => Waited::NoChildren,
        };
    }
}

/// Exit status of a process, as reported by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WorkerExit {
    /// The process returned from its main function or called `exit`.
    Exited { code: i32 },
    /// A signal killed the process.
    Signaled { signal: i32 },
    /// The process has exited, but its exit status is unknown, because the nursery (its parent) died or because other
    /// code reaped the process.
    Unknown,
}

impl WorkerExit {
    /// Decodes a status returned by `wait4`. Returns `None` if the process was only stopped or continued.
    pub fn from_wait_status(status: i32) -> Option<Self> {
        if libc::WIFEXITED(status) {
            Some(Self::Exited { code: libc::WEXITSTATUS(status) })
        } else if libc::WIFSIGNALED(status) {
            Some(Self::Signaled { signal: libc::WTERMSIG(status) })
        } else {
            None
        }
    }

    /// Converts a status that `waitid` has returned. Returns `Unknown` if the process has not exited.
    pub fn of(status: WaitStatus) -> Self {
        match status {
            WaitStatus::Exited(_, code) => Self::Exited { code },
            WaitStatus::Signaled(_, signal, _) => Self::Signaled { signal: signal as i32 },
            _ => Self::Unknown,
        }
    }

    /// Returns true if the exit code is 0. Returns false for an unknown exit status.
    pub fn is_success(self) -> bool {
        self == Self::Exited { code: 0 }
    }
}

/// Opens a close-on-exec pidfd for the process with this pid (Linux 5.3).
///
/// The caller must make sure that the pid still belongs to the intended process. This is the case for an unreaped
/// child of the caller. For any other process, the caller must verify the process afterwards.
pub fn open_pidfd(pid: i32) -> nix::Result<OwnedFd> {
    // SAFETY: the call takes two integers and touches no memory.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = i32::try_from(fd).map_err(|_| Errno::EBADF)?;
    // SAFETY: the descriptor was just created, so no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to the process (Linux 5.1). The error is `ESRCH` if the process was reaped.
pub fn send_signal(pidfd: impl AsFd, signal: i32) -> nix::Result<()> {
    send(pidfd, signal, 0)
}

/// Sends a signal to the process group that the process leads (Linux 6.9), even after the leader was reaped.
pub fn send_group_signal(pidfd: impl AsFd, signal: i32) -> nix::Result<()> {
    send(pidfd, signal, libc::PIDFD_SIGNAL_PROCESS_GROUP)
}

fn send(pidfd: impl AsFd, signal: i32, flags: libc::c_uint) -> nix::Result<()> {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a null `siginfo` is allowed. The kernel then sends the same information as for `kill`.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_fd().as_raw_fd(), signal, info, flags) };
    Errno::result(sent).map(drop)
}

pub(super) fn has_group_signal() -> bool {
    let probe = || send_group_signal(open_pidfd(nix::unistd::getpid().as_raw())?, 0);
    // Treat EINVAL as missing support, because older kernels reject the flag before they check anything else.
    !matches!(probe(), Err(Errno::EINVAL | Errno::ENOSYS))
}

/// Checks for each of these pidfds whether its process has exited.
pub fn have_ended(pidfds: &[BorrowedFd<'_>]) -> Vec<bool> {
    let mut fds: Vec<PollFd<'_>> = pidfds.iter().map(|pidfd| PollFd::new(*pidfd, PollFlags::POLLIN)).collect();
    // If `poll` fails, treat all processes as running.
    let any = poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    fds.iter().map(|fd| any && fd.any() == Some(true)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses_are_decoded() {
        assert_eq!(WorkerExit::from_wait_status(7 << 8), Some(WorkerExit::Exited { code: 7 }));
        assert_eq!(WorkerExit::from_wait_status(9), Some(WorkerExit::Signaled { signal: 9 }));
        assert_eq!(WorkerExit::from_wait_status(0x8b), Some(WorkerExit::Signaled { signal: 11 }), "with a core dump");
        assert_eq!(WorkerExit::from_wait_status(0x137f), None, "stopped by SIGSTOP");
        assert_eq!(WorkerExit::from_wait_status(0xffff), None, "continued");
    }

    #[test]
    fn an_unknown_exit_is_not_a_success() {
        assert!(!WorkerExit::Unknown.is_success());
        assert!(WorkerExit::Exited { code: 0 }.is_success());
    }
}
