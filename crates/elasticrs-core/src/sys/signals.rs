//! Signals by number, the real-time ones included, which nix's type leaves out.

use nix::errno::Errno;
use nix::sys::signal::{SigHandler, Signal, signal};

/// Gives a signal its default disposition.
pub fn set_default(number: Signal) -> nix::Result<()> {
    // SAFETY: the default disposition runs no code of ours.
    unsafe { signal(number, SigHandler::SigDfl) }.map(drop)
}

/// Signals the process group of an unreaped child that leads it.
pub fn kill_group(leader: i32, signal: i32) -> nix::Result<()> {
    // SAFETY: integers only.
    Errno::result(unsafe { libc::kill(-leader, signal) }).map(drop)
}
