//! Creating a process that goes on where its parent is, instead of executing a program.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
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
    /// The parent, when the child runs.
    Parent(Settling),
    /// The child.
    Child(Outlet),
}

/// Where the child tells the stages that can block for ever, and that it has settled, or that it cannot begin.
#[derive(Debug)]
pub struct Outlet(OwnedFd);

/// What goes through it is the number of a stage, or one of these. Behind the second follow the stage, the descriptor, and the
/// error's number.
const SETTLED: u8 = 0;
const FAILED: u8 = u8::MAX;

impl Outlet {
    /// Moves it out of the way of descriptors with lower numbers.
    pub fn move_above(&mut self, floor: RawFd) -> nix::Result<()> {
        let moved = fcntl(&self.0, FcntlArg::F_DUPFD_CLOEXEC(floor))?;
        // SAFETY: just made, and nobody else knows it.
        self.0 = unsafe { OwnedFd::from_raw_fd(moved) };
        Ok(())
    }

    /// It runs.
    pub fn close(self) {
        // A parent that is gone does not ask.
        let _ = File::from(self.0).write_all(&[SETTLED]);
    }

    /// It does not, and ends.
    pub fn fail(self, failure: Failure) -> ! {
        let Failure { stage, errno, descriptor } = failure;
        let mut told = [FAILED, stage as u8, u8::try_from(descriptor).unwrap_or(0), 0, 0, 0, 0];
        told[3..].copy_from_slice(&(errno as i32).to_ne_bytes());
        // A parent that is gone does not ask.
        let _ = File::from(self.0).write_all(&told);
        // SAFETY: nothing of the parent's is to run here: no handlers of its end, no destructors.
        unsafe { libc::_exit(127) }
    }
}

impl AsFd for Outlet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A child that runs and has not settled yet.
#[derive(Debug)]
pub struct Settling {
    child: Child,
    told: File,
}

impl Settling {
    /// Waits until it has settled or ended; `announce` gets the number of each stage that can block for ever, before.
    /// If nobody needs it any more, it is killed: a process of `needed_by` has ended, or a connection was closed.
    pub fn wait(mut self, needed_by: [BorrowedFd<'_>; 2], mut announce: impl FnMut(u8)) -> Result<Child, Failure> {
        let mut failure = None;
        while self.has_told(needed_by) {
            let mut kind = [SETTLED];
            match self.told.read_exact(&mut kind) {
                Ok(()) if kind == [SETTLED] => return Ok(self.child),
                Ok(()) if kind != [FAILED] => announce(kind[0]),
                Ok(()) => {
                    let mut rest = [0; 6];
                    failure = self.told.read_exact(&mut rest).ok().map(|()| rest);
                    break;
                }
                Err(_) => break,
            }
        }
        wait::reap(self.child.pid);
        let Some([stage, descriptor, errno @ ..]) = failure else {
            // It has ended in what a library does at a fork. Its exit code may be that of a worker that succeeds.
            return Err(failed(Errno::ECHILD));
        };
        let stage = Stage::from_byte(stage).unwrap_or(Stage::Clone);
        Err(Failure { stage, errno: Errno::from_raw(i32::from_ne_bytes(errno)), descriptor: descriptor.into() })
    }

    /// Waits for something to read. False if the child has ended instead; a process that it has started may still hold
    /// the pipe.
    fn has_told(&self, [process, connection]: [BorrowedFd<'_>; 2]) -> bool {
        let mut polled = [
            PollFd::new(self.told.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.child.pidfd.as_fd(), PollFlags::POLLIN),
            PollFd::new(process, PollFlags::POLLIN),
            PollFd::new(connection, PollFlags::empty()),
        ];
        let mut is_needed = true;
        loop {
            let count = if is_needed { polled.len() } else { 2 };
            // The only error is EINTR, and all signals are blocked.
            let _ = poll(&mut polled[..count], PollTimeout::NONE);
            let [told, ended, ..] = polled.each_ref().map(|fd| fd.any().unwrap_or(true));
            if told || ended {
                return told;
            }
            is_needed = false;
            // The only error is ESRCH: it has ended, which is seen next.
            let _ = pidfd::send_signal(&self.child.pidfd, libc::SIGKILL);
        }
    }
}

fn failed(errno: Errno) -> Failure {
    Failure { stage: Stage::Clone, errno, descriptor: 0 }
}

/// Forks. Both have the mask of signals of before.
pub fn fork(forker: &mut Forker) -> Result<Forked, Failure> {
    let (told, outlet) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(failed)?;
    let pid = forker().map_err(failed)?;
    if pid == 0 {
        drop(told);
        return Ok(Forked::Child(Outlet(outlet)));
    }
    let pidfd = pidfd::open(pid).map_err(|errno| {
        // It cannot have gone: only we reap it.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        wait::reap(pid);
        failed(errno)
    })?;
    Ok(Forked::Parent(Settling { child: Child { pid, pidfd }, told: File::from(told) }))
}
