//! A file descriptor that wakes a poll loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// A file descriptor that [`Self::set`] makes readable. It stays readable until [`Self::clear`] is called.
#[derive(Debug)]
pub struct Wake(EventFd);

impl Wake {
    /// Creates a descriptor that is not readable yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    /// Wakes the waiting poll loop. Never blocks.
    pub fn set(&self) {
        // Ignore EAGAIN. It means that the counter is full, so the descriptor is already readable.
        let _ = self.0.write(1);
    }

    /// Resets the descriptor, so that it is no longer readable. Never blocks.
    pub fn clear(&self) {
        // Ignore EAGAIN. It means that the descriptor was not readable.
        let _ = self.0.read();
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
