//! Registers file descriptors with the async runtime.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::nursery::link::AgentLink;

/// Type that owns one file descriptor.
///
/// # Safety
/// `as_raw_fd` must return the same open descriptor for as long as the value lives.
pub unsafe trait OwnsDescriptor: AsRawFd {}

// SAFETY: an owned descriptor is open until it is dropped, and cannot be replaced.
unsafe impl OwnsDescriptor for OwnedFd {}
// SAFETY: as above. The reference count keeps the descriptor open.
unsafe impl OwnsDescriptor for Arc<OwnedFd> {}
// SAFETY: the link owns its socket and never replaces it.
unsafe impl OwnsDescriptor for AgentLink {}

/// Registers a file descriptor with the current runtime.
///
/// # Errors
/// Epoll does not support the descriptor, or the user's limit on epoll watches is reached.
pub fn register<T: OwnsDescriptor>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: `OwnsDescriptor` guarantees the requirements of this call.
    unsafe { AsyncFd::register_with_interest(inner, interest) }.map_err(io::Error::from)
}
