//! Features of the running kernel. Each feature is probed once, because backports and seccomp filters make the kernel's
//! version number unreliable.

use std::path::Path;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::wait::{Id, WaitPidFlag, waitid};

use super::process;

/// Kernel features that the oldest supported kernel does not have. Each has a fallback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// True if `PIDFD_SIGNAL_PROCESS_GROUP` is available (Linux 6.9). The fallback is to signal process groups by
    /// number, which is safe as long as the nursery has not reaped the group leaders.
    pub pidfd_group_signal: bool,
    /// True if `/proc/PID/task/TID/children` is available (`CONFIG_PROC_CHILDREN`). The fallback is to find children
    /// by reading the parent pid of every process in `/proc`.
    pub proc_children: bool,
}

impl Features {
    /// Returns the features of the running kernel.
    pub fn get() -> Self {
        static FEATURES: OnceLock<Features> = OnceLock::new();
        *FEATURES.get_or_init(|| Self {
            pidfd_group_signal: process::has_group_signal(),
            proc_children: Path::new("/proc/thread-self/children").exists(),
        })
    }
}

/// Error for a kernel that is too old, or whose seccomp filter blocks a required system call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("elasticrs needs Linux 5.4 or later: {call} is not usable here ({})", .source.desc())]
pub struct UnsupportedKernel {
    pub call: &'static str,
    #[source]
    pub source: Errno,
}

/// Checks that the kernel has the required features: `pidfd_open` (Linux 5.3) and `waitid` on a pidfd (Linux 5.4). A
/// kernel with these features also has `CLONE_PIDFD` (Linux 5.2).
///
/// Also checks for child subreapers (Linux 3.4) to detect qemu-user, which emulates system calls and supports neither
/// child subreapers nor `CLONE_PIDFD`.
pub fn check_floor() -> Result<(), UnsupportedKernel> {
    prctl::get_child_subreaper()
        .map_err(|source| UnsupportedKernel { call: "prctl(PR_GET_CHILD_SUBREAPER)", source })?;
    let me = process::open_pidfd(nix::unistd::getpid().as_raw())
        .map_err(|source| UnsupportedKernel { call: "pidfd_open", source })?;
    match waitid(Id::PIDFd(std::os::fd::AsFd::as_fd(&me)), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
        // Expect ECHILD, because no process is its own child. A kernel whose `waitid` does not support pidfds returns
        // EINVAL.
        Ok(_) | Err(Errno::ECHILD) => Ok(()),
        Err(source) => Err(UnsupportedKernel { call: "waitid on a pidfd", source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_is_supported() {
        assert_eq!(check_floor(), Ok(()));
    }

    #[test]
    fn an_unsupported_kernel_is_reported_in_one_line() {
        let error = UnsupportedKernel { call: "pidfd_open", source: Errno::ENOSYS };
        assert_eq!(
            error.to_string(),
            "elasticrs needs Linux 5.4 or later: pidfd_open is not usable here (Function not implemented)"
        );
    }
}
