//! The nursery: a small process between agent and workers that makes sure that no process of a job is left behind.
//!
//! ```text
//! agent ──(socket: requests, replies, descriptors)── nursery ── worker 0 … worker N-1 ── their descendants
//! ```
//!
//! The nursery is single-threaded, the parent of all workers, and a child subreaper. Orphaned descendants of a worker
//! therefore become its children, and `wait4` = `ECHILD` proves that none is left. The nursery watches the agent
//! through a pidfd. When the agent dies, the nursery kills all of its descendants and exits.
//!
//! 1. A worker dies with the nursery (`PR_SET_PDEATHSIG`). All descendants of the nursery are killed when the agent
//!    dies.
//! 2. Only the nursery reaps workers, so the pid of a worker that it has not reaped is not reused.
//! 3. Every exit of a worker is reported once, after the worker's `Spawned`.
//! 4. A sweep whose result has no `stuck` and no `spared` processes has seen `ECHILD`.
//! 5. An idle nursery does not wake up. No timer runs outside of a sweep, except the timer of the fence, which expires
//!    once per lease.
//! 6. An agent that does not read its socket stops neither the reaping nor the killing.
//! 7. Connections that the nursery holds for the agent are closed only after the workers of a dead agent and their
//!    descendants have exited.
//! 8. No worker runs past the fence deadline, whether or not the agent is running.
//!
//! | module | used by |
//! | --- | --- |
//! | [`protocol`], [`link`] | both: messages, frames, descriptors |
//! | [`server`] | the nursery: its program |
//! | [`launch`] | the agent: starts a nursery |
//! | [`report`] | the agent: finds the module that has killed a nursery during the imports |
//! | [`sweep`] | both: kills the processes of a nursery that died |
//! | [`held`] | both: exited processes that a tracer holds |
//! | [`connections`] | both: connections that keep the agent's session with its store open |
//! | [`fence`] | both: the deadline that they share |
//! | [`activity`] | both, for a sentinel: shows if the nursery is starting workers |
//! | [`start`] | both: the command-line argument of the nursery |
//! | [`token`], [`tree`] | both: find descendants |
//! | [`cleaner`] | both: processes that are killed last |

pub mod activity;
pub mod cleaner;
pub mod connections;
pub mod fence;
pub mod held;
#[cfg(feature = "agent")]
pub mod launch;
pub mod link;
pub mod protocol;
#[cfg(feature = "agent")]
pub mod report;
pub mod server;
pub mod start;
pub mod sweep;
pub mod token;
pub mod tree;

/// The name of the nursery's process. Nothing in it says what it belongs to, so that killing the agent "by name" does
/// not take the nursery with it.
pub const NAME: &std::ffi::CStr = c"worker-nursery";
