//! Nice values (scheduling priorities) of threads and processes.

use std::ffi::CStr;

use nix::errno::Errno;

/// Nice value with the lowest priority, for processes that should only use spare CPU time.
pub const BACKGROUND: i32 = 19;
/// [`BACKGROUND`] in decimal.
pub const BACKGROUND_TEXT: &CStr = c"19";

/// Sets the nice value of the calling thread and returns the previous value. The error is `EACCES` if this process is
/// not permitted to lower the value (`CAP_SYS_NICE`, `RLIMIT_NICE`).
pub fn set_nice(value: i32) -> nix::Result<i32> {
    // This call cannot fail for the calling thread, so a result of −1 is a nice value and not an error.
    // SAFETY: the call takes only integers.
    let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    set_nice_of(0, value)?;
    Ok(before)
}

/// Sets the nice value of the main thread of a process.
pub fn set_nice_of(pid: i32, value: i32) -> nix::Result<()> {
    // SAFETY: the call takes only integers.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, pid.cast_unsigned(), value) }).map(drop)
}

/// Returns the nice value of this process if the process is permitted to raise the value and then restore it. `None` if
/// it is not permitted to lower the value again.
///
/// To find out, raises and restores the nice value of a short-lived thread, because each thread has its own nice value.
/// Checking `CAP_SYS_NICE` and `RLIMIT_NICE` would not be enough, because the capability has no effect in a user
/// namespace.
pub fn restorable() -> Option<i32> {
    let attempt = || {
        // SAFETY: the call takes only integers.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        // Raise the nice value by only 1, because a thread with the lowest priority might not run again for a long
        // time.
        set_nice(before + 1).ok()?;
        set_nice(before).ok().map(|_| before)
    };
    std::thread::Builder::new().spawn(attempt).ok()?.join().ok()?
}
