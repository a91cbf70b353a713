//! Raises the agent's soft limit on file descriptors, and keeps the previous limit for its workers.

use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// This process's soft limit on file descriptors before [`raise`] raised it. 0 if the limit was not raised.
static GIVEN: AtomicU64 = AtomicU64::new(0);

/// Raises this process's soft limit on file descriptors to the hard limit if permitted. Returns the resulting soft
/// limit.
///
/// Call this only in a process that runs no other application code, because code that uses `select` breaks with
/// descriptors above 1023. Nurseries that are started later, and their workers, still get the previous limit.
pub fn raise() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    // Keep the soft limit if setting it fails, which happens if `fs.nr_open` was lowered below the hard limit.
    if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        let _ = GIVEN.compare_exchange(0, soft, Ordering::Relaxed, Ordering::Relaxed);
        return hard;
    }
    soft
}

/// Returns the soft limit on file descriptors as it was before [`raise`] raised it. `None` if the limit was not raised.
pub fn given() -> Option<u64> {
    Some(GIVEN.load(Ordering::Relaxed)).filter(|&soft| soft != 0)
}
