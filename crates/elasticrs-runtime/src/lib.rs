//! Code for this library's threads, which run inside the user's process.
//!
//! [`threads`] starts threads, [`runtime`] runs futures on a thread, [`blocking`] makes blocking calls for futures, and
//! [`wake`] wakes waiting threads. [`listen`] and [`door`] accept clients, [`stream`] transfers their bytes, and
//! [`notices`] delivers messages to the user. Without the feature `agent`, only [`clock`] and [`named_enum`] are built.

#![deny(unsafe_code)]

#[cfg(feature = "agent")]
pub mod blocking;
#[cfg(feature = "agent")]
pub mod door;
#[cfg(feature = "agent")]
pub mod listen;
mod named;
#[cfg(feature = "agent")]
pub mod notices;
#[cfg(feature = "agent")]
#[expect(unsafe_code, reason = "the one place for it; every block carries its SAFETY")]
pub mod readiness;
#[cfg(feature = "agent")]
pub mod runtime;
#[cfg(feature = "agent")]
pub mod stream;
#[cfg(feature = "agent")]
pub mod threads;
#[cfg(feature = "agent")]
pub mod wake;

pub use elasticrs_sys::clock;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex and ignores poisoning. Use it only for plain data that is always changed in a single step, because a
/// panic cannot leave such data inconsistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
