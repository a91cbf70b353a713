//! Timers that another process has made.

use std::os::fd::OwnedFd;

use nix::sys::timerfd::TimerFd;

/// The timer behind a descriptor that was received. `EINVAL` when it is none.
pub fn from_descriptor(fd: OwnedFd) -> nix::Result<TimerFd> {
    // SAFETY: the call below checks what is asked for, before anybody else gets it.
    let timer = unsafe { TimerFd::from_owned_fd(fd) };
    timer.get()?;
    Ok(timer)
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn what_is_no_timer_is_refused() {
        assert_eq!(from_descriptor(nix::unistd::pipe().unwrap().0).unwrap_err(), Errno::EINVAL);
    }
}
