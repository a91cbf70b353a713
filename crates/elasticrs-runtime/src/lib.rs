//! What our threads have in common, in a process that belongs to somebody else.
//!
//! [`threads`] starts them, [`runtime`] runs futures on one, [`blocking`] makes blocking calls for those, and [`wake`] wakes
//! threads that wait. [`listen`] and [`door`] let clients in, [`stream`] moves their bytes, and [`notices`] carry lines to the
//! user. Without the feature `agent` only [`clock`] and [`named_enum`] are built.

#[cfg(feature = "agent")]
pub mod blocking;
pub mod clock;
#[cfg(feature = "agent")]
pub mod door;
#[cfg(feature = "agent")]
pub mod listen;
mod named;
#[cfg(feature = "agent")]
pub mod notices;
#[cfg(feature = "agent")]
pub mod runtime;
#[cfg(feature = "agent")]
pub mod stream;
#[cfg(feature = "agent")]
pub mod threads;
#[cfg(feature = "agent")]
pub mod wake;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks plain data, which a panic elsewhere does not make wrong: every change under such a lock is a single step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
