//! A store that does not answer: when to try again, and what the user is told. Pure but for chance.

use std::time::Duration;

use super::auth::random;
use super::types::LostKind;

/// Between two attempts: doubled from the first to the last of these.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
pub(super) const LAST_PAUSE: Duration = Duration::from_millis(250);

/// A store that is away for no longer is nobody's news.
const UNNOTICED: u64 = 1_000_000_000;

/// Since a connection was lost. All times are on the boot clock, in nanoseconds.
#[derive(Debug)]
pub(crate) struct Away {
    /// Such as "the store at HOST:PORT".
    what: String,
    begun: u64,
    /// When what the store answered last was sent.
    answered: u64,
    deadline: u64,
    next_pause: Duration,
    is_told: bool,
}

impl Away {
    pub(crate) fn new(what: String, now: u64, answered: u64, deadline: u64) -> Self {
        Self { what, begun: now, answered, deadline, next_pause: Duration::ZERO, is_told: false }
    }

    /// How long to wait before the next attempt. Half of it is left to chance, so that many clients do not come at once.
    pub(super) fn pause(&mut self) -> Duration {
        let most = self.next_pause;
        self.next_pause = (most * 2).clamp(FIRST_PAUSE, LAST_PAUSE);
        half_by_chance(most)
    }

    /// What is told if the session is not taken up again.
    pub(super) fn trouble(&self, kind: LostKind, why: &str) -> (LostKind, String) {
        let seconds = seconds(self.deadline - self.answered);
        (kind, format!("{} has not answered for {seconds} s ({why})", self.what))
    }

    /// When there is something to tell.
    pub(crate) fn next_news(&self) -> u64 {
        if self.is_told { u64::MAX } else { self.begun + UNNOTICED }
    }

    /// A line for the user, once.
    pub(crate) fn news(&mut self, now: u64, why: &str) -> Option<String> {
        if now < self.next_news() {
            return None;
        }
        self.is_told = true;
        let left = seconds(self.deadline.saturating_sub(now));
        Some(format!("{} does not answer ({why}); nothing is stopped for up to {left} s", self.what))
    }

    /// A line for whoever was told that the store is away.
    pub(crate) fn over(&self, now: u64) -> Option<String> {
        let was = seconds(now.saturating_sub(self.answered));
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
