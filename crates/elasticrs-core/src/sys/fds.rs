//! Descriptors: taking over inherited ones, closing the rest, memory files.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

/// `MFD_EXEC` of Linux 6.3; there a memory file without it may be refused or made non-executable by `vm.memfd_noexec`.
const MFD_EXEC: libc::c_uint = 0x10;

/// Takes over the descriptors that this process was started with under agreed numbers, close-on-exec from now on.
///
/// Possible once in a process, before anything else opens descriptors: `EBADF` when one is not open, `EALREADY` the
/// second time.
pub fn take_inherited<const N: usize>(numbers: [RawFd; N]) -> nix::Result<[OwnedFd; N]> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Errno::EALREADY);
    }
    for number in numbers {
        // SAFETY: `F_SETFD` does not close the descriptor. A number that is not open gives EBADF.
        Errno::result(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    }
    // SAFETY: all are open, and by the guard and the contract above nothing in this process owns them yet.
    Ok(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) }))
}

/// Closes every descriptor from `first` on: `close_range` (Linux 5.9), or one by one from `/proc/self/fd`.
///
/// For a process that has just been started and owns none of them.
pub fn close_from(first: RawFd) -> io::Result<()> {
    if close_range(first.cast_unsigned(), 0).is_ok() {
        return Ok(());
    }
    let open: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&fd| fd >= first)
        .collect();
    for fd in open {
        // SAFETY: by the contract above, no code owns the descriptor. The descriptor of the listing is closed already,
        // so closing it again gives EBADF.
        unsafe { libc::close(fd) };
    }
    Ok(())
}

fn close_range(first: u32, flags: u32) -> nix::Result<()> {
    // SAFETY: integers only. What it closes is the caller's responsibility, see `close_from`.
    Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, flags) }).map(drop)
}

pub(super) fn has_close_range() -> bool {
    // No descriptor has this number, so nothing is closed.
    close_range(u32::MAX, 0).is_ok()
}

/// A sealed, close-on-exec memory file with this content that may be executed.
pub fn executable_memory_file(name: &CStr, content: &[u8]) -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = match memfd_create(name, flags | MFdFlags::from_bits_retain(MFD_EXEC)) {
        // Before Linux 6.3 the flag is unknown, and every memory file is executable.
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
