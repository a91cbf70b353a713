//! A store that does not answer: when to try again, and what the user is told. Pure but for chance.

use std::time::Duration;

use super::auth::random;
use super::types::LostKind;

/// Between two attempts: doubled from the first to the last of these.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
pub(super) const LAST_PAUSE: Duration = Duration::from_millis(250);

/// A store that is away for no longer is nobody's news.
const UNNOTICED: u64 = 1_000_000_000;
/// One that comes and goes is no news again for so long, unless the time that is left runs out.
const QUIET: u64 = 60_000_000_000;

/// Since a connection was lost. All times are on the boot clock, in nanoseconds.
#[derive(Debug)]
pub(crate) struct Away {
    /// Such as "the store at HOST:PORT".
    what: String,
    begun: u64,
    /// Since when nothing was answered; what was asked then may be noticed later.
    silent: u64,
    deadline: u64,
    next_pause: Duration,
    is_told: bool,
    /// When the user was told last that the store was away, now or before.
    told: Option<u64>,
}

impl Away {
    /// `unanswered`: when the first question was sent that waits for its answer; `told`: when the user was told before.
    pub(crate) fn new(what: String, now: u64, unanswered: Option<u64>, deadline: u64, told: Option<u64>) -> Self {
        let silent = unanswered.map_or(now, |sent| sent.min(now));
        Self { what, begun: now, silent, deadline, next_pause: Duration::ZERO, is_told: false, told }
    }

    /// Since when nothing is answered.
    pub(crate) fn silent(&self) -> u64 {
        self.silent
    }

    /// When the user was told last that the store is away.
    pub(crate) fn told(&self) -> Option<u64> {
        self.told
    }

    /// How long to wait before the next attempt. Half of it is left to chance, so that many clients do not come at once.
    pub(super) fn pause(&mut self) -> Duration {
        let most = self.next_pause;
        self.next_pause = (most * 2).clamp(FIRST_PAUSE, LAST_PAUSE);
        half_by_chance(most)
    }

    /// What is told if the session is not taken up again; `answered`: when what the store answered last was sent.
    pub(super) fn trouble(&self, kind: LostKind, why: &str, answered: u64) -> (LostKind, String) {
        let seconds = seconds(self.deadline - answered);
        (kind, format!("{} has not answered for {seconds} s ({why})", self.what))
    }

    /// When there is something to tell.
    pub(crate) fn next_news(&self) -> u64 {
        if self.is_told {
            return u64::MAX;
        }
        let middle = self.begun + self.deadline.saturating_sub(self.begun) / 2;
        let quiet = self.told.map_or(0, |told| (told + QUIET).min(middle));
        quiet.max(self.begun + UNNOTICED)
    }

    /// A line for the user, once.
    pub(crate) fn news(&mut self, now: u64, why: &str) -> Option<String> {
        if now < self.next_news() {
            return None;
        }
        self.is_told = true;
        self.told = Some(now);
        let left = seconds(self.deadline.saturating_sub(now));
        Some(format!("{} does not answer ({why}); nothing is stopped for up to {left} s", self.what))
    }

    /// A line for whoever was told that the store is away.
    pub(crate) fn over(&self, now: u64) -> Option<String> {
        let was = seconds(now.saturating_sub(self.silent));
        self.is_told.then(|| format!("{} answers again after {was} s; nothing was restarted", self.what))
    }
}

/// At least half of it, and of the rest what chance says; without random bytes nothing.
pub(crate) fn half_by_chance(most: Duration) -> Duration {
    let chance = random().map_or(0, u16::from_le_bytes);
    most / 2 + most / 2 * u32::from(chance) / u32::from(u16::MAX)
}

/// To a tenth.
fn seconds(nanoseconds: u64) -> String {
    format!("{}.{}", nanoseconds / 1_000_000_000, nanoseconds / 100_000_000 % 10)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    proptest! {
        /// However often a store comes and goes, and however seldom anybody looks.
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
