//! The kernel's clocks, comparable between the processes of one machine.

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds on `CLOCK_MONOTONIC`; the same clock as Python's `time.monotonic_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp(pub u64);

impl Stamp {
    /// The current time.
    pub fn now() -> Self {
        Self(nanoseconds(ClockId::CLOCK_MONOTONIC))
    }
}

/// Nanoseconds on `CLOCK_BOOTTIME`, which goes on while the machine is suspended.
pub fn boot_now() -> u64 {
    nanoseconds(ClockId::CLOCK_BOOTTIME)
}

/// Of a clock that starts at boot. Both exist on every Linux that is supported.
fn nanoseconds(clock: ClockId) -> u64 {
    let t = clock_gettime(clock).expect("the clock exists on every Linux");
    let secs = u64::try_from(t.tv_sec()).expect("the clock starts at boot");
    let nanos = u64::try_from(t.tv_nsec()).expect("nanoseconds are not negative");
    secs * 1_000_000_000 + nanos
}
