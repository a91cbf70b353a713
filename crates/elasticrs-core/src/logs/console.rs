//! Output destinations: standard output, standard error, and files that selected lines are copied to. Writing to a
//! destination may block or fail.
//!
//! - **CONSOLE-1** The flags of a descriptor are never changed, because the shell and the workers share the descriptor.
//!   A write could therefore block. To avoid this, a write is made only after `poll` has reported free space. On pipes,
//!   terminals and sockets, one write is limited to `PIPE_BUF` bytes, which fit into that space. If another process
//!   fills the space before the write, the write blocks, but only this thread waits.
//! - **CONSOLE-2** If possible, a write ends at the end of a line. Lines of up to `PIPE_BUF` bytes are therefore
//!   written in one piece and do not mix with lines that other processes write to the same pipe.
//! - **CONSOLE-3** The buffer of an output holds at most [`HIGH_WATER`] bytes plus the lines of one block that was read
//!   from a file. When the buffer is full, further bytes stay in their log files.
//! - **CONSOLE-4** A destination that fails is never used again, and its failure is reported once.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::write;

use super::lines::{Screen, Unit};
use super::{Dest, LogStream, Notice, StreamId, To};

/// Number of buffered bytes at which an output stops accepting data.
pub(super) const HIGH_WATER: usize = 256 * 1024;

/// Maximum size of a write that is atomic on a pipe according to POSIX. On Linux, `POLLOUT` also guarantees room for
/// this many bytes.
const PIECE: usize = libc::PIPE_BUF;

/// Standard output and standard error, to which the lines are written.
#[derive(Debug)]
pub struct Console {
    given: Option<[OwnedFd; 2]>,
}

impl Console {
    /// Uses these descriptors instead of the process's standard output and standard error.
    pub fn new(stdout: OwnedFd, stderr: OwnedFd) -> Self {
        Self { given: Some([stdout, stderr]) }
    }

    /// Uses duplicates of descriptors 1 and 2, made when the first stream is followed. If a descriptor is closed at
    /// that time, its output is reported as lost.
    pub fn inherited() -> Self {
        Self { given: None }
    }

    fn open(self) -> [Result<OwnedFd, Errno>; 2] {
        let duplicate = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|error| errno_of(&error));
        match self.given {
            Some(fds) => fds.map(Ok),
            None => [duplicate(std::io::stdout().as_fd()), duplicate(std::io::stderr().as_fd())],
        }
    }
}

/// Returns the error number of an I/O error, or `EIO` if the error did not come from a system call and has no
/// number.
pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// An open file that lines are written to. If standard output and standard error are the same file, they share
/// one `Output`.
#[derive(Debug)]
pub(super) struct Output {
    name: Name,
    fd: Result<OwnedFd, Errno>,
    never_waits: bool,
    screen: Screen<StreamId>,
    /// Bytes to write. The first `sent` bytes have been written already.
    buffer: Vec<u8>,
    sent: usize,
    accepted: u64,
    is_used: bool,
    loss_reported: bool,
}

/// Name of an output in messages to the user.
#[derive(Debug)]
enum Name {
    /// Standard output or standard error of the agent.
    Console(Dest),
    /// A file that belongs to a single stream.
    File { local_rank: u32, path: PathBuf },
    /// An unused slot that a new output can take.
    Free,
}

impl Output {
    fn new(name: Name, fd: Result<OwnedFd, Errno>) -> Self {
        let kind = fd.as_ref().ok().and_then(|fd| fstat(fd).ok());
        let never_waits = kind.is_some_and(|stat| {
            let format = stat.st_mode & SFlag::S_IFMT.bits();
            format == SFlag::S_IFREG.bits() || (format == SFlag::S_IFCHR.bits() && stat.st_rdev == libc::makedev(1, 3))
        });
        Self {
            name,
            fd,
            never_waits,
            screen: Screen::default(),
            buffer: Vec::new(),
            sent: 0,
            accepted: 0,
            is_used: false,
            loss_reported: false,
        }
    }

    /// Creates an output for `file`, which receives the lines of `stream` that match a filter.
    pub(super) fn of_file(file: File, stream: &LogStream) -> Self {
        let path = match &stream.to {
            To::File(lines) => lines.path.clone(),
            To::Nowhere | To::Console(_) => PathBuf::new(),
        };
        let mut output = Self::new(Name::File { local_rank: stream.local_rank, path }, Ok(file.into()));
        output.mark_used();
        output
    }

    /// Closes a file output and frees its slot. Call this when the output's only stream has finished, or when the
    /// output is lost. Does nothing for standard output and standard error.
    pub(super) fn close_own(&mut self) {
        if matches!(self.name, Name::File { .. }) {
            (self.name, self.fd) = (Name::Free, Err(Errno::EBADF));
        }
    }

    pub(super) fn is_free(&self) -> bool {
        matches!(self.name, Name::Free)
    }

    /// Opens the outputs for standard output and standard error, and returns the index of each. The indices are equal
    /// if both are the same file.
    pub(super) fn pair(console: Console) -> (Vec<Self>, [usize; 2]) {
        let [stdout, stderr] = console.open();
        let shared = match (&stdout, &stderr) {
            (Ok(a), Ok(b)) => matches!((fstat(a), fstat(b)), (Ok(a), Ok(b)) if is_same_file(&a, &b)),
            _ => false,
        };
        let mut outputs = vec![Self::new(Name::Console(Dest::Stdout), stdout)];
        if shared {
            return (outputs, [0, 0]);
        }
        outputs.push(Self::new(Name::Console(Dest::Stderr), stderr));
        (outputs, [0, 1])
    }

    pub(super) fn is_lost(&self) -> bool {
        self.fd.is_err() && !self.is_free()
    }

    /// Records that a stream uses this destination, because only the loss of a destination in use is reported.
    pub(super) fn mark_used(&mut self) {
        self.is_used = true;
    }

    /// Returns a notice if this destination has failed and is used by a stream. Later calls return `None`.
    pub(super) fn take_loss(&mut self) -> Option<Notice> {
        let errno = *self.fd.as_ref().err()?;
        let is_news = self.is_used && !std::mem::replace(&mut self.loss_reported, true);
        match &self.name {
            Name::Console(to) => is_news.then_some(Notice::ConsoleLost { to: *to, errno }),
            Name::File { local_rank, path } => {
                is_news.then(|| Notice::LogTrouble { local_rank: *local_rank, path: path.clone(), errno })
            }
            Name::Free => None,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.pending() < HIGH_WATER
    }

    pub(super) fn pending(&self) -> usize {
        self.buffer.len() - self.sent
    }

    /// Returns the number of bytes that this output has accepted so far, including those that are still buffered.
    pub(super) fn accepted(&self) -> u64 {
        self.accepted
    }

    pub(super) fn written(&self) -> u64 {
        self.accepted - self.pending() as u64
    }

    pub(super) fn put(&mut self, stream: StreamId, prefix: &[u8], unit: Unit<'_>) {
        if self.fd.is_ok() {
            let before = self.buffer.len();
            self.screen.put(stream, prefix, unit, &mut self.buffer);
            self.accepted += (self.buffer.len() - before) as u64;
        }
    }

    /// Returns the descriptor to poll for writability. `None` if there is nothing to write.
    pub(super) fn waits_for_room(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.fd.as_ref().ok()?;
        (self.pending() > 0).then(|| fd.as_fd())
    }

    /// Writes buffered bytes until the buffer is empty or the descriptor cannot accept more.
    pub(super) fn flush(&mut self) {
        while self.pending() > 0 {
            let Ok(fd) = &self.fd else { break };
            if !self.never_waits && !has_room(fd.as_fd()) {
                return;
            }
            let waiting = &self.buffer[self.sent..];
            let piece = if self.never_waits { waiting } else { first_lines(waiting) };
            match write(fd, piece) {
                Ok(0) => self.lose(Errno::EIO),
                Ok(n) => self.sent += n,
                Err(Errno::EINTR) => {}
                // Another process has made the descriptor non-blocking, and has filled the free space since `poll`
                // reported it.
                Err(Errno::EAGAIN) => return,
                Err(errno) => self.lose(errno),
            }
        }
        self.buffer.clear();
        self.sent = 0;
    }

    /// Removes the written bytes from the buffer if they exceed half of `HIGH_WATER`. Called before bytes are added.
    pub(super) fn compact(&mut self) {
        if self.sent > HIGH_WATER / 2 {
            self.buffer.drain(..self.sent);
            self.sent = 0;
        }
    }

    fn lose(&mut self, errno: Errno) {
        self.fd = Err(errno);
        self.sent = self.buffer.len();
    }
}

fn has_room(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLOUT)];
    // Treat an error condition (POLLERR, POLLNVAL) as free space, because the following write then returns the error.
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|n| n > 0)
}

/// Returns as many whole lines as fit into one write to a pipe. If the first line does not fit, returns its beginning.
fn first_lines(waiting: &[u8]) -> &[u8] {
    if waiting.len() <= PIECE {
        return waiting;
    }
    let piece = &waiting[..PIECE];
    memchr::memrchr(b'\n', piece).map_or(piece, |last| &piece[..=last])
}

fn is_same_file(a: &nix::sys::stat::FileStat, b: &nix::sys::stat::FileStat) -> bool {
    (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_console_output_is_split_at_line_ends() {
        let mut text = vec![b'a'; 4000];
        text.push(b'\n');
        text.extend([b'b'; 4000]);
        assert_eq!(first_lines(&text).len(), 4001);
        assert_eq!(first_lines(&[b'a'; 5000]).len(), PIECE);
        assert_eq!(first_lines(b"a\nb"), b"a\nb");
    }
}
