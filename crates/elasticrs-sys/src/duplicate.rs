//! Duplicates file descriptors that are owned by Python code, given only their numbers.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Returns a close-on-exec duplicate of the file descriptor `number`.
///
/// # Errors
/// `EBADF` if the descriptor is not open. `EMFILE` if no descriptor number is available.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes only integers, and returns an error if the descriptor is not open.
    let own = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created, so no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}
