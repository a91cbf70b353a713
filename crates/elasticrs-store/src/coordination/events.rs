//! What a client has to tell its user.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use elasticrs_runtime::clock::{boot_now, wall_now};
use elasticrs_runtime::lock;
use elasticrs_runtime::wake::Wake;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::Notify;

use super::offset::Offset;
use super::protocol::StoreId;
use super::types::{Change, LostKind, OpResult};

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected {
        revision: u64,
        session: u64,
        /// From the last keep-alive to its end.
        ttl: Duration,
        interval: Duration,
        /// Our end of the connection, without a port.
        local_address: String,
        peer_address: String,
    },
    /// To a transaction or a watch.
    Reply { tag: u64, ok: bool, revision: u64, results: Vec<OpResult> },
    /// What one revision did to the keys that are watched.
    Changes { revision: u64, changes: Vec<Change> },
    /// A line for the user: the store is away, or there again.
    Notice { message: String },
    /// The session is over; always last.
    Lost { kind: LostKind, message: String },
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    /// How long the messages of these events were.
    bytes: usize,
    /// Boot clock: when this side gives the session up.
    deadline: Option<u64>,
    is_over: bool,
    offset: Offset,
    /// Why the store would not have answered by then.
    trouble: Option<(LostKind, String)>,
    met: Option<MetStore>,
}

/// A store that was met, and the highest revision that was seen in it.
pub type MetStore = (StoreId, u64);

/// Between the runtime thread and the user's threads.
#[derive(Debug)]
pub struct Events {
    state: Mutex<State>,
    wake: Wake,
    /// Boot clock: when the user last asked.
    asked: AtomicU64,
    /// Users that wait at this moment.
    waiting: AtomicUsize,
    /// Wakes the client's task: the session was ended from this side, or there is room for events again.
    pub(crate) wake_task: Notify,
}

/// Bytes of events that may wait for the user; one message may go beyond.
const MAX_UNTAKEN: usize = 64 << 20;

/// What the user is told when the store did not answer in time.
pub(crate) const SILENT: &str = "the store did not answer keep-alives in time: its host or the network may be down";

impl Events {
    /// An empty list.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            wake: Wake::new()?,
            asked: AtomicU64::new(boot_now()),
            waiting: AtomicUsize::new(0),
            wake_task: Notify::new(),
        })
    }

    /// Readable while [`Self::take`] has something.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Adds an event that came in so many bytes, unless the session is over.
    pub(crate) fn push(&self, event: Event, bytes: usize) {
        let mut state = lock(&self.state);
        if state.is_over {
            return;
        }
        state.is_over = matches!(event, Event::Lost { .. });
        if let (Event::Reply { revision, .. } | Event::Changes { revision, .. }, Some((_, seen))) =
            (&event, &mut state.met)
        {
            *seen = *revision.max(seen);
        }
        state.bytes += bytes;
        state.events.push_back(event);
        self.wake.set();
    }

    /// Whether the user has left so much lying that no more is read.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.state).bytes > MAX_UNTAKEN
    }

    /// A keep-alive was answered: the session holds until `deadline`.
    pub(crate) fn renewed(&self, deadline: u64, sent: u64, received: u64, wall: Option<u64>) {
        let mut state = lock(&self.state);
        state.deadline = Some(deadline);
        if let Some(wall) = wall {
            state.offset.add(sent, received, wall);
        }
    }

    /// This store is there.
    pub(crate) fn meet(&self, store: StoreId, revision: u64) {
        lock(&self.state).met = Some((store, revision));
    }

    /// The store that was met last.
    pub fn met(&self) -> Option<MetStore> {
        lock(&self.state).met
    }

    /// Why the store does not answer, as far as that is known.
    pub(crate) fn set_trouble(&self, trouble: Option<(LostKind, String)>) {
        lock(&self.state).trouble = trouble;
    }

    /// As it was set.
    pub(crate) fn trouble(&self) -> Option<(LostKind, String)> {
        lock(&self.state).trouble.clone()
    }

    /// Whether nothing more will come.
    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).is_over
    }

    /// No more events: the user has closed the client.
    pub(crate) fn finish(&self) {
        lock(&self.state).is_over = true;
        // Whoever waits has nothing to wait for.
        self.wake.set();
        self.wake_task.notify_one();
    }

    /// All events; never blocks. One that has missed its deadline says so here, even if the runtime has not run since.
    pub fn take(&self) -> VecDeque<Event> {
        let now = boot_now();
        self.asked.store(now, Ordering::Relaxed);
        let mut state = lock(&self.state);
        self.wake.clear();
        if !state.is_over && state.deadline.is_some_and(|deadline| now >= deadline) {
            state.is_over = true;
            let (kind, message) = state.trouble.take().unwrap_or_else(|| (LostKind::Silent, SILENT.into()));
            state.events.push_back(Event::Lost { kind, message });
            self.wake_task.notify_one();
        }
        if std::mem::take(&mut state.bytes) > MAX_UNTAKEN {
            self.wake_task.notify_one();
        }
        std::mem::take(&mut state.events)
    }

    /// Blocks until there is something to take, a signal came, or the time is over; whether there is something.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let found = self.wait_until(deadline);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.asked.store(boot_now(), Ordering::Relaxed);
        found
    }

    fn wait_until(&self, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            if self.has_nothing_to_come() {
                return Ok(false);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let step = match left {
                // Rounded up: waking before the time would only mean to wait again.
                Some(left) => PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX),
                None => PollTimeout::NONE,
            };
            let mut fds = [PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, step) {
                Ok(0) if deadline.is_some_and(|deadline| Instant::now() < deadline) => {}
                Ok(ready) => return Ok(ready > 0),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Everything was taken, and the session is over.
    pub fn has_nothing_to_come(&self) -> bool {
        let state = lock(&self.state);
        state.is_over && state.events.is_empty()
    }

    /// Whether the user has not asked for so long, and does not wait either.
    pub(crate) fn is_stalled(&self, limit: Option<Duration>) -> bool {
        let Some(limit) = limit else { return false };
        let since = boot_now().saturating_sub(self.asked.load(Ordering::Relaxed));
        self.waiting.load(Ordering::Relaxed) == 0 && u128::from(since) > limit.as_nanos()
    }

    /// The store's wall clock minus ours, and by how much that may be wrong. Nanoseconds.
    pub fn clock(&self) -> Option<(i64, u64)> {
        lock(&self.state).offset.estimate(boot_now(), wall_now())
    }
}
