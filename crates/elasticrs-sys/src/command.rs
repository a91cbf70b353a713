//! Settings for the helper programs that this process starts.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid};

/// Makes the kernel kill the child when this process dies or the thread that starts the child exits. Unblocks all
/// signals in the child.
pub fn die_with_thread(command: &mut Command) -> &mut Command {
    let parent = getpid();
    let arm = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        SigSet::empty().thread_set_mask()?;
        // Fail if the parent has already died, because the kernel would then never send the signal.
        if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
    };
    // SAFETY: before exec, the child makes only three system calls and does not allocate.
    unsafe { command.pre_exec(arm) }
}
