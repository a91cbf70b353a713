//! Creating a process that goes on where its parent is, instead of executing a program.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{ForkResult, Pid};

use super::spawn::{Child, Failure};
use super::stage::Stage;
use super::{pidfd, wait};

/// Forks this process, which has one thread, with all that its language and libraries want done at a fork. The result is
/// that of `fork`.
pub type Forker = Box<dyn FnMut() -> nix::Result<i32>>;

/// `fork` alone, for a program in Rust that has one thread.
pub fn plain() -> nix::Result<i32> {
    // SAFETY: with one thread the child may do whatever its parent may.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Child => Ok(0),
        ForkResult::Parent { child } => Ok(child.as_raw()),
    }
}

/// Who returns.
pub enum Forked {
    /// The parent, when the child runs: see [`Outlet::close`].
    Parent(Child),
    /// The child.
    Child(Outlet),
}

/// Where the child tells that it has settled, or that it cannot begin. Until then the parent stands still.
#[derive(Debug)]
pub struct Outlet(OwnedFd);

/// What goes through it: the stage, the descriptor, and the error's number.
const TOLD: usize = 6;

/// The same from one that has settled.
const SETTLED: [u8; 1] = [0];

impl Outlet {
    /// Out of the way of descriptors with these numbers.
    pub fn above(&self, floor: RawFd) -> nix::Result<Self> {
        let moved = fcntl(&self.0, FcntlArg::F_DUPFD_CLOEXEC(floor))?;
        // SAFETY: just made, and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(moved) }))
    }

    /// It runs.
    pub fn close(self) {
        // A parent that is gone does not ask.
        let _ = File::from(self.0).write_all(&SETTLED);
    }

    /// It does not, and ends.
    pub fn fail(self, failure: Failure) -> ! {
        let Failure { stage, errno, descriptor } = failure;
        let mut told = [stage as u8, u8::try_from(descriptor).unwrap_or(0), 0, 0, 0, 0];
        told[2..].copy_from_slice(&(errno as i32).to_ne_bytes());
        // A parent that is gone does not ask.
        let _ = File::from(self.0).write_all(&told);
        // SAFETY: nothing of the parent's is to run here: no handlers of its end, no destructors.
        unsafe { libc::_exit(127) }
    }
}

/// Forks. The parent returns when the child has settled or ended; both have the mask of signals of before.
pub fn fork(forker: &mut Forker) -> Result<Forked, Failure> {
    let failed = |errno| Failure { stage: Stage::Clone, errno, descriptor: 0 };
    let (told, outlet) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(failed)?;
    let pid = forker().map_err(failed)?;
    if pid == 0 {
        drop(told);
        return Ok(Forked::Child(Outlet(outlet)));
    }
    drop(outlet);
    let pidfd = pidfd::open(pid).map_err(|errno| {
        // It cannot have gone: only we reap it.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        wait::reap(pid);
        failed(errno)
    })?;
    let mut bytes = Vec::with_capacity(TOLD);
    let _ = File::from(told).take(TOLD as u64).read_to_end(&mut bytes);
    match *bytes.as_slice() {
        [stage, descriptor, ref errno @ ..] if errno.len() == 4 => {
            wait::reap(pid);
            let errno = Errno::from_raw(i32::from_ne_bytes([errno[0], errno[1], errno[2], errno[3]]));
            let stage = Stage::from_byte(stage).unwrap_or(Stage::Clone);
            Err(Failure { stage, errno, descriptor: descriptor.into() })
        }
        _ if *bytes == SETTLED => Ok(Forked::Parent(Child { pid, pidfd })),
        _ => {
            // It has ended in what a library does at a fork. Its exit code may be that of a worker that succeeds.
            wait::reap(pid);
            Err(failed(Errno::ECHILD))
        }
    }
}
