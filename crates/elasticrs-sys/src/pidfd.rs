//! Pidfds: file descriptors that refer to processes.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// Opens a close-on-exec pidfd for the process with this pid (Linux 5.3).
///
/// The caller must make sure that the pid still belongs to the intended process. This is the case for an unreaped
/// child of the caller. For any other process, the caller must verify the process afterwards.
pub fn open(pid: i32) -> nix::Result<OwnedFd> {
    // SAFETY: the call takes two integers and touches no memory.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = i32::try_from(fd).map_err(|_| Errno::EBADF)?;
    // SAFETY: the descriptor was just created, so no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to the process (Linux 5.1). The error is `ESRCH` if the process was reaped.
pub fn send_signal(pidfd: impl AsFd, signal: i32) -> nix::Result<()> {
    send(pidfd, signal, 0)
}

/// Sends a signal to the process group that the process leads (Linux 6.9), even after the leader was reaped.
pub fn send_group_signal(pidfd: impl AsFd, signal: i32) -> nix::Result<()> {
    send(pidfd, signal, libc::PIDFD_SIGNAL_PROCESS_GROUP)
}

fn send(pidfd: impl AsFd, signal: i32, flags: libc::c_uint) -> nix::Result<()> {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a null `siginfo` is allowed. The kernel then sends the same information as for `kill`.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_fd().as_raw_fd(), signal, info, flags) };
    Errno::result(sent).map(drop)
}

pub(super) fn has_group_signal() -> bool {
    let probe = || send_group_signal(open(nix::unistd::getpid().as_raw())?, 0);
    // Treat EINVAL as missing support, because older kernels reject the flag before they check anything else.
    !matches!(probe(), Err(Errno::EINVAL | Errno::ENOSYS))
}
