//! Policy for a store that does not answer: when to retry, and when to notify the user. Pure, except for random delays.

use std::time::Duration;

use super::error::StoreError;
use crate::types::LostKind;

/// Minimum duration of an outage before it is reported to the user, in nanoseconds.
const UNNOTICED: u64 = 1_000_000_000;
/// Minimum time between two outage notices, in nanoseconds, so that an unstable store does not flood the user.
///
/// The minimum never delays a notice beyond the midpoint between the start of the outage and the session's deadline.
const QUIET: u64 = 60_000_000_000;

/// An outage of the store. It starts when the client notices the loss of the connection. All times are nanoseconds of
/// the boot clock.
#[derive(Debug)]
pub(crate) struct Outage {
    /// Name of the store in messages, such as "the store at HOST:PORT".
    store: String,
    begun: u64,
    /// Time of the first unanswered request. It may be earlier than `begun`, because the client may notice the loss of
    /// the connection late.
    silent: u64,
    deadline: u64,
    is_reported: bool,
    /// Time of the last outage notice to the user, about this outage or an earlier one. `None` if there was none.
    reported: Option<u64>,
}

impl Outage {
    /// Creates the record of an outage that was noticed at `now`. `unanswered` is the send time of the oldest request
    /// without an answer. `reported` is the time of the last notice to the user, and limits how often notices are sent.
    pub(crate) fn new(store: String, now: u64, unanswered: Option<u64>, deadline: u64, reported: Option<u64>) -> Self {
        let silent = unanswered.map_or(now, |sent| sent.min(now));
        Self { store, begun: now, silent, deadline, is_reported: false, reported }
    }

    /// Returns the time at which the store stopped answering.
    pub(crate) fn silent(&self) -> u64 {
        self.silent
    }

    /// Returns the time of the last outage notice to the user.
    pub(crate) fn reported(&self) -> Option<u64> {
        self.reported
    }

    /// Returns the reason to report if the session is lost during this outage. `answered` is the send time of the last
    /// request that the store answered.
    pub(crate) fn reason(&self, kind: LostKind, why: &str, answered: u64) -> StoreError {
        let seconds = seconds(self.deadline - answered);
        StoreError::new(kind, format!("{} has not answered for {seconds} s ({why})", self.store))
    }

    /// Returns the time at which a notice about this outage is due. `u64::MAX` if the user has already been notified.
    pub(crate) fn next_notice(&self) -> u64 {
        if self.is_reported {
            return u64::MAX;
        }
        let middle = self.begun + self.deadline.saturating_sub(self.begun) / 2;
        let quiet = self.reported.map_or(0, |reported| (reported + QUIET).min(middle));
        quiet.max(self.begun + UNNOTICED)
    }

    /// Returns a notice for the user if one is due. Each outage is reported only once.
    pub(crate) fn notice(&mut self, now: u64, why: &str) -> Option<String> {
        if now < self.next_notice() {
            return None;
        }
        self.is_reported = true;
        self.reported = Some(now);
        let left = seconds(self.deadline.saturating_sub(now));
        Some(format!("{} does not answer ({why}); nothing is stopped for up to {left} s", self.store))
    }

    /// Returns a notice that the store answers again. `None` if the user was not notified of the outage.
    pub(crate) fn over(&self, now: u64) -> Option<String> {
        let was = seconds(now.saturating_sub(self.silent));
        self.is_reported.then(|| format!("{} answers again after {was} s; nothing was restarted", self.store))
    }
}

/// Upper limits for the pauses before reconnection attempts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pauses {
    pub(crate) first: Duration,
    /// Limit for the pause before the second attempt. The limit doubles with each further attempt, up to `last`.
    pub(crate) second: Duration,
    pub(crate) last: Duration,
}

/// Time without a failure after which earlier failures are forgotten, in nanoseconds.
const CALM: u64 = 10_000_000_000;

/// Computes the pauses between connection attempts. The pauses keep growing across outages in quick succession, because
/// a store that immediately drops every connection would otherwise cause a busy loop.
#[derive(Debug)]
pub(crate) struct Backoff {
    pauses: Pauses,
    /// Number of failures in quick succession. `last` is the time of the last failure, in nanoseconds of the boot
    /// clock.
    failures: u32,
    last: u64,
}

impl Backoff {
    pub(crate) fn new(pauses: Pauses) -> Self {
        Self { pauses, failures: 0, last: 0 }
    }

    /// Returns true if a failure at `now` would come shortly after another one.
    pub(crate) fn is_repeated(&self, now: u64) -> bool {
        self.failures > 0 && now.saturating_sub(self.last) <= CALM
    }

    /// Records a failure. Returns the time to wait before the next attempt. Half of it is random, so that many clients
    /// do not reconnect at the same moment.
    pub(crate) fn pause(&mut self, now: u64) -> Duration {
        self.failures = if self.is_repeated(now) { self.failures.saturating_add(1) } else { 1 };
        self.last = now;
        let Pauses { first, second, last } = self.pauses;
        half_by_chance(match self.failures {
            1 => first,
            failures => (second * 2_u32.pow((failures - 2).min(16))).min(last),
        })
    }
}

/// Returns a random duration between `most / 2` and `most`. Returns `most / 2` if no random bytes are available.
fn half_by_chance(most: Duration) -> Duration {
    let chance = getrandom::u32().map_or(0, |chance| chance & 0xffff);
    most / 2 + most / 2 * chance / 0xffff
}

/// Formats nanoseconds as seconds with one decimal place.
fn seconds(nanoseconds: u64) -> String {
    format!("{}.{}", nanoseconds / 1_000_000_000, nanoseconds / 100_000_000 % 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    proptest! {
        /// For any sequence of outages, the user is notified in time and not too often.
        #[test]
        fn outages_are_reported_in_time_and_not_too_often(
            times in prop::collection::vec((0..20 * SECOND, 0..20 * SECOND), 1..100), lease in 10..100_u64,
        ) {
            let (mut now, mut reported, mut lines) = (SECOND, None, Vec::new());
            for (there, absent) in times {
                now += there;
                let deadline = now + lease * SECOND;
                let mut outage = Outage::new("it".into(), now, None, deadline, reported);
                let due = outage.next_notice();
                prop_assert!(due >= now + UNNOTICED && due < deadline);
                prop_assert!(reported.is_some() || due == now + UNNOTICED);
                prop_assert!(outage.notice(due - 1, "why").is_none());
                let end = (now + absent).min(deadline - 1);
                if due <= end {
                    prop_assert!(outage.notice(due, "why").is_some() && outage.notice(end, "why").is_none());
                    lines.push((due, due - now));
                }
                prop_assert_eq!(outage.over(end).is_some(), due <= end);
                (now, reported) = (end, outage.reported());
            }
            for pair in lines.windows(2) {
                let (before, (at, waited)) = (pair[0].0, pair[1]);
                prop_assert!(at - before >= QUIET || waited >= lease * SECOND / 2);
            }
        }
    }

    #[test]
    fn reconnect_pauses_grow_until_a_connection_has_been_stable() {
        let milliseconds = Duration::from_millis;
        let pauses = Pauses { first: milliseconds(10), second: milliseconds(100), last: milliseconds(500) };
        let (mut backoff, mut now) = (Backoff::new(pauses), SECOND);
        assert!(!backoff.is_repeated(now));
        for most in [10, 100, 200, 400, 500, 500] {
            let pause = backoff.pause(now);
            assert!(pause >= milliseconds(most) / 2 && pause <= milliseconds(most), "{pause:?} of {most} ms");
            now += CALM;
            assert!(backoff.is_repeated(now));
        }
        now += 1;
        assert!(!backoff.is_repeated(now) && backoff.pause(now) <= milliseconds(10));
    }

    #[test]
    fn an_outage_is_counted_from_the_first_unanswered_request() {
        let over = |unanswered| {
            let mut outage = Outage::new("it".into(), 103 * SECOND, unanswered, 200 * SECOND, None);
            outage.notice(104 * SECOND, "why");
            outage.over(105 * SECOND).unwrap()
        };
        assert_eq!(over(None), "it answers again after 2.0 s; nothing was restarted");
        assert_eq!(over(Some(100 * SECOND)), "it answers again after 5.0 s; nothing was restarted");
    }
}
