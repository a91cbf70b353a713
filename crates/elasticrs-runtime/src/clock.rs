//! The kernel's clocks, comparable between the processes of one machine.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds on `CLOCK_MONOTONIC`; the same clock as Python's `time.monotonic_ns`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp(pub u64);

impl Stamp {
    /// The current time.
    pub fn now() -> Self {
        Self(read(ClockId::CLOCK_MONOTONIC))
    }
}

/// Nanoseconds on `CLOCK_BOOTTIME`, which goes on while the machine is suspended and which nobody can set.
pub fn boot_now() -> u64 {
    read(ClockId::CLOCK_BOOTTIME)
}

/// Nanoseconds since 1970; a wall clock before that is as good as none.
pub fn wall_now() -> u64 {
    read(ClockId::CLOCK_REALTIME)
}

/// A span in what these clocks count; one of centuries is the longest that there is.
pub fn nanoseconds(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).expect("every Linux of the last ten years has these clocks");
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0)
}
