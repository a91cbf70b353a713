//! What the runtime counts, for whoever shows it: a handle that other threads read without asking anybody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticrs_runtime::clock::Stamp;
use elasticrs_runtime::lock;

use super::event::Heartbeat;
use crate::logs::LogTotals;
use crate::timer::hang::Seen;
use crate::timer::pages::HeartbeatPage;

/// Timers of the workers.
#[derive(Debug, Default)]
pub struct TimerCounts {
    live: AtomicU64,
    expired: AtomicU64,
    late: AtomicU64,
}

impl TimerCounts {
    /// How many are live now.
    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// How many have expired so far.
    pub fn expired(&self) -> u64 {
        self.expired.load(Ordering::Relaxed)
    }

    /// How many of these were seen more than [`LATE_NS`] after their deadline.
    pub fn late(&self) -> u64 {
        self.late.load(Ordering::Relaxed)
    }

    pub(crate) fn set_live(&self, live: usize) {
        self.live.store(live as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_expired(&self, lateness_ns: u64) {
        self.expired.fetch_add(1, Ordering::Relaxed);
        if lateness_ns > LATE_NS {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A timer that is acted on later than this is late.
pub const LATE_NS: u64 = 10_000_000;

/// The pages in which workers leave their heartbeats, of the group that runs or ran last.
#[derive(Debug, Default)]
pub struct Heartbeats {
    pages: Mutex<Vec<Arc<HeartbeatPage>>>,
}

impl Heartbeats {
    /// The last one of each worker that had any. Reads memory that is shared with the workers, and asks nobody.
    pub fn all(&self) -> Vec<Heartbeat> {
        let now = Stamp::now().0;
        (0..).zip(lock(&self.pages).iter()).filter_map(|(rank, page)| Heartbeat::of(rank, &page.read(now))).collect()
    }

    pub(crate) fn set(&self, pages: Vec<Arc<HeartbeatPage>>) {
        *lock(&self.pages) = pages;
    }
}

impl Heartbeat {
    /// What is known of this worker, if it has given any.
    pub(crate) fn of(local_rank: u32, seen: &Seen) -> Option<Self> {
        let Seen::Beat(beat) = seen else { return None };
        let section = beat.section.as_ref().map(|section| section.name.clone());
        Some(Self { local_rank, at: Stamp(beat.last), step: beat.step, section })
    }
}

/// Since when the agent's loop is at work on what woke it last. A loop that waits for events may do so for ever.
#[derive(Debug)]
pub struct Turn {
    /// Monotonic nanoseconds, or [`WAITS`].
    since: AtomicU64,
}

const WAITS: u64 = u64::MAX;

impl Default for Turn {
    fn default() -> Self {
        Self { since: AtomicU64::new(Stamp::now().0) }
    }
}

impl Turn {
    /// For how long it has not come back to wait; `None` while it waits.
    pub fn at_work(&self) -> Option<Duration> {
        let since = self.since.load(Ordering::Relaxed);
        (since != WAITS).then(|| Duration::from_nanos(Stamp::now().0.saturating_sub(since)))
    }

    pub(crate) fn waits(&self) {
        self.since.store(WAITS, Ordering::Relaxed);
    }

    pub(crate) fn works(&self) {
        self.since.store(Stamp::now().0, Ordering::Relaxed);
    }
}

/// Everything that one supervisor counts.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    pub timers: Arc<TimerCounts>,
    pub logs: Arc<LogTotals>,
    pub heartbeats: Arc<Heartbeats>,
    /// Of the loop that takes the supervisor's events.
    pub turn: Arc<Turn>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_at_work_until_it_waits() {
        let turn = Turn::default();
        assert!(turn.at_work().is_some());
        turn.waits();
        assert_eq!(turn.at_work(), None);
        turn.works();
        turn.since.fetch_sub(60_000_000_000, Ordering::Relaxed);
        assert!(turn.at_work().unwrap() >= Duration::from_secs(60));
    }

    #[test]
    fn a_timer_is_late_beyond_the_limit() {
        let counts = TimerCounts::default();
        counts.add_expired(LATE_NS);
        counts.add_expired(LATE_NS + 1);
        counts.set_live(7);
        assert_eq!((counts.live(), counts.expired(), counts.late()), (7, 2, 1));
    }
}
