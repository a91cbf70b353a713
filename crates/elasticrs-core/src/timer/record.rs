//! Records that workers write into the FIFO. Each record is a line with which a worker acquires or releases a timer.
//!
//! Splits the bytes of the FIFO into lines, using bounded memory. Also limits the number of messages about rejected
//! records, and about expired timers for which no signal is sent.
//!
//! Torch's client sends the fields `version`, `pid`, `scope_id`, `expiration_time` (seconds since 1970, negative to
//! release the timer) and `signal`. This library's client adds fields that torch's server ignores: `deadline_ns` (the
//! expiration on the monotonic clock), `start_time` (field 22 of `/proc/PID/stat`), and `at` (the place in the
//! program).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use elasticrs_runtime::notices::Rate;
use elasticrs_sys::signal::Signal;
use memchr::{memchr, memmem};
use serde::Deserialize;

/// A worker's request to acquire or release a timer.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub pid: i32,
    /// Name of the timer, unique within its process.
    pub scope: Box<str>,
    pub request: Request,
    /// Start time of the process that wrote the record, in clock ticks since boot. Distinguishes the process from a
    /// later process with the same pid.
    pub start_time: Option<u64>,
}

/// Operation on a timer.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Starts a timer. If the process already has a timer with the same scope, replaces that timer.
    Acquire {
        /// Expiration time in seconds since 1970. Used in messages, and as the deadline if `deadline_ns` is `None`.
        expires: f64,
        /// Deadline in nanoseconds on the monotonic clock.
        deadline_ns: Option<u64>,
        /// Signal to send at the deadline. `None` to only report the expiration.
        signal: Option<Signal>,
        /// File and line of the block that acquires the timer.
        at: Option<Box<str>>,
    },
    /// Releases the timer.
    Release,
}

/// Reason for rejecting a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Refusal {
    #[error("it has more than {} bytes", MAX_LINE)]
    TooLong,
    #[error("it is not a timer record")]
    Malformed,
    #[error("its version is not 1")]
    Version,
    #[error("its expiration time is not a number")]
    NotFinite,
    #[error("no process has such a pid")]
    Pid,
    #[error("there is no such signal")]
    Signal,
    #[error("its pid is neither a worker of this job nor a descendant of one")]
    Stranger,
    #[error("its pid belongs to another process now")]
    Recycled,
    #[error("there are too many timers")]
    Full,
}

#[derive(Deserialize)]
struct Wire {
    version: i64,
    pid: i64,
    scope_id: Box<str>,
    expiration_time: f64,
    signal: i64,
    #[serde(default)]
    deadline_ns: Option<u64>,
    #[serde(default)]
    start_time: Option<u64>,
    #[serde(default)]
    at: Option<Box<str>>,
}

/// First bytes of every record, from torch's client and from ours. A JSON string cannot contain them, because
/// quotes are escaped in strings.
const BEGIN: &[u8] = br#"{"version""#;

/// Parses one line. If a writer died in the middle of a record, the next writer's record is on the same line. In
/// that case, calls `found` twice: for the incomplete record and for the next one.
pub fn read(line: &[u8], mut found: impl FnMut(Result<Record, Refusal>)) {
    let whole = parse(line);
    let rest = match whole {
        Err(Refusal::Malformed) => memmem::rfind(line, BEGIN).filter(|&at| at > 0).map(|at| &line[at..]),
        _ => None,
    };
    found(whole);
    if let Some(rest) = rest {
        found(parse(rest));
    }
}

/// Parses one record.
pub fn parse(line: &[u8]) -> Result<Record, Refusal> {
    let wire: Wire = serde_json::from_slice(line).map_err(|_| {
        // Detect NaN and infinities. Python's `json` module writes them, although they are not valid JSON.
        let is_no_number =
            [&b": NaN"[..], b": Infinity", b": -Infinity"].iter().any(|n| memmem::find(line, n).is_some());
        if is_no_number { Refusal::NotFinite } else { Refusal::Malformed }
    })?;
    let Wire { version, pid, scope_id: scope, expiration_time, signal, deadline_ns, start_time, at } = wire;
    if version != 1 {
        return Err(Refusal::Version);
    }
    if !expiration_time.is_finite() {
        return Err(Refusal::NotFinite);
    }
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 0).ok_or(Refusal::Pid)?;
    let request = if expiration_time < 0.0 {
        Request::Release
    } else {
        let signal = match signal {
            i64::MIN..=0 => None,
            number => Some(i32::try_from(number).ok().and_then(Signal::new).ok_or(Refusal::Signal)?),
        };
        Request::Acquire { expires: expiration_time, deadline_ns, signal, at }
    };
    Ok(Record { pid, scope, request, start_time })
}

/// Maximum length of a record in bytes. Equals `PIPE_BUF`, because the kernel may interleave longer writes of
/// several processes to one pipe.
pub const MAX_LINE: usize = 4096;

/// Splits a byte stream into lines. Keeps the start of an incomplete line, and discards a line that is too long.
#[derive(Debug, Default)]
pub struct Lines {
    partial: Vec<u8>,
    skipping: bool,
}

impl Lines {
    /// Adds `bytes`, and calls `line` with each line that is now complete, without its newline. Calls `line` with
    /// `None` for a line that is too long.
    pub fn feed(&mut self, mut bytes: &[u8], mut line: impl FnMut(Option<&[u8]>)) {
        while let Some(end) = memchr(b'\n', bytes) {
            let (head, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.skipping {
                self.skipping = false;
            } else if self.partial.len() + head.len() > MAX_LINE {
                line(None);
            } else if self.partial.is_empty() {
                line(Some(head));
            } else {
                self.partial.extend_from_slice(head);
                line(Some(&self.partial));
            }
            self.partial.clear();
            bytes = rest;
        }
        if self.skipping {
            return;
        }
        if self.partial.len() + bytes.len() > MAX_LINE {
            // Report the overlong line now, because its newline may never arrive.
            line(None);
            self.partial.clear();
            self.skipping = true;
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }
}

/// Minimum time between two messages of the same kind to the user.
pub(crate) const INTERVAL: Duration = Duration::from_secs(60);

/// Counts of rejected timer records, by reason.
#[derive(Debug, Default)]
pub struct Complaints {
    kinds: BTreeMap<Refusal, Rate>,
}

impl Complaints {
    /// Counts a rejected record. Returns a message if the user should be notified now. `claim` returns the description
    /// of the record for the message.
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
    use proptest::prelude::*;

    use super::*;

    const TORCH: &str =
        r#"{"version": 1, "pid": 42, "scope_id": "a.py#7", "expiration_time": 1700000000.25, "signal": 9}"#;

    fn all(line: &str) -> Vec<Result<Record, Refusal>> {
        let mut found = Vec::new();
        read(line.as_bytes(), |record| found.push(record));
        found
    }

    #[test]
    fn timer_records_of_the_torch_client_are_read() {
        let acquire = parse(TORCH.as_bytes()).unwrap();
        assert_eq!((acquire.pid, &*acquire.scope, acquire.start_time), (42, "a.py#7", None));
        let (expires, deadline_ns, signal, at) = (1_700_000_000.25, None, Some(Signal::KILL), None);
        assert_eq!(acquire.request, Request::Acquire { expires, deadline_ns, signal, at });
        let release = r#"{"version": 1, "pid": 42, "scope_id": "a\"b\u00e9", "expiration_time": -1, "signal": 0}"#;
        let release = parse(release.as_bytes()).unwrap();
        assert_eq!((&*release.scope, release.request), ("a\"bé", Request::Release));
    }

    #[test]
    fn an_invalid_record_is_refused_with_its_reason() {
        let cases = [
            ("", Refusal::Malformed),
            ("[1, 2]", Refusal::Malformed),
            (&TORCH.replace("\"pid\": 42, ", ""), Refusal::Malformed),
            (&TORCH.replace("42", "\"42\""), Refusal::Malformed),
            (&TORCH.replace("1700000000.25", "1e999"), Refusal::Malformed),
            (&TORCH.replace("\"version\": 1", "\"version\": 2"), Refusal::Version),
            (&TORCH.replace("1700000000.25", "NaN"), Refusal::NotFinite),
            (&TORCH.replace("1700000000.25", "-Infinity"), Refusal::NotFinite),
            (&TORCH.replace("42", "-3"), Refusal::Pid),
            (&TORCH.replace("42", "0"), Refusal::Pid),
            (&TORCH.replace("42", "4294967338"), Refusal::Pid),
            (&TORCH.replace(": 9", ": 65"), Refusal::Signal),
        ];
        for (line, refusal) in cases {
            assert_eq!(all(line), [Err(refusal)], "{line}");
        }
    }

    #[test]
    fn a_record_with_a_signal_number_below_one_has_no_signal() {
        for signal in ["0", "-1"] {
            let record = parse(TORCH.replace(": 9", &format!(": {signal}")).as_bytes()).unwrap();
            assert!(matches!(record.request, Request::Acquire { signal: None, .. }));
        }
    }

    proptest! {
        #[test]
        fn a_record_after_a_truncated_record_is_found(cut in 0..TORCH.len(), other in any::<u16>()) {
            let whole = TORCH.replace("42", &(i32::from(other) + 1).to_string());
            let found = all(&format!("{}{whole}", &TORCH[..cut]));
            prop_assert_eq!(found.last().unwrap(), &parse(whole.as_bytes()));
            prop_assert_eq!(found.len(), if cut == 0 { 1 } else { 2 });
        }

        #[test]
        fn a_line_of_random_bytes_yields_one_or_two_results(line in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut count = 0;
            read(&line, |_| count += 1);
            prop_assert!((1..=2).contains(&count));
        }

        #[test]
        fn a_record_with_a_wrong_byte_never_has_an_invalid_pid(at in 0..TORCH.len(), byte in any::<u8>()) {
            let mut line = TORCH.as_bytes().to_vec();
            line[at] = byte;
            read(&line, |record| {
                if let Ok(record) = record {
                    assert!(record.pid > 0);
                }
            });
        }
    }

    fn lines_of(chunks: &[&[u8]]) -> Vec<Option<Vec<u8>>> {
        let (mut lines, mut seen) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.feed(chunk, |line| seen.push(line.map(<[u8]>::to_vec)));
            assert!(lines.partial.len() <= MAX_LINE, "TIM-4");
        }
        seen
    }

    #[test]
    fn a_line_that_is_too_long_does_not_affect_other_lines() {
        let long = vec![b'x'; 3 * MAX_LINE];
        let seen = lines_of(&[b"a\n", &long, &long, b"\nb\n"]);
        assert_eq!(seen, [Some(b"a".to_vec()), None, Some(b"b".to_vec())]);
        let exact = [&long[..MAX_LINE], b"\n"].concat();
        assert_eq!(lines_of(&[&exact]), [Some(exact[..MAX_LINE].to_vec())]);
        assert_eq!(lines_of(&[&[&long[..=MAX_LINE], b"\nb\n"].concat()]), [None, Some(b"b".to_vec())]);
    }

    proptest! {
        #[test]
        fn the_lines_do_not_depend_on_how_the_bytes_are_chunked(
            text in proptest::collection::vec(prop_oneof![4 => Just(b'x'), 1 => Just(b'\n')], 0..400),
            cuts in proptest::collection::vec(0_usize..400, 0..20),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(lines_of(&chunks), lines_of(&[&text]));
        }
    }

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
