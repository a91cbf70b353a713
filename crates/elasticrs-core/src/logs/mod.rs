//! Following the files that workers write to, and the console.
//!
//! A worker's output goes straight to its file, opened for appending. The file is the buffer: the worker never waits
//! for the console or for us, and nothing is lost when the agent dies. One thread of the agent, named `elasticrs-logs`,
//! follows the files and writes to the console; it starts with the first followed stream.
//!
//! Who calls what, from where:
//!
//! - [`Logs::follow`] creates and opens files, which can block on a dead network mount: call it from the thread that
//!   may wait (Python's), before the workers are started. Nothing written after it is missed.
//! - [`Logs::finish`] only puts a command into a queue: call it from anywhere when all writers of the streams are gone
//!   (the group has ended and was swept).
//! - [`Logs::drained`] waits for finished streams, on any runtime with a clock; streams of a running group are not
//!   waited for. The notices of a stream have been given before it counts as drained.
//! - The closure given to [`Logs::new`] is called from the caller of [`Logs::follow`] and from the logs thread; it must
//!   neither block nor call back.
//!
//! What they hold to, beside the invariants of the modules:
//!
//! - **LOGS-1** no call but [`Logs::follow`] touches a file, and none touches the console: they cannot be blocked by
//!   either.
//! - **LOGS-2** every byte that was in a file when its stream was finished is written to the console, or its stream is
//!   in the list that [`Logs::drained`] returns, or its destination was reported as lost.
//! - **LOGS-3** what is wrong is told once for each file, and never ends the agent.

mod console;
mod follow;
mod lines;
mod matching;
mod pump;
mod tail;
mod totals;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use elasticrs_runtime::lock;
use elasticrs_runtime::threads::{Leavable, panic_message};
use elasticrs_runtime::wake::Wake;
use nix::errno::Errno;

pub use console::Console;
pub use matching::MatchingLines;
pub use tail::last_lines;
pub use totals::LogTotals;

use console::{Output, errno_of};
use follow::{Opened, Sink};
use pump::{Command, Pump};
use totals::LogCounts;

use elasticrs_runtime::clock::Stamp;

/// A descriptor of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dest {
    Stdout,
    Stderr,
}

/// Where the lines of a file go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum To {
    Nowhere,
    Console(Dest),
    /// Some of them to another file. It is followed beside, and for itself: a stuck console does not hold it up.
    File(MatchingLines),
}

/// One log file to follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogStream {
    pub local_rank: u32,
    /// The file; created with mode 0644 when it is not there.
    pub path: PathBuf,
    pub to: To,
    /// Put before every line, colour codes included.
    pub prefix: Vec<u8>,
}

/// A followed stream. Numbers are never used again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

/// Something is wrong; told once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A log file, or one that lines are copied to, cannot be opened, read or written, or (`ENOSPC`) its file system is
    /// full.
    LogTrouble { local_rank: u32, path: PathBuf, errno: Errno },
    /// No inotify instance or watch could be had: files are polled, at intervals from 20 ms (busy) to 1 s (idle).
    Polling { errno: Errno },
    /// The console cannot be written to any more; the files go on.
    ConsoleLost {
        /// The descriptor; standard output when both are one open file.
        to: Dest,
        errno: Errno,
    },
    /// The logs thread panicked: the files go on, the console does not.
    Panicked { message: String },
}

/// A finished stream that is not all on the console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotDrained {
    pub stream: LogStream,
    /// Bytes of the file that are missing there, as of the thread's last look; of what was read in one block (64 KiB)
    /// and is written in part, all count.
    pub bytes: u64,
}

type Notify = Arc<dyn Fn(Notice) + Send + Sync>;

/// Follows log files on a thread of its own; see the module.
pub struct Logs {
    shared: Arc<Shared>,
    notify: Notify,
    totals: Arc<LogTotals>,
    thread: Mutex<Thread>,
}

enum Thread {
    NotStarted(Option<Console>),
    Started { output_of: [usize; 2], thread: Leavable },
    Closed,
}

/// Between the handle and the thread.
#[derive(Debug)]
struct Shared {
    next_id: AtomicU64,
    wake: Wake,
    commands: Mutex<Vec<Command>>,
    /// All streams that are followed; finished ones leave when they are through.
    streams: Mutex<BTreeMap<StreamId, Arc<StreamInfo>>>,
    /// A finished stream is through, or the thread is gone.
    changed: tokio::sync::watch::Sender<()>,
    is_gone: AtomicBool,
}

#[derive(Debug)]
struct StreamInfo {
    id: StreamId,
    stream: LogStream,
    is_finishing: AtomicBool,
    /// Of what goes to the console.
    counts: Option<Arc<LogCounts>>,
    /// Bytes that are not on the console, as of the thread's last look.
    behind: AtomicU64,
    /// When something was read last, in nanoseconds of the monotonic clock; 0: never.
    read_at: AtomicU64,
    /// It may have written what was not read: its destination takes nothing, or the thread is about to write to it.
    /// What was read and waits for the rest of its line is none of that: its writer may be silent since.
    is_stalled: AtomicBool,
}

impl Logs {
    /// Nothing is started or opened yet.
    pub fn new(console: Console, notify: impl Fn(Notice) + Send + Sync + 'static) -> io::Result<Self> {
        let shared = Shared {
            next_id: AtomicU64::new(0),
            wake: Wake::new()?,
            commands: Mutex::default(),
            streams: Mutex::default(),
            changed: tokio::sync::watch::Sender::default(),
            is_gone: AtomicBool::new(false),
        };
        let thread = Mutex::new(Thread::NotStarted(Some(console)));
        Ok(Self { shared: Arc::new(shared), notify: Arc::new(notify), totals: Arc::default(), thread })
    }

    /// What was read so far.
    pub fn totals(&self) -> Arc<LogTotals> {
        Arc::clone(&self.totals)
    }

    /// Shows what is written to these files from now on. A file that cannot be opened is reported as
    /// [`Notice::LogTrouble`], and the others are followed.
    pub fn follow(&self, streams: Vec<LogStream>) -> io::Result<Vec<StreamId>> {
        let output_of = self.start_thread()?;
        let mut ids = Vec::with_capacity(streams.len());
        let mut opened = Vec::with_capacity(streams.len());
        for stream in streams {
            let id = StreamId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
            ids.push(id);
            let counts = match &stream.to {
                To::Console(dest) => Some(self.totals.of(stream.local_rank, *dest)),
                To::Nowhere | To::File(_) => None,
            };
            let info = Arc::new(StreamInfo {
                id,
                stream,
                is_finishing: AtomicBool::new(false),
                counts,
                behind: AtomicU64::new(0),
                read_at: AtomicU64::new(0),
                is_stalled: AtomicBool::new(false),
            });
            let sink = match &info.stream.to {
                To::Nowhere => Ok(Sink::Nowhere),
                To::Console(dest) => Ok(Sink::Console(output_of[*dest as usize])),
                To::File(lines) => lines.open().map(Sink::File).map_err(|error| (lines.path.clone(), error)),
            };
            let file = open(&info.stream).map_err(|error| (info.stream.path.clone(), error));
            match sink.and_then(|sink| Ok((sink, file?))) {
                Ok((sink, (file, offset))) => opened.push(Opened { info, file, offset, sink }),
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

    /// When one of the followed ranks wrote something last, apart from finished streams; `now` while one may have written
    /// what could not be read so far, because its destination takes nothing or is lost. `None`: none has written anything.
    pub fn last_written(&self, now: Stamp) -> Option<Stamp> {
        let all = lock(&self.shared.streams);
        let open = all.values().filter(|info| !info.is_finishing.load(Ordering::Relaxed));
        open.filter_map(|info| {
            // In this order: what ended the stall is then seen as well.
            let is_stalled = info.is_stalled.load(Ordering::Acquire);
            let read_at = info.read_at.load(Ordering::Relaxed);
            (read_at > 0).then_some(if is_stalled { now } else { Stamp(read_at) })
        })
        .max()
    }

    /// The writers of these streams are gone: they end where their files end.
    pub fn finish(&self, streams: &[StreamId]) {
        let all = lock(&self.shared.streams);
        streams.iter().filter_map(|id| all.get(id)).for_each(|info| info.is_finishing.store(true, Ordering::Relaxed));
        drop(all);
        self.shared.send(Command::Finish(streams.to_vec()));
    }

    /// The same for every stream that was followed so far.
    pub fn finish_all(&self) {
        self.finish_those(|_| true);
    }

    /// The same for those of one rank.
    pub fn finish_rank(&self, local_rank: u32) {
        self.finish_those(|info| info.stream.local_rank == local_rank);
    }

    fn finish_those(&self, are_meant: impl Fn(&StreamInfo) -> bool) {
        let streams = lock(&self.shared.streams);
        let meant: Vec<StreamId> = streams.values().filter(|info| are_meant(info)).map(|info| info.id).collect();
        drop(streams);
        self.finish(&meant);
    }

    /// Waits until all finished streams are on the console; returns those that are not at the deadline. They go on
    /// draining all the same.
    pub async fn drained(&self, deadline: Instant) -> Vec<NotDrained> {
        let is_over = |(): &()| self.shared.is_gone.load(Ordering::Acquire) || self.shared.not_drained().is_empty();
        let mut changed = self.shared.changed.subscribe();
        // What is missing then is in the answer.
        let _ = tokio::time::timeout_at(deadline.into(), changed.wait_for(is_over)).await;
        self.shared.not_drained()
    }

    /// Ends the thread and lets go of all files. What is not on the console by now stays away from it. A thread that
    /// is stuck in a write is left behind; it ends when the write does. Idempotent.
    pub fn close(&self) {
        let thread = std::mem::replace(&mut *lock(&self.thread), Thread::Closed);
        let Thread::Started { thread, .. } = thread else { return };
        self.shared.send(Command::Stop);
        thread.leave();
    }

    /// Returns which output each destination is.
    fn start_thread(&self) -> io::Result<[usize; 2]> {
        let mut thread = lock(&self.thread);
        let console = match &mut *thread {
            Thread::Started { output_of, .. } => return Ok(*output_of),
            Thread::NotStarted(console) => console.take(),
            Thread::Closed => None,
        };
        let console = console.ok_or_else(|| io::Error::other("the logs were closed"))?;
        let (outputs, output_of) = Output::pair(console);
        let (shared, notify) = (Arc::clone(&self.shared), Arc::clone(&self.notify));
        let started = Leavable::start("elasticrs-logs", move || run_guarded(&shared, outputs, &notify))?;
        *thread = Thread::Started { output_of, thread: started };
        Ok(output_of)
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
        let mut streams = lock(&self.streams);
        streams.retain(|id, _| !through.contains(id));
        drop(streams);
        self.changed.send_replace(());
    }

    fn not_drained(&self) -> Vec<NotDrained> {
        let streams = lock(&self.streams);
        let finished = streams.values().filter(|info| info.is_finishing.load(Ordering::Relaxed));
        finished
            .map(|info| NotDrained { stream: info.stream.clone(), bytes: info.behind.load(Ordering::Relaxed) })
            .collect()
    }
}

impl StreamInfo {
    fn trouble(&self, errno: Errno) -> Notice {
        Notice::LogTrouble { local_rank: self.stream.local_rank, path: self.stream.path.clone(), errno }
    }
}

/// A panic must not leave [`Logs::drained`] waiting.
fn run_guarded(shared: &Arc<Shared>, outputs: Vec<Output>, notify: &Notify) {
    let pump = Pump::new(Arc::clone(shared), outputs, Arc::clone(notify));
    let result = catch_unwind(AssertUnwindSafe(|| pump.run()));
    shared.is_gone.store(true, Ordering::Release);
    shared.changed.send_replace(());
    if let Err(panic) = result {
        notify(Notice::Panicked { message: panic_message(panic.as_ref()) });
    }
}

/// The file and its size. It is created here so that following starts before the worker does.
fn open(stream: &LogStream) -> io::Result<(File, u64)> {
    // O_CREAT needs a writable mode in std. Opening a FIFO for both never waits.
    let options = &mut OpenOptions::new();
    let file = options.read(true).append(true).create(true).mode(0o644).open(&stream.path)?;
    let stat = file.metadata()?;
    if stat.file_type().is_fifo() || stat.file_type().is_socket() || stat.file_type().is_char_device() {
        return Err(io::Error::from_raw_os_error(libc::ESPIPE));
    }
    Ok((file, stat.len()))
}
