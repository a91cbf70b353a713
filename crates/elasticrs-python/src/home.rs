//! What the client of a store gets from the agent: a thread to run on, the place for its messages to the user, and the
//! nursery (the process that starts the workers) as the guard of its lease, because the nursery outlives a killed
//! agent.
//!
//! An agent's client runs on the supervisor's thread. Other clients share a thread with the agents' stores of this
//! process. The supervisor has its own thread, because a busy store could delay its signals and keep-alives.

use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use elasticrs_core::supervisor::Keeper;
use elasticrs_nursery::connections::Release;
use elasticrs_runtime::notices::{List, Tell};
use elasticrs_runtime::runtime::{Spawn, Task};
use elasticrs_store::session::client::{Guard, NoGuard};
use pyo3::prelude::*;

use crate::error::Error;
use crate::stores::{Entered, Of};
use crate::supervisor::Supervisor;

/// Thread on which a store client runs.
pub(crate) enum Home {
    Agent(Py<Supervisor>),
    Stores(Entered),
}

impl Home {
    /// Chooses the supervisor's thread, or the thread of the agents' stores if there is no supervisor.
    pub(crate) fn new(supervisor: Option<Py<Supervisor>>) -> PyResult<Self> {
        supervisor.map_or_else(|| Entered::new(Of::Agents).map(Self::Stores), |supervisor| Ok(Self::Agent(supervisor)))
    }

    /// Raises an exception in a forked child, because the thread belongs to the parent.
    pub(crate) fn check_owner(&self) -> PyResult<()> {
        match self {
            Self::Stores(stores) => stores.check_owner(),
            Self::Agent(supervisor) => Ok(supervisor.get().inner.check_owner().map_err(Error)?),
        }
    }

    /// Calls `end` to close a client. If the client's thread is not the supervisor's, then also releases that thread,
    /// and raises an exception in a forked child.
    pub(crate) fn close(&self, py: Python<'_>, end: impl FnOnce() + Send) -> PyResult<()> {
        match self {
            Self::Stores(stores) => stores.close(py, end),
            Self::Agent(_) => {
                py.detach(end);
                Ok(())
            }
        }
    }
}

impl Spawn for Home {
    fn spawn(&self, task: Task) -> bool {
        match self {
            Self::Agent(supervisor) => Spawn::spawn(&supervisor.get().inner, task),
            Self::Stores(stores) => stores.spawn(task),
        }
    }
}

/// Returns a function that delivers messages to the user. With a supervisor, the messages become events.
/// Otherwise, they are added to a list that the user fetches.
pub(crate) fn teller(supervisor: Option<&Py<Supervisor>>, list: &Arc<List>) -> Tell {
    if let Some(supervisor) = supervisor {
        return Box::new(supervisor.get().inner.teller());
    }
    let list = Arc::clone(list);
    Box::new(move |line| list.add(line))
}

/// Guard of a client's session in a store. It passes the session's connections, and the deadline of its lease, to the
/// nursery (the process that starts the workers).
struct NurseryGuard {
    keeper: Keeper,
    /// True if the nursery holds a second connection of the session, to which the session may move.
    has_two: Arc<AtomicBool>,
}

impl Guard for NurseryGuard {
    fn connected(&self, socket: BorrowedFd<'_>) {
        // Pass a duplicate of the connection's socket to the nursery (the process that starts the workers). If the agent
        // is killed, the session then lasts until the nursery has killed the workers. If the socket cannot be
        // duplicated, the supervisor reports the error to the user.
        self.keeper.hold(socket);
    }

    fn resuming(&self, socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        let (is_held, has_two) = (self.keeper.hold_beside(socket), Arc::clone(&self.has_two));
        Box::pin(async move { has_two.store(is_held.await, Ordering::Relaxed) })
    }

    fn resumed(&self, on_new: bool) {
        if self.has_two.swap(false, Ordering::Relaxed) {
            self.keeper.release(if on_new { Release::Older } else { Release::Newest });
        }
    }

    fn linked(&self, socket: BorrowedFd<'_>, word: [u8; 32], is_first: bool) {
        // If this agent dies, the nursery announces that to another agent (the peer) on a duplicate of this socket. If
        // the socket cannot be duplicated, the supervisor reports an error, and the peer notices the death only when
        // the lease of this agent expires.
        self.keeper.hold_link(socket, word, is_first);
    }

    fn says_words(&self) -> bool {
        true
    }

    fn deadline(&self, boot_ns: u64) {
        // Ignore the result, because a deadline that has already passed is reported by the event `Fenced`.
        let _ = self.keeper.fence(Some(boot_ns));
    }

    fn closed(&self) {
        self.keeper.release(Release::All);
        let _ = self.keeper.fence(None);
    }
}

/// Returns a guard that lets the nursery keep a client's socket open if this agent dies. Returns [`NoGuard`] without a
/// supervisor, because there is no nursery then.
pub(crate) fn guard(supervisor: Option<&Py<Supervisor>>) -> Box<dyn Guard> {
    match supervisor {
        Some(supervisor) => Box::new(NurseryGuard { keeper: supervisor.get().inner.keeper(), has_two: Arc::default() }),
        None => Box::new(NoGuard),
    }
}
