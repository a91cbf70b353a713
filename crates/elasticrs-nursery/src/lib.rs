//! The nursery: a small process between the agent and its workers. It makes sure that no process of a job outlives the
//! job.
//!
//! ```text
//! agent ──(socket: requests, replies, descriptors)── nursery ── worker 0 … worker N-1 ── their descendants
//! ```
//!
//! The nursery is single-threaded, the parent of all workers, and a child subreaper. Orphaned descendants of a worker
//! therefore become children of the nursery, and the error `ECHILD` from `wait4` proves that no descendant is left. The
//! nursery watches the agent through a pidfd. When the agent dies, the nursery kills all of its own descendants and
//! exits.
//!
//! Invariants:
//!
//! 1. The kernel kills the workers when the nursery dies (`PR_SET_PDEATHSIG`). The nursery kills all of its descendants
//!    when the agent dies.
//! 2. Only the nursery reaps workers, so the pid of a worker that it has not reaped is not reused.
//! 3. The exit of each worker is reported exactly once, after its `Spawned` message.
//! 4. If the result of a sweep of all descendants lists no `stuck`, `spared` or `held` processes, the nursery had no
//!    children left when the sweep finished (`ECHILD`).
//! 5. An idle nursery does not wake up, except when the timer of the fence expires, which happens about once per lease.
//! 6. The nursery reaps and kills processes even if the agent has stopped reading from its socket.
//! 7. After the agent has died, the nursery closes the connections that it holds for the agent only when all workers
//!    and their descendants, except cleaners, have exited.
//! 8. No worker runs past the fence deadline, even if the agent is stopped or dead.
//!
//! | module | users and purpose |
//! | --- | --- |
//! | [`protocol`] | agent and nursery: exchange messages and descriptors |
//! | [`server`] | nursery: its main program |
//! | [`launch`] | agent: starts a nursery |
//! | [`report`] | agent: finds the imported module that killed a nursery |
//! | [`sweep`] | agent and sentinel: kills the leftover processes of a dead nursery |
//! | [`held`] | agent and nursery: describes exited processes that a tracer holds |
//! | [`connections`] | agent and nursery: connections that keep the agent's session with its store open |
//! | [`fence`] | agent and nursery: the deadline that they share |
//! | [`activity`] | nursery and sentinel: shows whether the nursery is starting workers |
//! | [`start`] | agent and nursery: the command-line argument of the nursery, and the limit on file descriptors |
//! | [`spec`] | agent and nursery: the description of a process to start |
//! | [`token`], [`tree`] | agent and nursery: find descendants |
//! | [`cleaner`] | agent and nursery: recognises processes that are killed last |
//!
//! The program `worker-nursery` (`main.rs`) consists only of this crate and `elasticrs-sys`. Neither depends on an
//! async runtime or starts a thread, so the program is small. The agent uses the same crate as a library, and a warm
//! nursery calls [`server::run_warm`] in the extension module.
#![forbid(unsafe_code)]

pub mod activity;
pub mod cleaner;
pub mod connections;
pub mod fence;
pub mod held;
pub mod launch;
pub mod protocol;
pub mod report;
pub mod server;
pub mod spec;
pub mod start;
pub mod sweep;
pub mod token;
pub mod tree;

/// Process name of the nursery. It does not contain the name of the agent, so that a command that kills the agent
/// by name spares the nursery.
pub const NAME: &std::ffi::CStr = c"worker-nursery";
