//! Descriptors that are known by their number only, because Python holds them.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// A descriptor of our own for the same open file, close-on-exec.
///
/// # Errors
/// `EBADF`: nothing is open under that number. `EMFILE`: no number is left.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only; a number that is not open is an error.
    let own = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}
