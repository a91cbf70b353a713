//! Counts the bytes that workers write to log files that no thread of the agent reads. A separate thread checks the
//! sizes of these files.
//!
//! Only this thread checks files, because a check on a dead network mount may block forever. The thread sleeps until a
//! scrape requests a check, or until an attempt starts or ends. A scrape waits for the thread only until the thread has
//! been busy for [`PATIENCE`].
//!
//! - **SIZES-1** A count never decreases. If a file has become smaller, its whole current size counts as new bytes.
//! - **SIZES-2** No lock is held while a file is checked. If a check hangs, other threads can still read the known
//!   counts and request further checks.
//! - **SIZES-3** Every file is checked once more after its attempt has ended, even without a scrape.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use elasticrs_runtime::lock;
use elasticrs_runtime::readings::Stream;
use elasticrs_runtime::threads::Leavable;
use tokio::sync::watch;
use tokio::time::timeout_at;

/// Maximum time that a scrape of the metrics waits for a check of the files, measured from the start of the check.
pub const PATIENCE: Duration = Duration::from_millis(200);

/// A log file. Only one stream of one worker writes to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFile {
    pub stream: Stream,
    pub path: PathBuf,
    /// True if the file did not exist when the attempt was prepared.
    ///
    /// All bytes of a new file are counted. If the file is not new, only bytes that are added after its size became
    /// known are counted.
    pub is_new: bool,
}

/// Result of checking a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileState {
    Absent,
    /// A regular file: its device and inode numbers, and its size in bytes.
    File((u64, u64), u64),
    /// The file is not a regular file, or checking it failed.
    Unknown,
}

/// Reads the type, identity and size of a file. May block in the file system.
fn stat(path: &Path) -> FileState {
    match std::fs::metadata(path) {
        Ok(stat) if stat.is_file() => FileState::File((stat.dev(), stat.ino()), stat.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => FileState::Absent,
        Ok(_) | Err(_) => FileState::Unknown,
    }
}

/// Byte counts of the output streams. Performs no I/O, because the caller passes in the file sizes.
#[derive(Debug, Default)]
struct Tally {
    counts: BTreeMap<Stream, u64>,
    files: BTreeMap<PathBuf, WatchedFile>,
}

#[derive(Debug)]
struct WatchedFile {
    stream: Stream,
    last: FileState,
    /// True until a check in this attempt returns a state other than `Unknown`.
    is_first: bool,
}

impl Tally {
    /// Starts counting the bytes that a new attempt writes to these files. Bytes that the previous attempt wrote to the
    /// same file are not counted again.
    fn begin(&mut self, files: Vec<LogFile>) {
        let mut earlier = std::mem::take(&mut self.files);
        for LogFile { stream, path, is_new } in files {
            let known = earlier.remove(&path).map(|file| file.last);
            let last = if is_new { FileState::Absent } else { known.unwrap_or(FileState::Unknown) };
            self.files.insert(path, WatchedFile { stream, last, is_first: true });
        }
    }

    /// Updates the byte count of an output stream from the current state of its log file (SIZES-1). Returns the stream
    /// and its new count.
    ///
    /// Returns `None` if the state is unknown, or if the worker's file was moved or removed.
    fn update(&mut self, path: &Path, now: FileState) -> Option<(Stream, u64)> {
        let file = self.files.get_mut(path)?;
        let is_first = file.is_first;
        let added = match (file.last, now) {
            (_, FileState::Unknown) => return None,
            (FileState::Absent, FileState::File(_, size)) => size,
            (FileState::File(before, from), FileState::File(number, size)) if before == number => {
                size.checked_sub(from).unwrap_or(size)
            }
            // The worker's file was moved or removed. A file that now has this name does not belong to the worker.
            (FileState::File(..), _) if !is_first => return None,
            // Count nothing, because the file is absent or may contain bytes that the worker did not write.
            (_, FileState::Absent | FileState::File(..)) => 0,
        };
        (file.last, file.is_first) = (now, false);
        let count = self.counts.entry(file.stream).or_default();
        *count += added;
        Some((file.stream, *count))
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.files.keys().cloned().collect()
    }
}

/// Request to the thread that checks the files. `Some` starts an attempt with these files. `None` requests one
/// more check of the current files.
type Request = Option<Vec<LogFile>>;

#[derive(Default)]
struct State {
    requests: Option<mpsc::Sender<Request>>,
    counts: BTreeMap<Stream, u64>,
    is_watching: bool,
    /// Number of requests sent to the thread. `begun` is the number of requests that the thread has started.
    wanted: u64,
    begun: u64,
    /// Time at which the thread became busy with its current request. `None` if the thread is idle.
    waiting_since: Option<Instant>,
    checked_at: Option<Instant>,
}

impl State {
    fn request(&mut self, request: Request, now: Instant) {
        // If sending fails, the thread has panicked. Do not count the request, because it will never be completed.
        if self.requests.as_ref().is_some_and(|requests| requests.send(request).is_ok()) {
            self.wanted += 1;
            self.waiting_since.get_or_insert(now);
        }
    }

    /// Requests a check of the sizes of the log files, unless an earlier request is still queued.
    fn request_check(&mut self) {
        if self.wanted == self.begun {
            self.request(None, Instant::now());
        }
    }
}

/// Byte counts of the output streams, and the age of the counts.
#[derive(Debug, Clone, Default)]
pub struct StreamCounts {
    /// Total number of bytes of each stream, over all attempts.
    pub counts: BTreeMap<Stream, u64>,
    /// Time since the counts were last updated from the file sizes. `None` if the counts are final, because no attempt
    /// is running and no update is pending.
    pub age: Option<Duration>,
}

/// Byte counts of the workers' log files, and the thread that updates the counts.
#[derive(Default)]
pub(crate) struct LogSizes {
    shared: Arc<Shared>,
    thread: Mutex<Option<Leavable>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Number of requests that the thread has finished.
    done: watch::Sender<u64>,
}

impl LogSizes {
    /// Starts an attempt whose workers write to these files. Never blocks.
    pub(crate) fn begin(&self, files: Vec<LogFile>) -> io::Result<()> {
        self.begin_with(files, stat)
    }

    fn begin_with(&self, files: Vec<LogFile>, stat: impl Fn(&Path) -> FileState + Send + 'static) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut state = lock(&self.shared.state);
        if state.requests.is_none() {
            let (requests, inbox) = mpsc::channel();
            let shared = Arc::clone(&self.shared);
            *lock(&self.thread) = Some(Leavable::start("elasticrs-sizes", move || shared.run(&inbox, stat))?);
            state.requests = Some(requests);
        }
        for file in &files {
            state.counts.entry(file.stream).or_default();
        }
        state.is_watching = true;
        state.checked_at.get_or_insert(now);
        state.request(Some(files), now);
        Ok(())
    }

    /// Ends the attempt and requests a last check of the sizes of its log files (SIZES-3). Never blocks.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.shared.state);
        if std::mem::take(&mut state.is_watching) {
            state.request_check();
        }
    }

    /// Waits until the sizes of all log files have been read after this call. Stops waiting if the current check takes
    /// longer than [`PATIENCE`].
    pub(crate) async fn ask(&self) {
        let (target, since) = {
            let mut state = lock(&self.shared.state);
            if state.is_watching {
                state.request_check();
            }
            (state.wanted, state.waiting_since)
        };
        if let Some(since) = since {
            let mut done = self.shared.done.subscribe();
            // Ignore a timeout, because the caller can tell from the reported age that the byte counts are outdated.
            let _ = timeout_at((since + PATIENCE).into(), done.wait_for(|done| *done >= target)).await;
        }
    }

    /// Returns the byte counts that are known so far, and the time since the file sizes were last checked. Never waits
    /// for a file system, see SIZES-2.
    pub(crate) fn known(&self, now: Instant) -> StreamCounts {
        let state = lock(&self.shared.state);
        let is_current = !state.is_watching && state.waiting_since.is_none();
        let age = state.checked_at.filter(|_| !is_current).map(|at| now.saturating_duration_since(at));
        StreamCounts { counts: state.counts.clone(), age }
    }

    /// Stops the thread. A thread that hangs in a file system is abandoned and exits when its system call returns.
    /// Idempotent.
    pub(crate) fn close(&self) {
        lock(&self.shared.state).requests = None;
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            thread.leave();
        }
    }
}

impl Shared {
    fn run(&self, requests: &mpsc::Receiver<Request>, stat: impl Fn(&Path) -> FileState) {
        let mut tally = Tally::default();
        for request in requests {
            lock(&self.state).begun += 1;
            if let Some(files) = request {
                tally.begin(files);
            }
            for path in tally.paths() {
                let now = stat(&path);
                if let Some((stream, count)) = tally.update(&path, now) {
                    lock(&self.state).counts.insert(stream, count);
                }
            }
            self.end_turn();
        }
    }

    fn end_turn(&self) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.checked_at = Some(now);
        // All requests that were started are finished, because this thread handles one request at a time.
        state.waiting_since = (state.wanted > state.begun).then_some(now);
        self.done.send_replace(state.begun);
    }
}

#[cfg(test)]
#[path = "log_sizes_tests.rs"]
mod tests;
