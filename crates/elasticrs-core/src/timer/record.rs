//! A record in the FIFO: a line with which a worker acquires or releases a timer.
//!
//! Torch's client sends the fields `version`, `pid`, `scope_id`, `expiration_time` (seconds since 1970, negative to
//! release the timer) and `signal`. This library's client adds fields that torch's server ignores: `deadline_ns` (the
//! expiration on the monotonic clock), `start_time` (field 22 of `/proc/PID/stat`), and `at` (the place in the
//! program).

use elasticrs_sys::signal::Signal;
use memchr::memmem;
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
    #[error("it has more than {} bytes", super::lines::MAX_LINE)]
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
}
