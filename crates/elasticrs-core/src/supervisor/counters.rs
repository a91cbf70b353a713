//! Counters and heartbeats for status displays. Other threads can read them without waiting for the runtime
//! thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticrs_runtime::lock;
use elasticrs_runtime::readings::{Heartbeat, Readings, Source, TimerCounts};
use elasticrs_sys::clock::Stamp;

use crate::logs::LogTotals;
use crate::timer::hang::{Beat, RankState};
use crate::timer::pages::HeartbeatPage;

/// Counts active expiration timers, expired timers, and expired timers that were handled late.
#[derive(Debug, Default)]
pub struct TimerCounters {
    live: AtomicU64,
    expired: AtomicU64,
    late: AtomicU64,
}

impl TimerCounters {
    fn read(&self) -> TimerCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TimerCounts { live: of(&self.live), expired: of(&self.expired), late: of(&self.late) }
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

/// An expired timer is late if it is handled more than this number of nanoseconds after its deadline.
pub(crate) const LATE_NS: u64 = 10_000_000;

/// Memory pages that contain the workers' heartbeats. If no group is running, these are the pages of the last group.
#[derive(Debug, Default)]
pub struct Heartbeats {
    pages: Mutex<Vec<Arc<HeartbeatPage>>>,
}

impl Heartbeats {
    /// Returns the last heartbeat of each worker that has sent one. Reads shared memory, so it never waits for the
    /// runtime thread.
    pub fn all(&self) -> Vec<Heartbeat> {
        let now = Stamp::now().0;
        (0..).zip(lock(&self.pages).iter()).filter_map(|(rank, page)| page.read(now).heartbeat(rank)).collect()
    }

    pub(crate) fn set(&self, pages: Vec<Arc<HeartbeatPage>>) {
        *lock(&self.pages) = pages;
    }
}

impl RankState {
    /// Returns the last heartbeat of the rank. `None` if the rank has not sent a heartbeat yet, or has exited.
    pub(crate) fn heartbeat(&self, local_rank: u32) -> Option<Heartbeat> {
        let Self::Heartbeat(beat) = self else { return None };
        let section = beat.section.as_ref().map(|section| section.name.clone());
        let Beat { last, step, is_global, is_automatic, is_exiting, .. } = *beat;
        let (at, has_returned) = (Stamp(last), is_exiting);
        Some(Heartbeat { local_rank, at, step, is_global, is_automatic, section, has_returned })
    }
}

/// Measures how long the agent's event loop has been handling its current event. Time spent waiting for an event
/// is not included.
#[derive(Debug)]
pub struct Turn {
    /// Time at which the loop started to handle the current event, in nanoseconds of the monotonic clock. [`WAITS`] if
    /// the loop is waiting for an event.
    since: AtomicU64,
}

const WAITS: u64 = u64::MAX;

impl Default for Turn {
    fn default() -> Self {
        Self { since: AtomicU64::new(Stamp::now().0) }
    }
}

impl Turn {
    /// Returns how long the loop has been handling the current event. `None` if the loop is waiting for an event.
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

/// All counters of one supervisor.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    pub timers: Arc<TimerCounters>,
    pub logs: Arc<LogTotals>,
    pub heartbeats: Arc<Heartbeats>,
    /// Time that the agent's event loop has spent on its current event.
    pub turn: Arc<Turn>,
}

impl Source for Counters {
    fn read(&self) -> Readings {
        Readings { timers: self.timers.read(), logs: self.logs.all(), heartbeats: self.heartbeats.all() }
    }

    fn at_work(&self) -> Option<Duration> {
        self.turn.at_work()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_loop_counts_as_busy_until_it_waits() {
        let turn = Turn::default();
        assert!(turn.at_work().is_some());
        turn.waits();
        assert_eq!(turn.at_work(), None);
        turn.works();
        turn.since.fetch_sub(60_000_000_000, Ordering::Relaxed);
        assert!(turn.at_work().unwrap() >= Duration::from_secs(60));
    }

    #[test]
    fn an_expired_timer_counts_as_late_only_beyond_the_limit() {
        let counts = TimerCounters::default();
        counts.add_expired(LATE_NS);
        counts.add_expired(LATE_NS + 1);
        counts.set_live(7);
        assert_eq!(counts.read(), TimerCounts { live: 7, expired: 2, late: 1 });
    }
}
