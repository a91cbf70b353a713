//! Reaps child processes.

use std::ptr;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

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

/// True if this process has any children.
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
