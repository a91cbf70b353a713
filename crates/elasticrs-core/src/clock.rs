//! Stamps on the kernel's monotonic clock, comparable between the processes of one machine.

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds on `CLOCK_MONOTONIC`; the same clock as Python's `time.monotonic_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp(pub u64);

impl Stamp {
    /// The current time.
    ///
    /// # Panics
    /// Never on Linux: the clock always exists, and its value is positive.
    pub fn now() -> Self {
        let t = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC exists on every Linux");
        let secs = u64::try_from(t.tv_sec()).expect("the monotonic clock starts at boot");
        let nanos = u64::try_from(t.tv_nsec()).expect("nanoseconds are not negative");
        Self(secs * 1_000_000_000 + nanos)
    }
}
