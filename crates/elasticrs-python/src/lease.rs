//! Passes an agent's connections and lease deadline to the nursery, because the nursery outlives a killed agent.

use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use elasticrs_core::supervisor::Keeper;
use elasticrs_nursery::connections::Release;
use elasticrs_store::session::client::{Guard, NoGuard};
use pyo3::prelude::*;

use crate::supervisor::Supervisor;

/// Passes a session's connections and deadline to the nursery.
struct NurseryGuard {
    keeper: Keeper,
    /// True if the nursery holds a second connection, to which the session may move.
    has_two: Arc<AtomicBool>,
}

impl Guard for NurseryGuard {
    fn connected(&self, socket: BorrowedFd<'_>) {
        // The nursery (the process that supervises the workers) keeps a duplicate of the socket open, so that the
        // session lasts until the workers are dead. If the socket cannot be duplicated, the supervisor reports the
        // error to the user. The nursery still kills the workers at the lease's deadline.
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
        // The nursery uses a duplicate of the socket to announce this agent's death to the peer. If the socket cannot
        // be duplicated, the supervisor reports an error, and the peer waits until the lease expires.
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

/// Returns a guard that lets the nursery keep a client's socket open. Without a supervisor, returns [`NoGuard`].
pub(crate) fn guard(supervisor: Option<&Py<Supervisor>>) -> Box<dyn Guard> {
    match supervisor {
        Some(supervisor) => Box::new(NurseryGuard { keeper: supervisor.get().inner.keeper(), has_two: Arc::default() }),
        None => Box::new(NoGuard),
    }
}
