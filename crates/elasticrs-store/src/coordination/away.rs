//! Policy for a store that does not answer: when to retry, and when to notify the user. Pure, except for random delays.

use std::time::Duration;

use super::auth::random;
use super::types::LostKind;

/// Shortest and longest pause between two connection attempts. The pause doubles after each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
pub(super) const LAST_PAUSE: Duration = Duration::from_millis(250);

/// Shortest outage that is reported to the user, in nanoseconds.
const UNNOTICED: u64 = 1_000_000_000;
/// Minimum time between two outage notices, in nanoseconds, so that an unstable store does not flood the user. A notice
/// is sent earlier if half of the time until the session expires has passed.
const QUIET: u64 = 60_000_000_000;

/// An outage of the store. It starts when the connection is lost. All times are nanoseconds of the boot clock.
#[derive(Debug)]
pub(crate) struct Away {
    /// Name of the store in messages, such as "the store at HOST:PORT".
    what: String,
    begun: u64,
    /// Time of the first unanswered request. It may be earlier than `begun`, because the loss of the connection may be
    /// noticed late.
    silent: u64,
    deadline: u64,
    next_pause: Duration,
    is_told: bool,
    /// Time of the last outage notice to the user, for this or an earlier outage. `None` if there was none.
    told: Option<u64>,
}

impl Away {
    /// Starts an outage. `unanswered` is the time at which the oldest unanswered request was sent. `told` is the time
    /// of the last notice about an earlier outage.
    pub(crate) fn new(what: String, now: u64, unanswered: Option<u64>, deadline: u64, told: Option<u64>) -> Self {
        let silent = unanswered.map_or(now, |sent| sent.min(now));
        Self { what, begun: now, silent, deadline, next_pause: Duration::ZERO, is_told: false, told }
    }

    /// Returns the time at which the store stopped answering.
    pub(crate) fn silent(&self) -> u64 {
        self.silent
    }

    /// Returns the time of the last outage notice to the user.
    pub(crate) fn told(&self) -> Option<u64> {
        self.told
    }

    /// Returns the time to wait before the next attempt. Half of it is random, so that many clients do not reconnect at
    /// the same moment.
    pub(super) fn pause(&mut self) -> Duration {
        let most = self.next_pause;
        self.next_pause = (most * 2).clamp(FIRST_PAUSE, LAST_PAUSE);
        half_by_chance(most)
    }

    /// Returns the reason to report if the session is lost in this outage. `answered` is the send time of the last
    /// request that the store answered.
    pub(super) fn trouble(&self, kind: LostKind, why: &str, answered: u64) -> (LostKind, String) {
        let seconds = seconds(self.deadline - answered);
        (kind, format!("{} has not answered for {seconds} s ({why})", self.what))
    }

    /// Returns the time at which a notice about this outage is due. `u64::MAX` if the user was already notified.
    pub(crate) fn next_news(&self) -> u64 {
        if self.is_told {
            return u64::MAX;
        }
        let middle = self.begun + self.deadline.saturating_sub(self.begun) / 2;
        let quiet = self.told.map_or(0, |told| (told + QUIET).min(middle));
        quiet.max(self.begun + UNNOTICED)
    }

    /// Returns a notice for the user if one is due. Each outage is reported only once.
    pub(crate) fn news(&mut self, now: u64, why: &str) -> Option<String> {
        if now < self.next_news() {
            return None;
        }
        self.is_told = true;
        self.told = Some(now);
        let left = seconds(self.deadline.saturating_sub(now));
        Some(format!("{} does not answer ({why}); nothing is stopped for up to {left} s", self.what))
    }

    /// Returns a notice that the store answers again. `None` if the user was not notified of the outage.
    pub(crate) fn over(&self, now: u64) -> Option<String> {
        let was = seconds(now.saturating_sub(self.silent));
        self.is_told.then(|| format!("{} answers again after {was} s; nothing was restarted", self.what))
    }
}

/// Returns a random duration between `most / 2` and `most`. Returns `most / 2` if no random bytes are available.
pub(crate) fn half_by_chance(most: Duration) -> Duration {
    let chance = random().map_or(0, u16::from_le_bytes);
    most / 2 + most / 2 * u32::from(chance) / u32::from(u16::MAX)
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
        /// The notices are neither late nor too frequent, no matter how often the store fails and how rarely the client
        /// checks whether a notice is due.
        #[test]
        fn the_user_is_told_in_time_and_not_flooded(
            times in prop::collection::vec((0..20 * SECOND, 0..20 * SECOND), 1..100), lease in 10..100_u64,
        ) {
            let (mut now, mut told, mut lines) = (SECOND, None, Vec::new());
            for (there, absent) in times {
                now += there;
                let deadline = now + lease * SECOND;
                let mut away = Away::new("it".into(), now, None, deadline, told);
                let due = away.next_news();
                prop_assert!(due >= now + UNNOTICED && due < deadline);
                prop_assert!(told.is_some() || due == now + UNNOTICED);
                prop_assert!(away.news(due - 1, "why").is_none());
                let end = (now + absent).min(deadline - 1);
                if due <= end {
                    prop_assert!(away.news(due, "why").is_some() && away.news(end, "why").is_none());
                    lines.push((due, due - now));
                }
                prop_assert_eq!(away.over(end).is_some(), due <= end);
                (now, told) = (end, away.told());
            }
            for pair in lines.windows(2) {
                let (before, (at, waited)) = (pair[0].0, pair[1]);
                prop_assert!(at - before >= QUIET || waited >= lease * SECOND / 2);
            }
        }
    }

    #[test]
    fn how_long_it_was_away_is_counted_from_the_first_unanswered_question() {
        let over = |unanswered| {
            let mut away = Away::new("it".into(), 103 * SECOND, unanswered, 200 * SECOND, None);
            away.news(104 * SECOND, "why");
            away.over(105 * SECOND).unwrap()
        };
        assert_eq!(over(None), "it answers again after 2.0 s; nothing was restarted");
        assert_eq!(over(Some(100 * SECOND)), "it answers again after 5.0 s; nothing was restarted");
    }
}
