//! Messages about rejected timer records and about expired timers for which no signal is sent. The number of messages
//! is limited.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use elasticrs_runtime::notices::Rate;

use super::record::Refusal;

/// Minimum time between two reports of the same kind.
pub(crate) const INTERVAL: Duration = Duration::from_secs(60);

/// Counts of rejected timer records, by reason.
#[derive(Debug, Default)]
pub struct Complaints {
    kinds: BTreeMap<Refusal, Rate>,
}

impl Complaints {
    /// Counts a rejected record. Returns a message if the user should be notified now. `claim` returns a description of
    /// the record.
    pub fn add(&mut self, refusal: Refusal, now: Instant, claim: impl FnOnce() -> String) -> Option<String> {
        let others = self.kinds.entry(refusal).or_insert_with(|| Rate::new(1, INTERVAL)).admit(now)?;
        let more = if others == 0 { String::new() } else { format!(" ({others} more like it)") };
        Some(format!("a timer record was refused, because {refusal}{more}: {}", claim()))
    }
}

/// Maximum number of reports per [`INTERVAL`] about expired timers for which no signal is sent. The number is limited,
/// because thousands of timers may expire within a second.
pub(crate) const MAX_REPORTED: u32 = 64;

/// Returns a message with the number of expired timers that were not reported individually. `None` if that is zero.
pub(crate) fn more_timers(count: u64) -> Option<String> {
    let timers = if count == 1 { "timer" } else { "timers" };
    (count > 0).then(|| {
        format!("{count} more {timers} expired without a signal: at most {MAX_REPORTED} a minute are reported")
    })
}

/// Returns the beginning of a record, with control characters escaped so that a terminal can safely display it.
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
    fn each_kind_of_refusal_is_reported_once_and_then_rarely_with_a_count() {
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
    fn timers_that_are_not_reported_are_counted() {
        let said = more_timers(937).unwrap();
        assert_eq!(said, "937 more timers expired without a signal: at most 64 a minute are reported");
        assert_eq!(more_timers(0), None);
    }

    #[test]
    fn record_excerpts_are_short_and_escape_control_characters() {
        assert_eq!(excerpt(b"\x1b[2J\xff"), "\\x1b[2J\\xff");
        assert_eq!(excerpt(&[b'a'; 5000]).chars().count(), 121);
    }
}
