//! Queue of the events that a client reports to its user. Also estimates the store's wall clock. Rules for the use of
//! clocks:
//!
//! - **CLOCK-1** Deadlines use the boot clock, because it keeps running during suspend and cannot be set.
//! - **CLOCK-2** Wall-clock times, including the estimate, are used only in reports.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use elasticrs_runtime::lock;
use elasticrs_runtime::threads::WakeFd;
use elasticrs_sys::clock::{boot_now, wall_now};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::Notify;

use super::error::StoreError;
use crate::types::{Change, LostKind, OpResult, StoreId};

/// An event that a client reports to its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Connected {
        revision: u64,
        session: u64,
        /// Session timeout, which each keep-alive restarts.
        ttl: Duration,
        interval: Duration,
        /// Local address of the connection, without the port.
        local_address: String,
    },
    /// Reply to a transaction or a watch.
    Reply { tag: u64, ok: bool, revision: u64, results: Vec<OpResult> },
    /// Changes that one revision made to watched keys.
    Changes { revision: u64, changes: Vec<Change> },
    /// Message for the user, for example that the store does not answer, or that it answers again.
    Notice { message: String },
    /// The session has ended. Always the last event.
    ConnectionLost { kind: LostKind, message: String },
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    /// Total length of the messages from which the queued events were decoded, in bytes.
    bytes: usize,
    /// Time at which the client considers the session lost, in nanoseconds of the boot clock.
    deadline: Option<u64>,
    is_over: bool,
    offset: Offset,
    /// Reason why the store does not answer. If the session is lost, the user receives this reason.
    outage_reason: Option<StoreError>,
    met: Option<MetStore>,
}

/// ID of the store to which the client last connected, and the highest revision received from it.
pub(crate) type MetStore = (StoreId, u64);

/// Event queue between the runtime thread and the user's threads.
#[derive(Debug)]
pub struct Events {
    state: Mutex<State>,
    wake: WakeFd,
    /// Time of the user's last call of [`Self::take`] or [`Self::wait`], in nanoseconds of the boot clock.
    asked: AtomicU64,
    /// Number of threads that are currently in [`Self::wait`].
    waiting: AtomicUsize,
    /// Wakes the client's task when a user's thread has ended the session or has made room in the full queue.
    pub(crate) wake_task: Notify,
}

/// Total size of the queued events, in bytes, above which the client stops reading from the store.
const MAX_UNTAKEN: usize = 64 << 20;

/// Message to the user if the session is lost because the store did not answer in time.
pub(crate) const SILENT: &str = "the store did not answer keep-alives in time: its host or the network may be down";

impl Events {
    /// Creates an empty queue.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            wake: WakeFd::new()?,
            asked: AtomicU64::new(boot_now()),
            waiting: AtomicUsize::new(0),
            wake_task: Notify::new(),
        })
    }

    /// Returns a file descriptor that is readable while [`Self::take`] would return events.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Adds an event, unless the session is over. `bytes` is the length of the message from which the event was
    /// decoded.
    pub(crate) fn push(&self, event: Event, bytes: usize) {
        let mut state = lock(&self.state);
        if state.is_over {
            return;
        }
        state.is_over = matches!(event, Event::ConnectionLost { .. });
        if let (Event::Reply { revision, .. } | Event::Changes { revision, .. }, Some((_, seen))) =
            (&event, &mut state.met)
        {
            *seen = *revision.max(seen);
        }
        state.bytes += bytes;
        state.events.push_back(event);
        self.wake.set();
    }

    /// Returns true if the queue is full. The client then stops reading from its socket.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.state).bytes > MAX_UNTAKEN
    }

    /// Records that the session lasts at least until `deadline`.
    ///
    /// `clock` describes the last answered keep-alive: when it was sent and when its answer arrived (both on the boot
    /// clock), and the store's wall-clock time in the answer.
    pub(crate) fn renewed(&self, deadline: u64, clock: Option<(u64, u64, u64)>) {
        let mut state = lock(&self.state);
        state.deadline = Some(deadline);
        if let Some((sent, received, wall)) = clock {
            state.offset.add(sent, received, wall);
        }
    }

    /// Records the store that the client is connected to, and the store's revision.
    pub(crate) fn meet(&self, store: StoreId, revision: u64) {
        lock(&self.state).met = Some((store, revision));
    }

    /// Returns the store that the client last connected to, and the highest revision received from it.
    pub fn met(&self) -> Option<MetStore> {
        lock(&self.state).met
    }

    /// Sets the reason why the store does not answer. `None` if there is no outage.
    pub(crate) fn set_outage_reason(&self, reason: Option<StoreError>) {
        lock(&self.state).outage_reason = reason;
    }

    /// Returns the reason why the store does not answer. `None` if there is no outage.
    pub(crate) fn outage_reason(&self) -> Option<StoreError> {
        lock(&self.state).outage_reason.clone()
    }

    /// Returns true if no more events will be added.
    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).is_over
    }

    /// Closes the queue, because the user has closed the client.
    pub(crate) fn finish(&self) {
        lock(&self.state).is_over = true;
        // Wake the waiting threads, because no further event will wake them.
        self.wake.set();
        self.wake_task.notify_one();
    }

    /// Returns all queued events without blocking. If the session's deadline has passed, adds
    /// [`Event::ConnectionLost`], so that the user is notified even if the runtime thread hangs.
    pub fn take(&self) -> VecDeque<Event> {
        let now = boot_now();
        self.asked.store(now, Ordering::Relaxed);
        let mut state = lock(&self.state);
        self.wake.clear();
        if !state.is_over && state.deadline.is_some_and(|deadline| now >= deadline) {
            state.is_over = true;
            let silent = || StoreError::new(LostKind::Silent, SILENT);
            let StoreError { kind, message } = state.outage_reason.take().unwrap_or_else(silent);
            state.events.push_back(Event::ConnectionLost { kind, message });
            self.wake_task.notify_one();
        }
        if std::mem::take(&mut state.bytes) > MAX_UNTAKEN {
            self.wake_task.notify_one();
        }
        std::mem::take(&mut state.events)
    }

    /// Blocks until events are queued or the timeout elapses. Returns true if events are queued. Fails with `EINTR`
    /// if a signal arrives.
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
                // Round up, because waking up early would only lead to another wait.
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

    /// Returns true if the session is over and the user has taken all events.
    pub fn has_nothing_to_come(&self) -> bool {
        let state = lock(&self.state);
        state.is_over && state.events.is_empty()
    }

    /// Returns true if the user has not fetched events for longer than `limit` and is not waiting for any.
    pub(crate) fn is_stalled(&self, limit: Option<Duration>) -> bool {
        let Some(limit) = limit else { return false };
        let since = boot_now().saturating_sub(self.asked.load(Ordering::Relaxed));
        self.waiting.load(Ordering::Relaxed) == 0 && u128::from(since) > limit.as_nanos()
    }

    /// Returns the store's wall clock minus the local one, and the maximum error of this estimate, both in nanoseconds.
    pub fn clock(&self) -> Option<(i64, u64)> {
        lock(&self.state).offset.estimate(boot_now(), wall_now())
    }
}

/// One measurement of the offset between the store's wall clock and the local boot clock, made with a keep-alive and
/// its answer.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// The store's wall clock minus the local boot clock, in nanoseconds.
    offset: i128,
    /// Maximum error of `offset`: half of the round-trip time, in nanoseconds.
    error: u64,
    /// Time at which the answer arrived, in nanoseconds of the local boot clock.
    taken: u64,
}

/// Maximum drift between two working clocks that is assumed here, in nanoseconds per second.
const DRIFT_PER_SECOND: u64 = 100_000;
/// Maximum number of samples of the clock offset to keep.
const SAMPLES: usize = 16;

/// Estimates the store's wall clock from samples.
#[derive(Debug, Default)]
pub(super) struct Offset {
    samples: VecDeque<Sample>,
}

impl Offset {
    /// Adds a sample. `sent` and `received` are times on the local boot clock. `wall` is the store's wall-clock time
    /// at some moment between them.
    pub(super) fn add(&mut self, sent: u64, received: u64, wall: u64) {
        let error = received.saturating_sub(sent) / 2;
        let offset = i128::from(wall) - i128::from(received) + i128::from(error);
        let sample = Sample { offset, error, taken: received };
        // Drop older samples that contradict the new one, because the store's clock must have been set in the meantime.
        self.samples
            .retain(|old| old.offset.abs_diff(offset) <= u128::from(error_at(old, received)) + u128::from(error));
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the store's wall clock minus the local one, and the maximum error of this difference, in nanoseconds.
    pub(super) fn estimate(&self, boot: u64, wall: u64) -> Option<(i64, u64)> {
        let best = self.samples.iter().min_by_key(|sample| error_at(sample, boot))?;
        let theirs = best.offset + i128::from(boot);
        Some((i64::try_from(theirs - i128::from(wall)).ok()?, error_at(best, boot)))
    }
}

fn error_at(sample: &Sample, now: u64) -> u64 {
    let age = now.saturating_sub(sample.taken);
    sample.error + age / 1_000_000_000 * DRIFT_PER_SECOND + age % 1_000_000_000 * DRIFT_PER_SECOND / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn there_is_no_clock_offset_estimate_without_an_answer() {
        assert_eq!(Offset::default().estimate(5, 5), None);
    }

    #[test]
    fn the_clock_offset_comes_from_the_fastest_recent_answer() {
        let mut offset = Offset::default();
        offset.add(10 * S, 10 * S + 1_000, 1000 * S);
        offset.add(11 * S, 11 * S + 100_000_000, 1001 * S + 10_000_000);
        let (_, error) = offset.estimate(11 * S, 11 * S).unwrap();
        assert!(error < 200_000, "{error}");
        offset.add(5000 * S, 5000 * S + 1_000_000, 5990 * S);
        assert_eq!(offset.estimate(5000 * S + 1_000_000, 0).unwrap().1, 500_000);
    }

    #[test]
    fn the_clock_offset_follows_a_step_of_the_clock() {
        let mut offset = Offset::default();
        offset.add(10 * S, 10 * S, 1000 * S);
        offset.add(11 * S, 11 * S + 2_000, 2001 * S);
        assert_eq!(offset.estimate(11 * S + 2_000, 0), Some((2001 * 1_000_000_000 + 1_000, 1_000)));
    }

    proptest! {
        #[test]
        fn the_true_clock_offset_is_within_the_estimated_error(
            delays in prop::collection::vec((0..50_000_000_u64, 0..50_000_000_u64), 1..40),
            apart in -1_000_000_000_000_i64..1_000_000_000_000,
        ) {
            let mut offset = Offset::default();
            let mut now = 1_000 * S;
            let base = 2_000_000 * S;
            for (there, back) in delays {
                let wall = (base + now + there).checked_add_signed(apart).unwrap();
                offset.add(now, now + there + back, wall);
                now += S;
            }
            let (found, error) = offset.estimate(now, base + now).unwrap();
            prop_assert!(found.abs_diff(apart) <= error, "{found} {apart} {error}");
        }
    }
}
