//! Building blocks for this library's threads, which run inside the user's process.
//!
//! [`threads`] starts and wakes threads, [`runtime`] runs futures on a thread, and [`blocking`] makes blocking calls
//! for futures. [`listen`] and [`door`] accept clients, and [`notices`] delivers messages to the user. [`readiness`]
//! registers other file descriptors with the async runtime. [`readings`] has the values that the health check server
//! shows.

#![deny(unsafe_code)]

pub mod blocking;
pub mod door;
pub mod listen;
pub mod notices;
#[expect(unsafe_code, reason = "the one place for it; every block carries its SAFETY")]
pub mod readiness;
pub mod readings;
pub mod runtime;
pub mod threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex and ignores poisoning. Use it only for plain data that is always changed in a single step, because a
/// panic then leaves the data consistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
