//! Stages of starting a worker.

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

named_enum! {
    /// Step of starting a worker. Each step can fail. On the pipe that reports the progress of a start, a step is
    /// represented by its position in this list. The names complete the sentence "could not …".
    #[derive(Serialize, Deserialize)]
    #[repr(u8)]
    pub enum Stage {
        /// `clone`.
        Clone = "create the process",
        /// `setsid`.
        NewSession = "create the session",
        /// `prctl(PR_SET_PDEATHSIG)`, and the check that the parent has not exited.
        ParentDeathSignal = "arm the parent-death signal",
        /// Opening the file for a standard stream.
        OpenLog = "open the log file",
        /// Moving the worker's descriptors to their final numbers.
        Descriptors = "place the descriptors",
        /// `chdir`.
        ChangeDir = "change to the working directory",
        /// `execve`.
        Exec = "execute",
        /// Receiving the worker's pidfd in the agent. This fails if the agent has reached its limit on open files.
        Receive = "receive the process descriptor",
        /// Checking the fence deadline, at which the lease of the store session expires. After that, no worker is
        /// started.
        Fence = "start a worker",
        /// `sched_setaffinity`.
        Affinity = "bind the worker to its CPUs",
        /// Stage in which the parent calls `fork`. Libraries' fork handlers for the parent also run in this stage.
        Fork = "fork: in what was registered to run in the parent (os.register_at_fork: before, after_in_parent; \
            pthread_atfork)",
        /// Same as [`Self::Fork`], but the setup of the previous worker is still in progress.
        NextFork = "fork: in what was registered to run in the parent (os.register_at_fork: before, after_in_parent; \
            pthread_atfork)",
        /// Running the fork handlers of imported libraries in the child process.
        Forked = "begin as a fork: in what was registered to run in the child (os.register_at_fork: after_in_child; \
            pthread_atfork)",
    }
}

impl Stage {
    /// Returns the reason for a failure in words.
    pub fn reason(self, errno: Errno) -> &'static str {
        match (self, errno) {
            // The kernel's text, "Try again", would not tell the user the cause.
            (Self::Clone, Errno::EAGAIN) => "the limit on processes is reached (RLIMIT_NPROC or a pids.max)",
            // The kernel's text, "No child processes", would not tell the user the cause.
            (Self::Clone, Errno::ECHILD) => "it ended when it was forked",
            // The forker uses this error if Python's `os.fork` raises an exception without an error number. The
            // kernel's `fork` never returns it.
            (Self::Clone, Errno::ECANCELED) => "what was imported has refused it (os.fork raised an exception)",
            // Explain the error, because the kernel's text, "Invalid argument", does not name the cause.
            (Self::Affinity, Errno::EINVAL) => "none of the CPUs is online and allowed for this process",
            (Self::Fence, _) => "the lease of the connection to the store has expired",
            _ => errno.desc(),
        }
    }

    /// Returns the stage with a number that was read from the stage pipe, or `None` if there is no such stage.
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
