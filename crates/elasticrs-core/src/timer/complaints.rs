//! Counts what was refused, and what has only to be told, and says so rarely.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::record::Refusal;

/// The same complaint comes at most so often.
pub const INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct Kind {
    count: u64,
    told: u64,
    last: Option<Instant>,
}

/// What was refused so far, by kind.
#[derive(Debug, Default)]
pub struct Complaints {
    kinds: BTreeMap<Refusal, Kind>,
}

impl Complaints {
    /// Counts one; a text when the user should hear of it. `claim` is what was refused, for people.
    pub fn add(&mut self, refusal: Refusal, now: Instant, claim: impl FnOnce() -> String) -> Option<String> {
        let kind = self.kinds.entry(refusal).or_default();
        kind.count += 1;
        if kind.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            return None;
        }
        let others = kind.count - kind.told - 1;
        (kind.told, kind.last) = (kind.count, Some(now));
        let more = if others == 0 { String::new() } else { format!(" ({others} more like it)") };
        Some(format!("a timer record was refused, because {refusal}{more}: {}", claim()))
    }
}

/// So many timers without a signal are told in one [`INTERVAL`].
const MAX_TOLD: u32 = 64;

/// Timers without a signal that have expired: a program may let thousands of them in a second.
#[derive(Debug, Default)]
pub struct Told {
    since: Option<Instant>,
    count: u32,
    more: u64,
}

impl Told {
    /// Counts one. `false`: it is not to be told by itself; how many there were goes to `tell` with the next one that is.
    pub fn add(&mut self, now: Instant, tell: &mut impl FnMut(String)) -> bool {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= INTERVAL) {
            (self.since, self.count) = (Some(now), 0);
            self.take_more().into_iter().for_each(tell);
        }
        if self.count == MAX_TOLD {
            self.more += 1;
            return false;
        }
        self.count += 1;
        true
    }

    /// What is to be said of those that were not told.
    pub fn take_more(&mut self) -> Option<String> {
        let more = std::mem::take(&mut self.more);
        let timers = if more == 1 { "timer" } else { "timers" };
        (more > 0)
            .then(|| format!("{more} more {timers} expired without a signal: at most {MAX_TOLD} a minute are reported"))
    }
}

/// The beginning of a line of unknown content, fit for a terminal.
pub fn excerpt(line: &[u8]) -> String {
    const SHOWN: usize = 120;
    let more = if line.len() > SHOWN { "…" } else { "" };
    let mut text = String::new();
    for &byte in line.iter().take(SHOWN) {
        match byte {
            b' '..=b'~' => text.push(byte.into()),
            other => text.extend(other.escape_ascii().map(char::from)),
        }
    }
    text + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_told_once_and_then_rarely_with_a_count() {
        let (t0, mut complaints) = (Instant::now(), Complaints::default());
        let first = complaints.add(Refusal::Malformed, t0, || "x".into()).unwrap();
        assert_eq!(first, "a timer record was refused, because it is not a timer record: x");
        assert!(complaints.add(Refusal::Pid, t0, String::new).is_some());
        for _ in 0..1000 {
            assert_eq!(complaints.add(Refusal::Malformed, t0 + INTERVAL / 2, || unreachable!()), None);
        }
        let later = complaints.add(Refusal::Malformed, t0 + INTERVAL, || "y".into()).unwrap();
        assert_eq!(later, "a timer record was refused, because it is not a timer record (1000 more like it): y");
    }

    #[test]
    fn of_timers_that_are_only_told_the_first_of_a_minute_are_and_the_others_are_counted() {
        let (t0, mut told, mut said) = (Instant::now(), Told::default(), Vec::new());
        let mut add = |at, said: &mut Vec<String>| told.add(at, &mut |text| said.push(text));
        let told_of_1000 = (0..1000).filter(|_| add(t0 + INTERVAL / 2, &mut said)).count();
        assert_eq!((told_of_1000, said.len()), (64, 0));
        assert!(!add(t0 + INTERVAL, &mut said), "a minute counts from the first one");
        assert!(add(t0 + INTERVAL * 2, &mut said));
        assert_eq!(said, ["937 more timers expired without a signal: at most 64 a minute are reported"]);
        assert_eq!(told.take_more(), None, "once");
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(excerpt(b"\x1b[2J\xff"), "\\x1b[2J\\xff");
        assert_eq!(excerpt(&[b'a'; 5000]).chars().count(), 121);
    }
}
