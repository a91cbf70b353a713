//! The nice value of this process.

use nix::errno::Errno;

/// Sets it, and returns the one before. `EACCES` without the permission to lower it (`CAP_SYS_NICE`, `RLIMIT_NICE`).
pub fn set_nice(value: i32) -> nix::Result<i32> {
    // −1 is a value here, not an error; there is no error for this process's own value.
    // SAFETY: integers only.
    let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // SAFETY: integers only.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, value) })?;
    Ok(before)
}
