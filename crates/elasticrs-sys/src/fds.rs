//! Functions for file descriptors. They take over inherited descriptors, close unwanted descriptors, duplicate
//! descriptors that Python code owns, wait for them, and create memory files.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

/// The flag `MFD_EXEC` (Linux 6.3), which requests an executable memory file. Without the flag, the kernel setting
/// `vm.memfd_noexec` can make the file non-executable.
const MFD_EXEC: libc::c_uint = 0x10;

/// The file descriptors with which this process was started. There is at most one such value in a process, so no
/// descriptor is taken or closed twice.
#[derive(Debug)]
pub struct Inherited(());

impl Inherited {
    /// Claims the inherited descriptors of this process. Fails with `EALREADY` on a second call.
    ///
    /// Call this before the process opens further descriptors, because inherited descriptors cannot be told from
    /// others.
    pub fn claim() -> nix::Result<Self> {
        static CLAIMED: AtomicBool = AtomicBool::new(false);
        if CLAIMED.swap(true, Ordering::Relaxed) { Err(Errno::EALREADY) } else { Ok(Self(())) }
    }

    /// Takes ownership of the descriptors with these numbers, and makes them close-on-exec. With `closes_others`, also
    /// closes all descriptors with higher numbers. Does so with `close_range` (Linux 5.9). If that fails, closes the
    /// descriptors that are listed in `/proc/self/fd` one at a time.
    ///
    /// # Errors
    /// `EBADF` if a descriptor is not open. `EINVAL` if a number is given twice.
    pub fn take<const N: usize>(self, numbers: [RawFd; N], closes_others: bool) -> io::Result<[OwnedFd; N]> {
        if (1..N).any(|at| numbers[..at].contains(&numbers[at])) {
            return Err(Errno::EINVAL.into());
        }
        for number in numbers {
            // SAFETY: `F_SETFD` does not close the descriptor. If the number is not open, the call fails with EBADF.
            Errno::result(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
        }
        // SAFETY: all descriptors are open, and the numbers differ. `self`, the only owner of the inherited
        // descriptors, is consumed here.
        let taken = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) });
        if closes_others {
            close_from(numbers.into_iter().fold(2, RawFd::max) + 1)?;
        }
        Ok(taken)
    }
}

/// Closes the descriptors from `first` upwards. Only the owner of the inherited descriptors calls this function.
fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: the call takes only integers, and the caller owns the descriptors that it closes.
    if unsafe { libc::syscall(libc::SYS_close_range, first.cast_unsigned(), u32::MAX, 0) } == 0 {
        return Ok(());
    }
    let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&fd| fd >= first)
        .collect();
    for fd in open {
        // SAFETY: the caller owns the descriptor. The list also contains the descriptor through which `/proc/self/fd`
        // was read. It is already closed, so closing it again only fails with EBADF.
        unsafe { libc::close(fd) };
    }
    Ok(())
}

/// Returns a close-on-exec duplicate of the file descriptor `number`, which other code of this process may own.
///
/// # Errors
/// `EBADF` if the descriptor is not open. `EMFILE` if no descriptor number is available.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes only integers, and returns an error if the descriptor is not open.
    let own = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created, so no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// Creates a memory file that contains `content`. The file is sealed, close-on-exec and executable.
pub fn executable_memory_file(name: &CStr, content: &[u8]) -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = match memfd_create(name, flags | MFdFlags::from_bits_retain(MFD_EXEC)) {
        // Linux before 6.3 does not know `MFD_EXEC`, but makes every memory file executable.
        Err(Errno::EINVAL) => memfd_create(name, flags)?,
        other => other?,
    };
    if fstat(&fd)?.st_mode & 0o100 == 0 {
        return Err(Errno::EACCES.into());
    }
    let mut file = File::from(fd);
    file.write_all(content)?;
    let seals = SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file.into())
}

/// Reason for which [`poll_readable`] has returned.
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
