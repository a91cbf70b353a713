//! Counters of the bytes and lines that were read from each stream. Any thread can read the counters without sending a
//! request to the logs thread.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use elasticrs_runtime::lock;
use elasticrs_runtime::readings::Stream;

/// Numbers of bytes and lines that were read from one stream of a worker.
#[derive(Debug, Default)]
pub(super) struct LogCounts {
    bytes: AtomicU64,
    lines: AtomicU64,
}

impl LogCounts {
    pub(super) fn add(&self, block: &[u8]) {
        self.bytes.fetch_add(block.len() as u64, Ordering::Relaxed);
        let newlines = memchr::memchr_iter(b'\n', block).count();
        self.lines.fetch_add(newlines as u64, Ordering::Relaxed);
    }
}

/// Counters of the streams that go to the console, by local rank and destination. They are not reset when workers
/// are restarted.
#[derive(Debug, Default)]
pub struct LogTotals {
    streams: Mutex<BTreeMap<Stream, Arc<LogCounts>>>,
}

impl LogTotals {
    /// Returns the numbers of bytes and newlines read so far from each stream that goes to the console, including
    /// finished streams.
    pub fn all(&self) -> Vec<(Stream, u64, u64)> {
        let streams = lock(&self.streams);
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        streams.iter().map(|(stream, counts)| (*stream, of(&counts.bytes), of(&counts.lines))).collect()
    }

    pub(super) fn of(&self, stream: Stream) -> Arc<LogCounts> {
        Arc::clone(lock(&self.streams).entry(stream).or_default())
    }
}

#[cfg(test)]
mod tests {
    use elasticrs_runtime::readings::Dest;

    use super::*;

    #[test]
    fn bytes_and_newlines_are_counted_by_stream() {
        let totals = LogTotals::default();
        totals.of((1, Dest::Stderr)).add(b"a\nb\nc");
        totals.of((1, Dest::Stderr)).add(b"\n");
        totals.of((0, Dest::Stdout)).add(b"");
        assert_eq!(totals.all(), [((0, Dest::Stdout), 0, 0), ((1, Dest::Stderr), 6, 3)]);
    }
}
