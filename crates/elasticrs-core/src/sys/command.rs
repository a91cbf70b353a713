//! Helper programs of this process.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid};

/// Kills the child when the thread that starts it ends, which includes the death of this process. Signals that the
/// thread blocks are not blocked in the child.
pub fn die_with_thread(command: &mut Command) -> &mut Command {
    let parent = getpid();
    let arm = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        SigSet::empty().thread_set_mask()?;
        // The parent may have died before the signal was armed; then it would never come.
        if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
    };
    // SAFETY: the child makes three system calls, and allocates nothing.
    unsafe { command.pre_exec(arm) }
}
