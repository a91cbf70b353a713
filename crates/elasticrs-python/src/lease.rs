//! What holds the agent's lease while the agent itself cannot: its nursery.

use std::os::fd::BorrowedFd;

use elasticrs_core::supervisor::Keeper;
use elasticrs_store::coordination::guard::{Guard, NoGuard};
use pyo3::prelude::*;

use crate::supervisor::Supervisor;

/// Passes on to the nursery what a client of the store says of its session.
struct Nursery(Keeper);

impl Guard for Nursery {
    fn connected(&self, socket: BorrowedFd<'_>) {
        // Without a descriptor the connection ends with this process, and the nursery still has the deadline.
        if let Ok(duplicate) = socket.try_clone_to_owned() {
            self.0.guard(Some(duplicate));
        }
    }

    fn deadline(&self, boot_ns: u64) {
        // A deadline that had passed is told as `Fenced`.
        let _ = self.0.fence(Some(boot_ns));
    }

    fn closed(&self) {
        self.0.guard(None);
        let _ = self.0.fence(None);
    }
}

/// The guard of a client that runs on a supervisor's thread, or of one that stands alone.
pub fn guard(supervisor: Option<&Py<Supervisor>>) -> Box<dyn Guard> {
    match supervisor {
        Some(supervisor) => Box::new(Nursery(supervisor.get().inner.keeper())),
        None => Box::new(NoGuard),
    }
}
