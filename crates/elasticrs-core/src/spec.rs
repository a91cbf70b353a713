//! Plain-data description of a group of workers, which Python passes to the agent's runtime.

use std::os::fd::OwnedFd;
use std::time::Duration;

use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_sys::named_enum;
use elasticrs_sys::signal::Signal;

/// Policy for stopping a group: send a signal, wait for the grace period, then send SIGKILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopPolicy {
    /// First signal to send. With SIGKILL, there is no grace period.
    pub signal: Signal,
    /// Time between `signal` and SIGKILL. It is the same for all ranks.
    pub grace: Duration,
}

impl StopPolicy {
    /// True if the policy has no grace period.
    pub(crate) fn is_hard(self) -> bool {
        self.signal == Signal::KILL || self.grace.is_zero()
    }
}

named_enum! {
    /// Processes that receive the first stop signal. SIGKILL is always sent to the whole process group.
    pub enum StopScope {
        /// Signal the worker first, and the rest of its process group once the worker has exited, because the worker needs
        /// its data loaders while it saves a checkpoint.
        Worker = "worker",
        /// Signal the whole process group at once, for a program that does not forward signals.
        Group = "group",
    }
}

/// Policy for descendants that are still running when every worker has exited with code 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descendants {
    /// Let the descendants run for this time, then send SIGTERM, and SIGKILL one second later.
    Linger(Duration),
    /// Leave the descendants running.
    Keep,
}

/// Description of the workers to start on this node.
#[derive(Debug)]
pub struct GroupSpec {
    /// The workers, in the order of their local ranks `0..n`.
    pub processes: Vec<ProcessSpec>,
    /// File descriptors to pass to workers. [`ProcessSpec::pass_fds`] refers to them by index.
    pub descriptors: Vec<OwnedFd>,
    pub policy: GroupPolicy,
}

/// How the workers of a group are started, stopped and replaced.
#[derive(Debug, Clone)]
pub struct GroupPolicy {
    /// Policy for stopping the other workers when the first worker fails. The core applies it without waiting for
    /// Python.
    pub on_failure: StopPolicy,
    /// Selects which processes of each worker receive the stop signal. Applies to every stop of the group, including a
    /// stop after a failure.
    pub stop_scope: StopScope,
    /// Policy for descendants that are still running after all workers have exited with code 0. In failed and stopped
    /// groups, descendants are killed at once.
    pub on_success: Descendants,
    /// Time limit for starting all workers, because `exec` on a dead network file system blocks forever.
    pub start_deadline: Duration,
    /// Signals that the workers ignore, because they were already ignored when the agent was started (`nohup`).
    pub keep_ignored: Vec<Signal>,
    /// True if a failing worker does not stop the others. The leftover processes of the failed worker are killed, and
    /// a replacement may be started.
    pub replaces: bool,
    /// Maximum time by which a stop is delayed so that the workers can copy their states into memory. Zero if the workers
    /// are not asked to copy their states.
    pub keep_grace: Duration,
}
