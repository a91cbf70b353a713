//! Signal functions that nix lacks, or that do not work for real-time signals because nix's `Signal` type excludes
//! them.

use std::ptr;

use nix::errno::Errno;
use nix::sys::signal::{SigHandler, Signal, signal};

/// Resets a signal to its default disposition.
pub fn set_default(number: Signal) -> nix::Result<()> {
    // SAFETY: the default disposition runs no code of this process.
    unsafe { signal(number, SigHandler::SigDfl) }.map(drop)
}

/// Makes each of the two signals block the other while its handler runs, so that the handlers run in the order of the
/// signals.
pub fn take_turns(one: Signal, other: Signal) -> nix::Result<()> {
    for (number, waits) in [(one as i32, other as i32), (other as i32, one as i32)] {
        // SAFETY: the struct consists of integers and an optional handler, for which zero is a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: each pointer is null or points to a live local variable. The handler is the one that was installed
        // before.
        Errno::result(unsafe { libc::sigaction(number, ptr::null(), &raw mut action) })?;
        // SAFETY: as above. The signal number is valid.
        Errno::result(unsafe { libc::sigaddset(&raw mut action.sa_mask, waits) })?;
        // SAFETY: as above.
        Errno::result(unsafe { libc::sigaction(number, &raw const action, ptr::null_mut()) })?;
    }
    Ok(())
}

/// Sends a signal to a process group whose leader is an unreaped child of this process.
pub fn kill_group(leader: i32, signal: i32) -> nix::Result<()> {
    // SAFETY: the call takes only integers.
    Errno::result(unsafe { libc::kill(-leader, signal) }).map(drop)
}
