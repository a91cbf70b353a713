#![no_main]
//! Bytes of any writer of the FIFO: cut into lines, read, and carried out on a table.

use elasticrs_core::clock::Stamp;
use elasticrs_core::timer::lines::{Lines, MAX_LINE};
use elasticrs_core::timer::record::{self, Record, Request};
use elasticrs_core::timer::table::{Terms, Timers, on_monotonic};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (mut lines, mut timers, mut live) = (Lines::default(), Timers::default(), 0_usize);
    let now = Stamp(1 << 40);
    for chunk in data.chunks(29) {
        lines.feed(chunk, |line| {
            let Some(line) = line else { return };
            assert!(line.len() <= MAX_LINE);
            record::read(line, |record| {
                let Ok(Record { pid, scope, request, .. }) = record else { return };
                assert!(pid > 0 && scope.len() <= MAX_LINE);
                match request {
                    Request::Release => live -= usize::from(timers.release(pid, &scope)),
                    Request::Acquire { expires, deadline_ns, signal, at } => {
                        live -= usize::from(timers.release(pid, &scope));
                        let deadline = deadline_ns.map_or_else(|| on_monotonic(expires, 1.7e9, now), Stamp);
                        live += usize::from(timers.acquire(pid, &scope, deadline, Terms { expires, signal, at }));
                    }
                }
                assert_eq!(timers.len(), live);
            });
        });
    }
    let mut expired = 0;
    while timers.expired(Stamp(u64::MAX)).is_some() {
        expired += 1;
    }
    assert_eq!(expired, live);
});
