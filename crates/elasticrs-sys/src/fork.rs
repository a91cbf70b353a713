//! Forks a child that continues the parent's program instead of executing another program.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{ForkResult, Pid};

use super::process;
use super::spawn::{self, Child, Command, Failure};
use super::stage::Stage;

/// Function that forks this single-threaded process. It also runs the fork handlers of the language runtime and
/// its libraries, and returns the result of `fork`.
pub type Forker = Box<dyn FnMut() -> nix::Result<i32>>;

/// Calls `fork`. Programs written in Rust use this function as their [`Forker`]. Refuses with `EBUSY` if the process
/// has several threads, and with `ENOSYS` if it cannot count them.
pub fn plain() -> nix::Result<i32> {
    let threads = std::fs::read_dir("/proc/self/task").map_err(|_| Errno::ENOSYS)?.count();
    if threads != 1 {
        return Err(Errno::EBUSY);
    }
    // SAFETY: the process has only one thread, so the child may do anything that the parent may do.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Child => Ok(0),
        ForkResult::Parent { child } => Ok(child.as_raw()),
    }
}

/// Result of [`fork`]. The function returns twice: in the parent and in the child.
pub enum Forked {
    /// This process is the parent. Contains the running child.
    Parent(Settling),
    /// This process is the child. Contains its pipe to the parent.
    Child(Outlet),
}

/// Write end of the pipe from a forked child to its parent. The child announces each stage that can block
/// forever, and finally reports that its setup has finished or failed.
#[derive(Debug)]
pub struct Outlet(OwnedFd);

/// Bytes with a special meaning on the pipe. Any other byte is the number of a stage. `SETTLED` reports that the
/// setup has finished. `FAILED` is followed by the stage, the descriptor, and the error number.
const SETTLED: u8 = u8::MAX - 1;
const FAILED: u8 = u8::MAX;

impl Outlet {
    /// Moves the pipe to a descriptor number of at least `floor`, so that the worker's descriptors cannot overwrite
    /// it.
    pub fn move_above(&mut self, floor: RawFd) -> nix::Result<()> {
        let moved = fcntl(&self.0, FcntlArg::F_DUPFD_CLOEXEC(floor))?;
        // SAFETY: the descriptor was just created, so no other code owns it.
        self.0 = unsafe { OwnedFd::from_raw_fd(moved) };
        Ok(())
    }

    /// Sets up this forked child as described by `command`. Only a forked child can call this method, because no other
    /// process has an [`Outlet`]. Keeps the signal handlers, because the child continues the parent's program.
    ///
    /// `parent` is the pid of the process that forked. A source descriptor in [`Command::fds`] stays open, unless a
    /// passed descriptor has taken its number.
    pub fn settle<'a>(&'a self, mut command: Command<'a>, parent: i32) -> Result<(), Failure> {
        command.stages = Some(self.as_fd());
        spawn::settle(&command, parent)
    }

    /// Reports that the child has finished its setup.
    pub fn close(self) {
        // Ignore an error, because the write fails only if the parent has exited.
        let _ = File::from(self.0).write_all(&[SETTLED]);
    }

    /// Reports the failure to the parent and exits.
    pub fn fail(self, failure: Failure) -> ! {
        let Failure { stage, errno, descriptor } = failure;
        let mut told = [FAILED, stage as u8, u8::try_from(descriptor).unwrap_or(0), 0, 0, 0, 0];
        told[3..].copy_from_slice(&(errno as i32).to_ne_bytes());
        // Ignore an error, because the write fails only if the parent has exited.
        let _ = File::from(self.0).write_all(&told);
        // SAFETY: `_exit` skips the exit handlers and destructors of the parent's program, which must not run in the
        // child.
        unsafe { libc::_exit(127) }
    }
}

impl AsFd for Outlet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A running child whose setup has neither finished nor failed yet.
#[derive(Debug)]
pub struct Settling {
    child: Child,
    told: File,
}

impl Settling {
    /// Waits until the child has finished its setup or has exited. Calls `announce` with a stage's number before each
    /// stage that can block forever. Kills the child once it is no longer needed, because the process or the connection
    /// in `needed_by` has ended.
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
        process::reap(self.child.pid);
        let Some([stage, descriptor, errno @ ..]) = failure else {
            // The child exited without a report, for example in a library's fork handler. Do not report its exit code,
            // because a code of 0 would look like a successful worker.
            return Err(Failure::at(Stage::Clone)(Errno::ECHILD));
        };
        let stage = Stage::from_byte(stage).unwrap_or(Stage::Clone);
        Err(Failure { stage, errno: Errno::from_raw(i32::from_ne_bytes(errno)), descriptor: descriptor.into() })
    }

    /// Waits until the pipe is readable. Returns false if the child has exited without a report. Also watches the
    /// process itself, because other processes that the child has started may keep the pipe open.
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
            // Ignore the result, because the only possible error is EINTR, and all signals are blocked.
            let _ = poll(&mut polled[..count], PollTimeout::NONE);
            let [told, ended, ..] = polled.each_ref().map(|fd| fd.any().unwrap_or(true));
            if told || ended {
                return told;
            }
            is_needed = false;
            // Ignore the only possible error, ESRCH: it means that the child has exited, which the next poll notices.
            let _ = process::send_signal(&self.child.pidfd, libc::SIGKILL);
        }
    }
}

/// Forks this process. The signal mask stays unchanged in the parent and in the child.
pub fn fork(forker: &mut Forker) -> Result<Forked, Failure> {
    let (told, outlet) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(Failure::at(Stage::Clone))?;
    let pid = forker().map_err(Failure::at(Stage::Clone))?;
    if pid == 0 {
        drop(told);
        return Ok(Forked::Child(Outlet(outlet)));
    }
    let pidfd = process::open_pidfd(pid).map_err(|errno| {
        // The pid still belongs to the child, because only this process can reap the child.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        process::reap(pid);
        Failure::at(Stage::Clone)(errno)
    })?;
    Ok(Forked::Parent(Settling { child: Child { pid, pidfd }, told: File::from(told) }))
}
