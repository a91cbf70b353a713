//! How much workers write to files that nobody reads: from the sizes of these files, which a thread of its own looks at.
//!
//! A look at a file of a dead network mount may never return. So nobody but this thread looks: it sleeps until a scrape
//! asks, or an attempt begins or ends, and a scrape waits for it a moment at most, once.
//!
//! - **SIZES-1** a count never goes down: of a file that has become smaller, all of its bytes are new;
//! - **SIZES-2** no lock is held during a look: what is known can be told, and more can be asked for, while it hangs;
//! - **SIZES-3** every file is looked at once more when its attempt has ended, whether or not somebody asks.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use elasticrs_core::logs::Dest;
use elasticrs_runtime::lock;
use elasticrs_runtime::threads::Leavable;
use tokio::sync::watch;
use tokio::time::timeout_at;

/// How long a scrape waits for the thread. One that has been busy for longer is not waited for at all.
pub const PATIENCE: Duration = Duration::from_millis(200);

/// Whose output, by local rank.
pub type Stream = (u32, Dest);

/// Where one worker's stream goes, and nobody else's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFile {
    pub stream: Stream,
    pub path: PathBuf,
    /// It was not there when the attempt was prepared; otherwise only what comes after the first look counts.
    pub is_new: bool,
}

/// What a look has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    Absent,
    /// A file that has so many bytes, with its device and number.
    File((u64, u64), u64),
    /// Something that has no size, or an error.
    Unknown,
}

/// Looks at a file. May block for as long as its file system likes.
fn look(path: &Path) -> Look {
    match std::fs::metadata(path) {
        Ok(stat) if stat.is_file() => Look::File((stat.dev(), stat.ino()), stat.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Look::Absent,
        Ok(_) | Err(_) => Look::Unknown,
    }
}

/// The counts, as a pure function of looks.
#[derive(Debug, Default)]
struct Tally {
    counts: BTreeMap<Stream, u64>,
    files: BTreeMap<PathBuf, Watched>,
}

#[derive(Debug)]
struct Watched {
    stream: Stream,
    last: Look,
    /// Nothing was seen of it in this attempt.
    is_first: bool,
}

impl Tally {
    /// Another attempt begins. A file that an earlier one wrote as well goes on from where that ended.
    fn begin(&mut self, files: Vec<LogFile>) {
        let mut earlier = std::mem::take(&mut self.files);
        for LogFile { stream, path, is_new } in files {
            let known = earlier.remove(&path).map(|file| file.last);
            let last = if is_new { Look::Absent } else { known.unwrap_or(Look::Unknown) };
            self.files.insert(path, Watched { stream, last, is_first: true });
        }
    }

    /// SIZES-1. Returns the stream and its new count.
    fn saw(&mut self, path: &Path, now: Look) -> Option<(Stream, u64)> {
        let file = self.files.get_mut(path)?;
        let is_first = file.is_first;
        let added = match (file.last, now) {
            (_, Look::Unknown) => return None,
            (Look::Absent, Look::File(_, size)) => size,
            (Look::File(before, from), Look::File(number, size)) if before == number => {
                size.checked_sub(from).unwrap_or(size)
            }
            // The worker's was moved away, and what is there now, if anything, is not.
            (Look::File(..), _) if !is_first => return None,
            // Nothing, or nobody knows how much of it is the worker's.
            (_, Look::Absent | Look::File(..)) => 0,
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

/// What the thread is to do: another attempt begins with these files, or a look at those that there are.
type Turn = Option<Vec<LogFile>>;

#[derive(Default)]
struct State {
    turns: Option<mpsc::Sender<Turn>>,
    counts: BTreeMap<Stream, u64>,
    is_watching: bool,
    /// Turns of the thread that were asked for, and begun.
    wanted: u64,
    begun: u64,
    /// Since when something has been wanted that is not done.
    waiting_since: Option<Instant>,
    looked_at: Option<Instant>,
}

impl State {
    fn want(&mut self, turn: Turn, now: Instant) {
        // Refused by a thread that has panicked: counts stand still.
        if self.turns.as_ref().is_some_and(|turns| turns.send(turn).is_ok()) {
            self.wanted += 1;
            self.waiting_since.get_or_insert(now);
        }
    }

    /// Another look, unless one is to come anyway.
    fn want_look(&mut self) {
        if self.wanted == self.begun {
            self.want(None, Instant::now());
        }
    }
}

/// What is known at a moment.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Bytes of all attempts.
    pub counts: BTreeMap<Stream, u64>,
    /// How old that is, when it could be newer.
    pub age: Option<Duration>,
}

/// The thread, and what it has found.
#[derive(Default)]
pub struct LogSizes {
    shared: Arc<Shared>,
    thread: Mutex<Option<Leavable>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Turns of the thread that are over.
    done: watch::Sender<u64>,
}

impl LogSizes {
    /// An attempt begins that will write to these files. Returns at once, and so do all others that are not async.
    pub fn begin(&self, files: Vec<LogFile>) -> io::Result<()> {
        self.begin_with(files, look)
    }

    fn begin_with(&self, files: Vec<LogFile>, look: impl Fn(&Path) -> Look + Send + 'static) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut state = lock(&self.shared.state);
        if state.turns.is_none() {
            let (turns, inbox) = mpsc::channel();
            let shared = Arc::clone(&self.shared);
            *lock(&self.thread) = Some(Leavable::start("elasticrs-sizes", move || shared.run(&inbox, look))?);
            state.turns = Some(turns);
        }
        for file in &files {
            state.counts.entry(file.stream).or_default();
        }
        state.is_watching = true;
        state.looked_at.get_or_insert(now);
        state.want(Some(files), now);
        Ok(())
    }

    /// SIZES-3.
    pub fn end(&self) {
        let mut state = lock(&self.shared.state);
        if std::mem::take(&mut state.is_watching) {
            state.want_look();
        }
    }

    /// Waits until all was looked at after this call, for [`PATIENCE`] at most.
    pub async fn ask(&self) {
        let (target, since) = {
            let mut state = lock(&self.shared.state);
            if state.is_watching {
                state.want_look();
            }
            (state.wanted, state.waiting_since)
        };
        if let Some(since) = since {
            let mut done = self.shared.done.subscribe();
            // In vain: then what is known says how old it is.
            let _ = timeout_at((since + PATIENCE).into(), done.wait_for(|done| *done >= target)).await;
        }
    }

    /// SIZES-2.
    pub fn known(&self, now: Instant) -> Known {
        let state = lock(&self.shared.state);
        let is_current = !state.is_watching && state.waiting_since.is_none();
        let age = state.looked_at.filter(|_| !is_current).map(|at| now.saturating_duration_since(at));
        Known { counts: state.counts.clone(), age }
    }

    /// Ends the thread; one that is stuck is left behind, and ends when its look does. Idempotent.
    pub fn close(&self) {
        lock(&self.shared.state).turns = None;
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            thread.leave();
        }
    }
}

impl Shared {
    fn run(&self, turns: &mpsc::Receiver<Turn>, look: impl Fn(&Path) -> Look) {
        let mut tally = Tally::default();
        for turn in turns {
            lock(&self.state).begun += 1;
            if let Some(files) = turn {
                tally.begin(files);
            }
            for path in tally.paths() {
                let now = look(&path);
                if let Some((stream, count)) = tally.saw(&path, now) {
                    lock(&self.state).counts.insert(stream, count);
                }
            }
            self.end_turn();
        }
    }

    fn end_turn(&self) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.looked_at = Some(now);
        // The thread does one turn after the other: this was the last one that has begun.
        state.waiting_since = (state.wanted > state.begun).then_some(now);
        self.done.send_replace(state.begun);
    }
}

#[cfg(test)]
#[path = "log_sizes_tests.rs"]
mod tests;
