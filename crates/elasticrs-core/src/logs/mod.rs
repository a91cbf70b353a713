//! Follows the log files of the workers and writes their output to the console.
//!
//! A worker writes its output directly to its log file, which is opened for appending. The file is the buffer: the
//! worker never waits for the console or for the agent, and no output is lost when the agent dies. One thread of the
//! agent, named `elasticrs-logs`, follows the files and writes to the console. It starts with the first followed
//! stream.
//!
//! Where and when to call the methods:
//!
//! - [`Logs::follow`] creates and opens files, which can block on a dead network mount. Call it before the workers are
//!   started, from a thread that is allowed to block (a Python thread). All bytes that are written after the call are
//!   shown.
//! - [`Logs::finish`] only puts a command into a queue. Call it, from any thread, once all writers of the streams are
//!   gone (the group has finished and its leftover processes are cleaned up).
//! - [`Logs::drain`] waits for finished streams. It does not wait for streams that are not finished. All notices about
//!   a stream are sent before the stream counts as drained.
//! - The closure given to [`Logs::new`] is called by the caller of [`Logs::follow`] and by the logs thread. The closure
//!   must not block, and must not call methods of [`Logs`].
//!
//! Invariants, in addition to those of the modules:
//!
//! - **LOGS-1** Only [`Logs::follow`] accesses files, and no method accesses the console. Therefore, a file can block
//!   only [`Logs::follow`], and the console cannot block any method, except for the wait of at most 5 s in LOGS-4.
//! - **LOGS-2** Every byte that was in a file when its stream was finished is written to the console, unless
//!   [`Logs::drain`] returns the stream as incomplete, or its destination was reported as lost.
//! - **LOGS-3** A problem is reported once for each file, and never stops the agent.
//! - **LOGS-4** If no descriptor is free, [`Logs::follow`] waits up to 5 s until the logs thread has closed the files
//!   of finished streams. Therefore, a restart needs no more descriptors than the first start.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use console::Console;
use console::{Output, errno_of};
use elasticrs_runtime::lock;
use elasticrs_runtime::readings::{Dest, Stream};
use elasticrs_runtime::threads::{Leavable, WakeFd, panic_message};
use elasticrs_sys::clock::Stamp;
use follow::Opened;
use lines::is_blank;
pub use matching::MatchingLines;
use nix::errno::Errno;
use pump::{Command, Pump};

mod console;
mod follow;
mod lines;
mod matching;
mod pump;

/// Maximum time that [`Logs::follow`] waits for a free descriptor. The logs thread frees descriptors by closing
/// the files of finished streams.
const CLOSING: Duration = Duration::from_secs(5);

/// Destination of the lines in a log file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum To {
    Nowhere,
    Console(Dest),
    /// Copy matching lines to another file. The log file is followed a second time for this purpose, so that a stuck
    /// console does not delay the copy.
    File(MatchingLines),
}

/// A log file to follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogStream {
    pub local_rank: u32,
    /// Path of the log file. The file is created with mode 0644 if it does not exist.
    pub path: PathBuf,
    pub to: To,
    /// Text to put before every line, including colour codes.
    pub prefix: Vec<u8>,
}

/// Id of a followed stream. Ids are never reused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

/// A problem with the logs. Each problem is reported once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A log file, or a file that lines are copied to, cannot be opened, read or written, or its file system is full
    /// (`ENOSPC`).
    LogTrouble { local_rank: u32, path: PathBuf, errno: Errno },
    /// Inotify is unavailable, so files are polled: every 20 ms while data arrives, and at most 1 s apart when idle.
    Polling { errno: Errno },
    /// The console is no longer used, because writing to it failed. Log files are still written.
    ConsoleLost {
        /// Output stream that failed. `Stdout` if standard output and standard error are the same file.
        to: Dest,
        errno: Errno,
    },
    /// The logs thread panicked. Log files are still written, but nothing is shown on the console anymore.
    Panicked { message: String },
}

type Notify = Arc<dyn Fn(Notice) + Send + Sync>;

/// Handle to the thread that follows log files. See the documentation of this module.
pub struct Logs {
    shared: Arc<Shared>,
    notify: Notify,
    totals: Arc<LogTotals>,
    thread: Mutex<Thread>,
}

enum Thread {
    NotStarted(Option<Console>),
    Started(Leavable),
    Closed,
}

/// State that the handle and the thread share.
#[derive(Debug)]
struct Shared {
    next_id: AtomicU64,
    wake: WakeFd,
    commands: Mutex<Vec<Command>>,
    /// Followed streams. A finished stream is removed once all of it has been written.
    streams: Mutex<Streams>,
    /// Wakes the threads that wait until a finished stream is fully written and its file is closed, or until the logs
    /// thread has exited.
    closed: Condvar,
    is_gone: AtomicBool,
}

type Streams = BTreeMap<StreamId, Arc<StreamInfo>>;

#[derive(Debug)]
struct StreamInfo {
    id: StreamId,
    stream: LogStream,
    is_finishing: AtomicBool,
    /// Counters of the bytes and lines read. `None` if the stream does not go to the console.
    counts: Option<Arc<LogCounts>>,
    /// Time of the last read that returned data, in nanoseconds of the monotonic clock. 0 if no data has been read.
    read_at: AtomicU64,
    /// True if the file may contain unread data, for example because its destination is full.
    is_stalled: AtomicBool,
}

impl Logs {
    /// Creates the handle. The first call to [`Self::follow`] starts the thread.
    pub fn new(console: Console, notify: impl Fn(Notice) + Send + Sync + 'static) -> io::Result<Self> {
        let shared = Shared {
            next_id: AtomicU64::new(0),
            wake: WakeFd::new()?,
            commands: Mutex::default(),
            streams: Mutex::default(),
            closed: Condvar::new(),
            is_gone: AtomicBool::new(false),
        };
        let thread = Mutex::new(Thread::NotStarted(Some(console)));
        Ok(Self { shared: Arc::new(shared), notify: Arc::new(notify), totals: Arc::default(), thread })
    }

    /// Returns the counters of the bytes and lines that have been read.
    pub fn totals(&self) -> Arc<LogTotals> {
        Arc::clone(&self.totals)
    }

    /// Starts following these log files: all data that is written to a file after this call is sent to the file's
    /// destination. If a file cannot be opened, reports [`Notice::LogTrouble`] and follows the other files.
    pub fn follow(&self, streams: Vec<LogStream>) -> io::Result<Vec<StreamId>> {
        self.start_thread()?;
        let mut ids = Vec::with_capacity(streams.len());
        let mut opened = Vec::with_capacity(streams.len());
        let deadline = Instant::now() + CLOSING;
        for stream in streams {
            let id = StreamId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
            ids.push(id);
            let counts = match &stream.to {
                To::Console(dest) => Some(self.totals.of((stream.local_rank, *dest))),
                To::Nowhere | To::File(_) => None,
            };
            let info = Arc::new(StreamInfo {
                id,
                stream,
                is_finishing: AtomicBool::new(false),
                counts,
                read_at: AtomicU64::new(0),
                is_stalled: AtomicBool::new(false),
            });
            let copy = match &info.stream.to {
                To::Nowhere | To::Console(_) => Ok(None),
                To::File(lines) => {
                    let copy = self.shared.open_until(deadline, || lines.open());
                    copy.map(Some).map_err(|error| (lines.path.clone(), error))
                }
            };
            let file = self.shared.open_until(deadline, || open(&info.stream));
            let file = file.map_err(|error| (info.stream.path.clone(), error));
            match copy.and_then(|copy| Ok((copy, file?))) {
                Ok((copy, (file, offset))) => opened.push(Opened { info, file, offset, copy }),
                Err((path, error)) => {
                    let local_rank = info.stream.local_rank;
                    (self.notify)(Notice::LogTrouble { local_rank, path, errno: errno_of(&error) });
                }
            }
        }
        lock(&self.shared.streams).extend(opened.iter().map(|file| (file.info.id, Arc::clone(&file.info))));
        self.shared.send(Command::Follow(opened));
        Ok(ids)
    }

    /// Returns the time of the last data from any unfinished stream. Returns `now` if an unfinished stream may have
    /// unread data, for example because its destination is full. `None` if no unfinished stream has received data
    /// yet.
    pub fn last_written(&self, now: Stamp) -> Option<Stamp> {
        let all = lock(&self.shared.streams);
        let open = all.values().filter(|info| !info.is_finishing());
        open.filter_map(|info| {
            // Read `is_stalled` before `read_at`, because the logs thread updates `read_at` before it clears
            // `is_stalled`.
            let is_stalled = info.is_stalled.load(Ordering::Acquire);
            let read_at = info.read_at.load(Ordering::Relaxed);
            (read_at > 0).then_some(if is_stalled { now } else { Stamp(read_at) })
        })
        .max()
    }

    /// Marks these streams as finished: each one is complete once its file has been read to the end. Call this when
    /// all writers of the streams are gone.
    pub fn finish(&self, streams: &[StreamId]) {
        let all = lock(&self.shared.streams);
        streams.iter().filter_map(|id| all.get(id)).for_each(|info| info.is_finishing.store(true, Ordering::Relaxed));
        drop(all);
        self.shared.send(Command::Finish(streams.to_vec()));
    }

    /// Same as [`Self::finish`], for all followed streams.
    pub fn finish_all(&self) {
        self.finish_those(|_| true);
    }

    /// Same as [`Self::finish`], for the streams of one rank.
    pub(crate) fn finish_rank(&self, local_rank: u32) {
        self.finish_those(|info| info.stream.local_rank == local_rank);
    }

    fn finish_those(&self, are_meant: impl Fn(&StreamInfo) -> bool) {
        let streams = lock(&self.shared.streams);
        let meant: Vec<StreamId> = streams.values().filter(|info| are_meant(info)).map(|info| info.id).collect();
        drop(streams);
        self.finish(&meant);
    }

    /// Blocks until all finished streams are fully written to the console, or until `limit` has elapsed. Returns the
    /// streams that are not fully written. The logs thread continues to write them.
    pub fn drain(&self, limit: Duration) -> Vec<LogStream> {
        let streams = self.shared.closed_within(limit);
        streams.values().filter(|info| info.is_finishing()).map(|info| info.stream.clone()).collect()
    }

    /// Stops the logs thread and closes all files. Output that has not reached the console is no longer shown. If the
    /// thread is stuck in a write, waits only briefly, and the thread exits when the write returns. Idempotent.
    pub fn close(&self) {
        let thread = std::mem::replace(&mut *lock(&self.thread), Thread::Closed);
        let Thread::Started(thread) = thread else { return };
        self.shared.send(Command::Stop);
        thread.leave();
    }

    /// Starts the logs thread if it is not running.
    fn start_thread(&self) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        let console = match &mut *thread {
            Thread::Started(_) => return Ok(()),
            Thread::NotStarted(console) => console.take(),
            Thread::Closed => None,
        };
        let console = console.ok_or_else(|| io::Error::other("the logs were closed"))?;
        let (shared, outputs, notify) = (Arc::clone(&self.shared), Output::pair(console), Arc::clone(&self.notify));
        let started = Leavable::start("elasticrs-logs", move || run_guarded(&shared, outputs, &notify))?;
        *thread = Thread::Started(started);
        Ok(())
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn send(&self, command: Command) {
        lock(&self.commands).push(command);
        self.wake.set();
    }

    fn forget(&self, through: &[StreamId]) {
        lock(&self.streams).retain(|id, _| !through.contains(id));
        self.closed.notify_all();
    }

    /// Waits until all finished streams are written and their files are closed, until the logs thread has exited, or
    /// until `limit` has elapsed.
    fn closed_within(&self, limit: Duration) -> MutexGuard<'_, Streams> {
        let is_open = |streams: &mut Streams| {
            !self.is_gone.load(Ordering::Acquire) && streams.values().any(|info| info.is_finishing())
        };
        let waited = self.closed.wait_timeout_while(lock(&self.streams), limit, is_open);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Opens a file. If no descriptor is free, waits until files of finished streams are closed or the deadline
    /// passes, and then tries once more.
    fn open_until<T>(&self, deadline: Instant, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match open() {
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                // Try once more even if the wait timed out, because a descriptor may have become free in the meantime.
                drop(self.closed_within(deadline.saturating_duration_since(Instant::now())));
                open()
            }
            opened => opened,
        }
    }
}

impl StreamInfo {
    fn is_finishing(&self) -> bool {
        self.is_finishing.load(Ordering::Relaxed)
    }

    fn trouble(&self, errno: Errno) -> Notice {
        Notice::LogTrouble { local_rank: self.stream.local_rank, path: self.stream.path.clone(), errno }
    }
}

/// Runs the logs thread. Notifies waiters when the thread stops, so that [`Logs::drain`] returns even if the thread
/// panics.
fn run_guarded(shared: &Arc<Shared>, outputs: (Vec<Output>, [usize; 2]), notify: &Notify) {
    let pump = Pump::new(Arc::clone(shared), outputs, Arc::clone(notify));
    let result = catch_unwind(AssertUnwindSafe(|| pump.run()));
    // Hold the lock, because a thread that has just checked `is_gone` would otherwise miss the notification.
    let streams = lock(&shared.streams);
    shared.is_gone.store(true, Ordering::Release);
    drop(streams);
    shared.closed.notify_all();
    if let Err(panic) = result {
        notify(Notice::Panicked { message: panic_message(panic.as_ref()) });
    }
}

/// Opens a log file and returns it with its size. Creates the file if it does not exist, so that it can be followed
/// before the worker starts.
fn open(stream: &LogStream) -> io::Result<(File, u64)> {
    // Also open the file for writing, because std requires write access for O_CREAT. In addition, opening a FIFO for
    // reading and writing never blocks.
    let options = &mut OpenOptions::new();
    let file = options.read(true).append(true).create(true).mode(0o644).open(&stream.path)?;
    let stat = file.metadata()?;
    if stat.file_type().is_fifo() || stat.file_type().is_socket() || stat.file_type().is_char_device() {
        return Err(io::Error::from_raw_os_error(libc::ESPIPE));
    }
    Ok((file, stat.len()))
}

/// Numbers of bytes and lines that were read from one stream of a worker.
#[derive(Debug, Default)]
pub(super) struct LogCounts {
    bytes: AtomicU64,
    lines: AtomicU64,
}

impl LogCounts {
    pub(super) fn add(&self, block: &[u8]) {
        self.bytes.fetch_add(block.len() as u64, Ordering::Relaxed);
        let newlines = memchr::memchr_iter(b'\n', block).count();
        self.lines.fetch_add(newlines as u64, Ordering::Relaxed);
    }
}

/// Counters of the bytes and lines in the streams that go to the console. Keys: the worker's local rank and the
/// destination. The counters are not reset when workers are restarted.
#[derive(Debug, Default)]
pub struct LogTotals {
    streams: Mutex<BTreeMap<Stream, Arc<LogCounts>>>,
}

impl LogTotals {
    /// Returns the numbers of bytes and newlines read so far from each stream that goes to the console, including
    /// finished streams.
    pub(crate) fn all(&self) -> Vec<(Stream, u64, u64)> {
        let streams = lock(&self.streams);
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        streams.iter().map(|(stream, counts)| (*stream, of(&counts.bytes), of(&counts.lines))).collect()
    }

    pub(super) fn of(&self, stream: Stream) -> Arc<LogCounts> {
        Arc::clone(lock(&self.streams).entry(stream).or_default())
    }
}

/// Returns the last `count` lines in the last `max_bytes` bytes of a file, without their line ends.
///
/// If parts of a line were overwritten with `\r`, only the last visible state is returned. A line that starts before
/// the last `max_bytes` bytes is cut off. It is returned only if no other line follows it. Returns no lines for a file
/// without a size, such as `/dev/null`.
pub fn last_lines(path: &Path, count: usize, max_bytes: u64) -> io::Result<Vec<Vec<u8>>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    // Also read the byte before the window, which shows whether the window starts in the middle of a line.
    let start = size.saturating_sub(max_bytes.saturating_add(1));
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(start))?;
    // Limit the read, because the file may grow in the meantime.
    file.take(size - start).read_to_end(&mut bytes)?;
    Ok(match bytes.split_first() {
        Some((before, window)) if size > max_bytes => last_of(window, count, *before != b'\n'),
        _ => last_of(&bytes, count, false),
    })
}

fn last_of(bytes: &[u8], count: usize, is_cut: bool) -> Vec<Vec<u8>> {
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    let mut lines: Vec<&[u8]> = body.split(|b| *b == b'\n').collect();
    if is_cut && lines.len() > 1 {
        lines.remove(0);
    }
    let first = lines.len().saturating_sub(count);
    lines[first..].iter().map(|line| last_state(line).to_vec()).collect()
}

/// Returns the text that a terminal would show for the line, by the same rules as for the agent's console.
fn last_state(line: &[u8]) -> &[u8] {
    let end = line.iter().rposition(|b| *b != b'\r').map_or(0, |last| last + 1);
    let line = &line[..end];
    let mut states = line.rsplit(|b| *b == b'\r');
    if line.contains(&b'\r') { states.find(|state| !is_blank(state)).unwrap_or_default() } else { line }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use elasticrs_runtime::readings::Dest;

    use super::*;

    #[test]
    fn bytes_and_newlines_are_counted_by_stream() {
        let totals = LogTotals::default();
        totals.of((1, Dest::Stderr)).add(b"a\nb\nc");
        totals.of((1, Dest::Stderr)).add(b"\n");
        totals.of((0, Dest::Stdout)).add(b"");
        assert_eq!(totals.all(), [((0, Dest::Stdout), 0, 0), ((1, Dest::Stderr), 6, 3)]);
    }

    fn lines_of(text: &[u8], count: usize, max_bytes: u64) -> Vec<String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        let lines = last_lines(file.path(), count, max_bytes).unwrap();
        lines.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    }

    #[test]
    fn the_last_lines_are_returned_in_order() {
        assert_eq!(lines_of(b"a\nb\nc\n", 2, 100), ["b", "c"]);
        assert_eq!(lines_of(b"a\nb\nc", 2, 100), ["b", "c"]);
        assert_eq!(lines_of(b"a\n\n", 5, 100), ["a", ""]);
        assert_eq!(lines_of(b"", 5, 100), [""; 0]);
        assert_eq!(lines_of(b"a\n", 0, 100), [""; 0]);
    }

    #[test]
    fn a_line_cut_by_the_byte_limit_is_omitted_unless_it_is_the_only_line() {
        assert_eq!(lines_of(b"abcdef\nxyz\n", 5, 6), ["xyz"]);
        assert_eq!(lines_of(b"abcdef\n", 5, 4), ["def"]);
        assert_eq!(lines_of(b"ab\nc\nxyz\n", 5, 6), ["c", "xyz"]);
    }

    #[test]
    fn progress_bars_collapse_to_their_last_state() {
        assert_eq!(lines_of(b"\r 10%\r 99%\rend\nx\r\n\r 50%\r    \r", 9, 100), ["end", "x", " 50%"]);
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let error = last_lines(Path::new("/nonexistent/log"), 1, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
