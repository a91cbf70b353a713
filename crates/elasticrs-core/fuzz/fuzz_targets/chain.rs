//! Bytes of any writer of the FIFO: cut into lines, read, and carried out on a table.
//!
//! A module of its own, so that the tests run it as well (`tests/timer_bytes.rs`).

use elasticrs_core::timer::record::{self, Lines, MAX_LINE, Record, Request};
use elasticrs_core::timer::table::{Terms, Timers, on_monotonic};
use elasticrs_sys::clock::Stamp;

/// Panics when something is wrong. Returns how many timers were live at the end.
pub(crate) fn run(data: &[u8]) -> usize {
    let (mut lines, mut table, mut acquired) = (Lines::default(), Timers::default(), 0_usize);
    let now = Stamp(1 << 40);
    for chunk in data.chunks(29) {
        lines.feed(chunk, |line| {
            let Some(line) = line else { return };
            assert!(line.len() <= MAX_LINE);
            record::read(line, |record| {
                let Ok(Record { pid, scope, request, .. }) = record else { return };
                assert!(pid > 0 && scope.len() <= MAX_LINE);
                match request {
                    Request::Release => acquired -= usize::from(table.release(pid, &scope)),
                    Request::Acquire { expires, deadline_ns, signal, at } => {
                        acquired -= usize::from(table.release(pid, &scope));
                        let deadline = deadline_ns.map_or_else(|| on_monotonic(expires, 1.7e9, now), Stamp);
                        acquired += usize::from(table.acquire(pid, &scope, deadline, Terms { expires, signal, at }));
                    }
                }
                assert_eq!(table.len(), acquired);
            });
        });
    }
    let mut expired = 0;
    while table.expired(Stamp(u64::MAX)).is_some() {
        expired += 1;
    }
    assert_eq!(expired, acquired);
    acquired
}
