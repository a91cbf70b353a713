//! What a server has to tell the user, one line each.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// So many are kept for a user who does not ask.
const KEPT: usize = 256;

/// A bounded list, and a descriptor that is readable while it is not empty.
#[derive(Debug)]
pub struct Notices {
    lines: Mutex<(VecDeque<String>, u64)>,
    wake: EventFd,
}

impl Notices {
    /// An empty list.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { lines: Mutex::default(), wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)? })
    }

    /// Adds a line; beyond the limit they are only counted.
    pub fn add(&self, line: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.0.len() < KEPT {
            lines.0.push_back(line);
        } else {
            lines.1 += 1;
        }
        // EAGAIN would mean that the descriptor is readable.
        let _ = self.wake.write(1);
    }

    /// All lines; never blocks.
    pub fn take(&self) -> Vec<String> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        // EAGAIN: there is nothing.
        let _ = self.wake.read();
        let (mut taken, more) = std::mem::take(&mut *lines);
        if more > 0 {
            taken.push_back(format!("{more} more notices were dropped"));
        }
        taken.into()
    }

    /// Readable while [`Self::take`] has something.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
