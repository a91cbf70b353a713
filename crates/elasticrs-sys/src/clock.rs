//! The kernel's clocks, and timers that use them. All processes on a machine share these clocks, so times from
//! different processes can be compared.

use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::sys::timerfd::TimerFd;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A time in nanoseconds on `CLOCK_MONOTONIC`, which is also the clock of Python's `time.monotonic_ns`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp(pub u64);

impl Stamp {
    /// Returns the current time.
    pub fn now() -> Self {
        Self(read(ClockId::CLOCK_MONOTONIC))
    }
}

/// Returns the time in nanoseconds on `CLOCK_BOOTTIME`. This clock keeps running while the machine is suspended and
/// cannot be set.
pub fn boot_now() -> u64 {
    read(ClockId::CLOCK_BOOTTIME)
}

/// Returns the wall-clock time in nanoseconds since 1970. Returns 0 if the clock shows an earlier time.
pub fn wall_now() -> u64 {
    read(ClockId::CLOCK_REALTIME)
}

/// Converts a duration to nanoseconds. Durations of more than five centuries are capped at `u64::MAX`.
pub fn nanoseconds(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Converts a received descriptor to a timer. Fails with `EINVAL` if the descriptor is not a timer.
pub fn timer_of(fd: OwnedFd) -> nix::Result<TimerFd> {
    // SAFETY: the call below verifies that the descriptor is a timer before the value is used elsewhere.
    let timer = unsafe { TimerFd::from_owned_fd(fd) };
    timer.get()?;
    Ok(timer)
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).expect("every Linux of the last ten years has these clocks");
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_descriptor_that_is_not_a_timer_is_refused() {
        assert_eq!(timer_of(nix::unistd::pipe().unwrap().0).unwrap_err(), Errno::EINVAL);
    }
}
