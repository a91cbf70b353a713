//! Deadlines of the group, at most one for each kind of timer. All deadlines are paused while the group is suspended.

use std::time::{Duration, Instant};

use elasticrs_nursery::protocol::SweepLimits;

/// A kind of deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deadline {
    /// Deadline by which all workers must be running.
    Start,
    /// Time at which the supervisor checks the deadline for killing all workers. The supervisor checks it only while a
    /// worker is being started, because the nursery process is blocked during a start.
    Fence,
    /// Deadline for a warm nursery to finish its module imports.
    Warm,
    /// Time at which the user is notified that an import is still running.
    SlowImport,
    /// End of the grace period, which starts with the first stop signal. Workers that are still running then get
    /// SIGKILL.
    Kill,
    /// Deadline for workers to exit after SIGKILL. Once it has passed, the supervisor stops waiting for the workers.
    GiveUp,
    /// Deadline for a sweep to finish. A sweep cleans up leftover processes.
    Sweep,
    /// Time limit for the workers to copy their states before they are stopped.
    Copies,
    /// Next check for dead workers whose exits the nursery has not reported.
    Check,
    /// Time of the next check for hung workers.
    Hang,
    /// Time of the next check that the worker with this local rank makes progress in exiting after an exception.
    Exit(u32),
    /// Time at which the user is notified that the worker with this local rank is paused, because a signal has
    /// stopped it.
    Paused(u32),
    /// Deadline for the failed worker with this local rank to exit.
    Condemned(u32),
    /// Deadline by which the replacement for the worker with this local rank must be running.
    Replace(u32),
}

/// Time limit for processes to exit after SIGKILL. A process that hangs in the kernel (state D) may exceed it.
pub(crate) const GIVE_UP_AFTER: Duration = Duration::from_secs(30);
/// Time limits of a clean-up that sends SIGKILL at once.
pub(crate) const AT_ONCE: SweepLimits = SweepLimits::at_once(GIVE_UP_AFTER);

/// The times at which the supervisor's deadlines expire. For each kind of [`Deadline`], at most one time is set.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    armed: Vec<(Deadline, Instant)>,
    frozen_at: Option<Instant>,
}

impl Deadlines {
    /// Sets the deadline of `timer` to `delay` after `now`. Replaces the previous deadline of this timer.
    pub(super) fn arm(&mut self, timer: Deadline, delay: Duration, now: Instant) {
        self.disarm(timer);
        self.armed.push((timer, after(now, delay)));
    }

    /// Like [`Self::arm`], but keeps the current deadline of the timer if that is earlier.
    pub(super) fn hasten(&mut self, timer: Deadline, delay: Duration, now: Instant) {
        let sooner = self.armed.iter().all(|(t, at)| *t != timer || after(now, delay) < *at);
        if sooner {
            self.arm(timer, delay, now);
        }
    }

    pub(super) fn disarm(&mut self, timer: Deadline) {
        self.armed.retain(|(t, _)| *t != timer);
    }

    pub(super) fn clear(&mut self) {
        self.armed.clear();
    }

    /// Returns the earliest deadline. `None` while the deadlines are paused, or if none is set.
    pub(super) fn next(&self) -> Option<Instant> {
        if self.frozen_at.is_some() {
            return None;
        }
        self.armed.iter().map(|(_, at)| *at).min()
    }

    /// Removes the earliest deadline that has passed and returns its timer. `None` if no deadline has passed.
    pub(super) fn expired(&mut self, now: Instant) -> Option<Deadline> {
        if self.frozen_at.is_some() {
            return None;
        }
        let (index, (timer, _)) =
            self.armed.iter().copied().enumerate().filter(|(_, (_, at))| *at <= now).min_by_key(|(_, (_, at))| *at)?;
        self.armed.swap_remove(index);
        Some(timer)
    }

    /// Pauses all deadlines from `now` on.
    pub(super) fn freeze(&mut self, now: Instant) {
        self.frozen_at.get_or_insert(now);
    }

    /// Resumes all deadlines and postpones each of them by the length of the pause.
    pub(super) fn thaw(&mut self, now: Instant) {
        if let Some(since) = self.frozen_at.take() {
            let pause = now.saturating_duration_since(since);
            for (_, at) in &mut self.armed {
                *at += pause;
            }
        }
    }
}

/// Returns `now + delay`. Caps the delay at one year, because the sum could otherwise overflow.
pub(super) fn after(now: Instant, delay: Duration) -> Instant {
    now + delay.min(Duration::from_secs(365 * 24 * 3600))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn passed_deadlines_are_returned_earliest_first() {
        let t0 = Instant::now();
        let mut deadlines = Deadlines::default();
        deadlines.arm(Deadline::GiveUp, ms(20), t0);
        deadlines.arm(Deadline::Kill, ms(10), t0);
        assert_eq!(deadlines.next(), Some(t0 + ms(10)));
        assert_eq!(deadlines.expired(t0 + ms(9)), None);
        assert_eq!(deadlines.expired(t0 + ms(30)), Some(Deadline::Kill));
        assert_eq!(deadlines.expired(t0 + ms(30)), Some(Deadline::GiveUp));
        assert_eq!(deadlines.expired(t0 + ms(30)), None);
    }

    #[test]
    fn a_frozen_deadline_is_extended_by_the_pause() {
        let t0 = Instant::now();
        let mut deadlines = Deadlines::default();
        deadlines.arm(Deadline::Kill, ms(10), t0);
        deadlines.freeze(t0 + ms(4));
        assert_eq!(deadlines.next(), None);
        assert_eq!(deadlines.expired(t0 + ms(100)), None);
        deadlines.thaw(t0 + ms(100));
        assert_eq!(deadlines.next(), Some(t0 + ms(106)));
    }

    #[test]
    fn hastening_a_deadline_never_delays_it() {
        let t0 = Instant::now();
        let mut deadlines = Deadlines::default();
        deadlines.hasten(Deadline::Kill, ms(30), t0);
        deadlines.hasten(Deadline::Kill, ms(30), t0 + ms(10));
        assert_eq!(deadlines.next(), Some(t0 + ms(30)));
        deadlines.hasten(Deadline::Kill, ms(5), t0 + ms(10));
        assert_eq!(deadlines.next(), Some(t0 + ms(15)));
    }

    #[test]
    fn a_delay_beyond_the_range_of_the_clock_is_accepted() {
        let t0 = Instant::now();
        let mut deadlines = Deadlines::default();
        deadlines.arm(Deadline::Kill, Duration::MAX, t0);
        deadlines.hasten(Deadline::Kill, Duration::MAX, t0 + ms(10));
        assert_eq!(deadlines.next(), Some(after(t0, Duration::MAX)));
    }

    proptest! {
        #[test]
        fn deadlines_expire_in_order(delays in proptest::collection::vec(0_u64..1000, 0..20)) {
            let t0 = Instant::now();
            let mut deadlines = Deadlines::default();
            for (rank, delay) in (0_u32..).zip(&delays) {
                deadlines.arm(Deadline::Paused(rank), ms(*delay), t0);
            }
            let mut seen = Vec::new();
            while let Some(Deadline::Paused(rank)) = deadlines.expired(t0 + ms(1000)) {
                seen.push(delays[rank as usize]);
            }
            let mut sorted = delays.clone();
            sorted.sort_unstable();
            prop_assert_eq!(seen, sorted);
        }
    }
}
