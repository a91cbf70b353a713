//! What the running kernel offers, probed once by asking it: version numbers lie (backports, seccomp filters).

use std::path::Path;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, waitid};

use super::{fds, pidfd};

/// Features that are newer than the oldest supported kernel. Each has a fallback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an answer of its own")]
pub struct Features {
    /// `close_range` (Linux 5.9); otherwise `/proc/self/fd` is read.
    pub close_range: bool,
    /// `PIDFD_SIGNAL_PROCESS_GROUP` (Linux 6.9). Without this feature, the nursery signals process groups by number,
    /// which is safe while it has not reaped their leaders.
    pub pidfd_group_signal: bool,
    /// A memory file may be executed (`vm.memfd_noexec` below 2); otherwise the nursery runs from a file.
    pub memfd_exec: bool,
    /// `/proc/PID/task/TID/children` (`CONFIG_PROC_CHILDREN`); otherwise all of `/proc` is searched by parent.
    pub proc_children: bool,
}

impl Features {
    /// The features of the running kernel.
    pub fn get() -> Self {
        static FEATURES: OnceLock<Features> = OnceLock::new();
        *FEATURES.get_or_init(|| Self {
            close_range: fds::has_close_range(),
            pidfd_group_signal: pidfd::has_group_signal(),
            memfd_exec: fds::executable_memory_file(c"elasticrs-probe", b"").is_ok(),
            proc_children: Path::new("/proc/thread-self/children").exists(),
        })
    }
}

/// The kernel is below the floor, or a filter hides what is needed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("elasticrs needs Linux 5.4 or later: {call} is not usable here ({})", .source.desc())]
pub struct UnsupportedKernel {
    pub call: &'static str,
    #[source]
    pub source: Errno,
}

/// Checks the floor: `pidfd_open` (5.3), and `waitid` on a pidfd (5.4), which imply `CLONE_PIDFD` (5.2).
pub fn check_floor() -> Result<(), UnsupportedKernel> {
    let me = pidfd::open(nix::unistd::getpid().as_raw())
        .map_err(|source| UnsupportedKernel { call: "pidfd_open", source })?;
    match waitid(Id::PIDFd(std::os::fd::AsFd::as_fd(&me)), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
        // No process is its own child; a kernel that does not know the kind of id says EINVAL.
        Ok(_) | Err(Errno::ECHILD) => Ok(()),
        Err(source) => Err(UnsupportedKernel { call: "waitid on a pidfd", source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_is_above_the_floor() {
        assert_eq!(check_floor(), Ok(()));
    }

    #[test]
    fn a_kernel_below_the_floor_is_named_in_one_line() {
        let error = UnsupportedKernel { call: "pidfd_open", source: Errno::ENOSYS };
        assert_eq!(
            error.to_string(),
            "elasticrs needs Linux 5.4 or later: pidfd_open is not usable here (Function not implemented)"
        );
    }
}
