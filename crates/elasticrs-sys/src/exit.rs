//! Exit status of a worker.

use nix::sys::wait::WaitStatus;
use serde::{Deserialize, Serialize};

/// Exit status of a process, as reported by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WorkerExit {
    /// The worker returned or called `exit`.
    Exited { code: i32 },
    /// A signal killed the worker.
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

    /// Converts a status that `waitid` has returned. `Unknown` if the process has not exited.
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
