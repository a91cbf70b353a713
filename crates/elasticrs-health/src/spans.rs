//! Breakdown of an agent's time by activity. The agent has exactly one activity at any time.

use std::time::{Duration, Instant};

use elasticrs_sys::named_enum;

named_enum! {
    /// Current activity of an agent. The strings are the values of the `activity` label in the metrics.
    pub enum Activity {
        /// The workers are being started for the first time.
        Starting = "starting",
        /// The workers are running, and no failure is known.
        Productive = "productive",
        /// Workers have failed and are not running again yet.
        Restarting = "restarting",
        /// The agent is waiting for other nodes in a rendezvous.
        WaitingForNodes = "waiting_for_nodes",
        /// The workers are running, but at least one of them hangs.
        Hung = "hung",
    }
}

/// Time spent on each activity.
#[derive(Debug, Clone)]
pub struct Spans {
    now: Activity,
    since: Instant,
    totals: [Duration; Activity::ALL.len()],
}

impl Spans {
    /// Starts measuring the time spent on each activity, with [`Activity::Starting`] as the current activity. `now` is
    /// the current time.
    pub fn new(now: Instant) -> Self {
        Self { now: Activity::Starting, since: now, totals: Default::default() }
    }

    /// Ends the current activity at `now` and starts `activity`.
    pub fn enter(&mut self, activity: Activity, now: Instant) {
        self.totals[self.now as usize] += now.saturating_duration_since(self.since);
        (self.now, self.since) = (activity, now);
    }

    /// Moves `span` from productive time to hung time. Called when a hung worker is detected, with the time for which
    /// it has hung so far.
    pub fn was_hung(&mut self, span: Duration, now: Instant) {
        self.enter(self.now, now);
        let moved = span.min(self.totals[Activity::Productive as usize]);
        self.totals[Activity::Productive as usize] -= moved;
        self.totals[Activity::Hung as usize] += moved;
    }

    /// Returns the time spent on each activity so far.
    pub fn totals(&self, now: Instant) -> [(Activity, Duration); Activity::ALL.len()] {
        Activity::ALL.map(|activity| {
            let running = if activity == self.now { now.saturating_duration_since(self.since) } else { Duration::ZERO };
            (activity, self.totals[activity as usize] + running)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn time_lost_in_a_hang_is_moved_from_productive_to_hung() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut spans = Spans::new(start);
        spans.enter(Activity::Productive, start + second);
        spans.was_hung(second * 3, start + second * 11);
        spans.was_hung(second * 30, start + second * 11);
        spans.enter(Activity::Restarting, start + second * 11);
        let totals = spans.totals(start + second * 12).map(|(_, span)| span.as_secs());
        assert_eq!(totals, [1, 0, 1, 0, 10]);
    }

    proptest! {
        #[test]
        fn every_moment_is_counted_for_exactly_one_activity(steps in prop::collection::vec((0usize..6, 0u64..1000), 0..40)) {
            let start = Instant::now();
            let (mut spans, mut now) = (Spans::new(start), start);
            for (what, pause) in steps {
                now += Duration::from_millis(pause);
                match Activity::ALL.get(what) {
                    Some(activity) => spans.enter(*activity, now),
                    None => spans.was_hung(Duration::from_millis(pause * 3), now),
                }
                let sum: Duration = spans.totals(now).iter().map(|(_, span)| *span).sum();
                prop_assert_eq!(sum, now - start);
            }
        }
    }
}
