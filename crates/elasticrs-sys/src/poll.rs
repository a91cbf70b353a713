//! Calls `poll` on descriptors that other code owns.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Reason why [`poll_readable`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polled {
    /// The descriptor at this index is readable, has hung up, or is closed.
    Ready(usize),
    TimedOut,
    /// A signal handler has run.
    Interrupted,
}

/// Waits until one of `fds` is readable. If several are, returns the first of them.
///
/// The descriptors are plain numbers, because Python owns them and may close them at any time. A closed
/// descriptor is reported as ready, so that its owner gets the error when using it.
///
/// # Errors
/// Any error from `ppoll` except `EINTR`.
pub fn poll_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<Polled> {
    let mut entries: Vec<libc::pollfd> =
        fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let spec = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
    });
    let spec_ptr = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `entries` and `spec` outlive the call, and the count is the length of `entries`. A null mask leaves the
    // signal mask unchanged.
    let n = unsafe { libc::ppoll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, spec_ptr, std::ptr::null()) };
    if n < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(Polled::Interrupted) } else { Err(error) };
    }
    Ok(entries.iter().position(|e| e.revents != 0).map_or(Polled::TimedOut, Polled::Ready))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_first_readable_descriptor_is_returned() {
        let (quiet, _quiet_writer) = io::pipe().unwrap();
        let (ready, mut writer) = io::pipe().unwrap();
        writer.write_all(b"x").unwrap();
        let fds = [quiet.as_raw_fd(), ready.as_raw_fd(), ready.as_raw_fd()];
        assert_eq!(poll_readable(&fds, None).unwrap(), Polled::Ready(1));
        assert_eq!(poll_readable(&fds[..1], Some(Duration::ZERO)).unwrap(), Polled::TimedOut);
    }

    #[test]
    fn a_closed_descriptor_counts_as_ready() {
        let (reader, _writer) = io::pipe().unwrap();
        let number = reader.as_raw_fd();
        drop(reader);
        assert_eq!(poll_readable(&[number], None).unwrap(), Polled::Ready(0));
    }
}
