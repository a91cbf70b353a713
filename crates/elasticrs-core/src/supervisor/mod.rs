//! Runs the workers of an attempt as one unit.
//!
//! [`Supervisor`] is a handle: its commands go to the one runtime thread (`task`), which owns the nursery's link, the
//! pidfds, and the deadlines. [`state`] decides, as a pure function over inputs; `task` carries out the effects. The
//! results are reported as [`Event`]s through a [`queue::Queue`].
//!
//! Invariants, cited by the tests:
//!
//! - **SUP-1** either all workers of a group are started, or none;
//! - **SUP-2** every exit is reported exactly once, and before the end of its group;
//! - **SUP-3** the siblings of the first failed worker are signalled before the failure is reported;
//! - **SUP-4** workers that are still running at the deadline of a stop get SIGKILL;
//! - **SUP-5** the end of a group is reported once, after its descendants were cleaned up, however the group ended;
//! - **SUP-6** no signal is sent to the pid of a process that has exited;
//! - **SUP-7** a group whose fence has expired ends as stopped, with SIGKILL as the signal sent, and never counts as
//!   failed;
//! - **SUP-8** before SIGKILL, the rest of a worker's process group is signalled once the worker has exited. With
//!   [`crate::spec::StopScope::Worker`], it is not signalled earlier;
//! - **SUP-9** in a group that [replaces](crate::spec::GroupSpec::replaces) failed workers, no worker is signalled
//!   because another one has failed, and a replacement is started only when no process of the failed worker is left.

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
mod nursery_io;
pub mod queue;
mod start;
pub mod state;
mod task;
mod watch;
mod zombies;

pub use command::{Config, SupervisorError};
pub use event::{
    Event, ExitStage, Heartbeat, KillReason, NurseryEnd, Outcome, RankSeen, StartFailure, Swept, TimerExpired,
    WorkerHung, WorkerRaised, WorkersKilled,
};
pub use handle::{Keeper, Supervisor};
