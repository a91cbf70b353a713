//! The small process between agent and workers that leaves nothing behind.
//!
//! ```text
//! agent ──(socket: requests, replies, descriptors)── nursery ── worker 0 … worker N-1 ── their descendants
//! ```
//!
//! The nursery is single-threaded, the parent of all workers, and a child subreaper: what a worker leaves behind
//! becomes its child, and `wait4` = `ECHILD` proves that nothing is left. It watches the agent by a pidfd; when the
//! agent dies, it ends everything and itself.
//!
//! 1. A worker dies with the nursery (`PR_SET_PDEATHSIG`), the nursery's descendants with the agent.
//! 2. Only the nursery reaps workers, so a pid that it has not reaped is the process that it means.
//! 3. Every exit of a worker is told once, after its `Spawned`.
//! 4. A sweep that ends without `stuck` and `spared` has seen `ECHILD`.
//! 5. A nursery that is told nothing does nothing: no timer runs while no sweep does, but for the fence's, once in a lease.
//! 6. An agent that does not read stops neither the reaping nor the killing.
//! 7. What it holds for the agent is closed after a dead agent's workers and their descendants have ended, not before.
//! 8. No worker runs on past the deadline of the fence, whether or not the agent runs.
//!
//! | module | side |
//! | --- | --- |
//! | [`protocol`], [`link`] | both: messages, frames, descriptors |
//! | [`server`] | the nursery's program |
//! | [`launch`] | the agent: starting a nursery |
//! | [`report`] | the agent: which module has ended a nursery that imports |
//! | [`sweep`] | both: what to do when the nursery itself was lost |
//! | [`held`] | both: who has ended and is held by a tracer |
//! | [`connections`] | both: what keeps the agent's session with its store |
//! | [`fence`] | both: the deadline that they share |
//! | [`activity`] | both, for a sentinel: whether the nursery starts workers |
//! | [`start`] | both: what the nursery is told at its start |
//! | [`token`], [`tree`] | both: who descends from whom |
//! | [`cleaner`] | both: who is ended last |

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
