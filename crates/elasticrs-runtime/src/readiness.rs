//! Registers file descriptors with the async runtime.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

/// A type that owns one file descriptor.
///
/// # Safety
/// `as_raw_fd` must return the same open descriptor for as long as the value lives.
pub unsafe trait OwnsDescriptor: AsRawFd {}

// SAFETY: an `OwnedFd` keeps its descriptor open until it is dropped, and its descriptor number never changes.
unsafe impl OwnsDescriptor for OwnedFd {}
// SAFETY: as for `OwnedFd`. The reference count keeps the descriptor open.
unsafe impl OwnsDescriptor for Arc<OwnedFd> {}

/// Registers a file descriptor with the current runtime.
///
/// # Errors
///
/// Fails if epoll does not support the descriptor, or if the user's limit on epoll watches is reached.
pub fn register<T: OwnsDescriptor>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: `OwnsDescriptor` guarantees that the descriptor stays open and does not change, as this call requires.
    unsafe { AsyncFd::register_with_interest(inner, interest) }.map_err(io::Error::from)
}

/// A value that does I/O on its own file descriptor, and the registration of that descriptor with the runtime.
#[derive(Debug)]
pub struct Registered<T> {
    /// Registered duplicate of the descriptor of `inner`. Both descriptors have the same readiness, because they refer
    /// to the same open file.
    ///
    /// The duplicate is needed, because a registered descriptor must stay the same, and `inner` may replace its own.
    readiness: AsyncFd<OwnedFd>,
    inner: T,
}

impl<T: AsFd> Registered<T> {
    /// Registers the descriptor of `inner` with the current runtime.
    ///
    /// # Errors
    ///
    /// Fails as [`register`] does, or if this process has reached its limit on file descriptors.
    pub fn new(inner: T, interest: Interest) -> io::Result<Self> {
        Ok(Self { readiness: register(inner.as_fd().try_clone_to_owned()?, interest)?, inner })
    }
}

impl<T> Registered<T> {
    /// Returns a reference to the value.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// Returns a mutable reference to the value.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Waits until the descriptor is readable. See [`AsyncFd::readable`].
    pub async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, OwnedFd>> {
        self.readiness.readable().await
    }

    /// Waits until the descriptor is writable. See [`AsyncFd::writable`].
    pub async fn writable(&self) -> io::Result<AsyncFdReadyGuard<'_, OwnedFd>> {
        self.readiness.writable().await
    }
}
