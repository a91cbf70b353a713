//! Nice values (scheduling priorities) of threads.

use nix::errno::Errno;

/// Sets the nice value of the calling thread and returns the previous value. The error is `EACCES` if this process is
/// not permitted to lower the value (`CAP_SYS_NICE`, `RLIMIT_NICE`).
pub fn set_nice(value: i32) -> nix::Result<i32> {
    // This call cannot fail for the calling thread, so a result of −1 is a nice value and not an error.
    // SAFETY: the call takes only integers.
    let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // SAFETY: the call takes only integers.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, value) })?;
    Ok(before)
}
