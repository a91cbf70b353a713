//! Timers that were created by another process.

use std::os::fd::OwnedFd;

use nix::sys::timerfd::TimerFd;

/// Converts a received descriptor to a timer. Fails with `EINVAL` if the descriptor is not a timer.
pub fn from_descriptor(fd: OwnedFd) -> nix::Result<TimerFd> {
    // SAFETY: the call below verifies that the descriptor is a timer before the value is used elsewhere.
    let timer = unsafe { TimerFd::from_owned_fd(fd) };
    timer.get()?;
    Ok(timer)
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_descriptor_that_is_not_a_timer_is_refused() {
        assert_eq!(from_descriptor(nix::unistd::pipe().unwrap().0).unwrap_err(), Errno::EINVAL);
    }
}
