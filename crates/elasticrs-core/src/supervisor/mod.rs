//! Starts, watches and stops the workers of one attempt, as one group.
//!
//! [`Supervisor`] is a handle. It sends commands to the runtime thread (`task`), which owns the link to the nursery,
//! the pidfds, and the deadlines. [`state`] is a pure function that maps inputs to effects, and `task` carries out the
//! effects. The results are reported as [`Event`]s through a [`queue::Queue`].
//!
//! Invariants, cited by the tests:
//!
//! - **SUP-1** either all workers of a group are started, or none;
//! - **SUP-2** every exit of a worker is reported exactly once, and before the end of its group;
//! - **SUP-3** when the first worker fails, the other workers are signalled before the failure is reported;
//! - **SUP-4** workers that are still running at the deadline of a stop get SIGKILL;
//! - **SUP-5** the end of a group is reported exactly once, however the group ended, and only after the descendants of
//!   its workers were cleaned up;
//! - **SUP-6** no signal is sent to the pid of a process that has exited;
//! - **SUP-7** a group whose fence deadline has passed ends as stopped and not as failed, and SIGKILL is reported as
//!   the signal that was sent;
//! - **SUP-8** once a worker has exited, the rest of its process group gets the stop signal, even before SIGKILL is
//!   due. With [`crate::spec::StopScope::Worker`], the rest gets no stop signal before that exit;
//! - **SUP-9** in a group that [replaces](crate::spec::GroupPolicy::replaces) failed workers, the failure of a worker
//!   does not cause signals to other workers, and a replacement is started only after all processes of the failed
//!   worker are gone.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod command;
pub mod counters;
mod deadlines;
mod event;
#[allow(clippy::disallowed_methods, reason = "runs on a thread of its own")]
pub mod evidence;
#[allow(clippy::disallowed_methods, reason = "runs on a thread of its own")]
mod exit_progress;
mod handle;
pub mod queue;
mod start;
pub mod state;
mod task;

pub use command::{Config, SupervisorError};
pub use event::{
    Event, ExitStage, KillReason, NurseryExit, Outcome, RankSeen, StartFailure, SweepOutcome, TimerExpired, WorkerHung,
    WorkerRaised, WorkersKilled,
};
pub use handle::{Keeper, Supervisor};
