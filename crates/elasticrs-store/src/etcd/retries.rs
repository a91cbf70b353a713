//! Limits how long a failing request is retried. Pure functions.
//!
//! - **RETRY-1** if a request never succeeds, the session ends when the request's time limit has passed, no matter on
//!   how many connections the request was tried;
//! - **RETRY-2** time during which etcd is unreachable does not count toward the limit, because the lease limits the
//!   wait during an outage;
//! - **RETRY-3** the user receives one notice about each request that keeps failing.

use std::time::Duration;

use elasticrs_sys::clock::nanoseconds;

use crate::session::core::PastOutage;

/// Minimum time between the first attempt of a request and a notice to the user, in nanoseconds.
const UNNOTICED: u64 = 1_000_000_000;
/// Time without a failure after which a watch is considered to be working again, in nanoseconds.
const CALM: u64 = 30_000_000_000;

/// Retry state of one request: its deadline, and its last failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Retries {
    limit: Duration,
    /// Start of the request's time limit, in nanoseconds of the boot clock. Initially the time of the first attempt.
    ///
    /// Each outage moves the start forward, because outages do not count toward the limit.
    since: u64,
    /// Time and reason of the last failure. `None` if there was none.
    failed: Option<(u64, String)>,
    is_reported: bool,
}

impl Retries {
    pub(super) fn begin(now: u64, limit: Duration) -> Self {
        Self { limit, since: now, failed: None, is_reported: false }
    }

    /// Returns the time at which the request is abandoned, in nanoseconds of the boot clock.
    pub(super) fn deadline(&self) -> u64 {
        self.since.saturating_add(nanoseconds(self.limit))
    }

    /// Records a failed attempt. If the request keeps failing, returns a message for the user, but only once.
    pub(super) fn fail(&mut self, now: u64, why: &str) -> Option<String> {
        self.failed = Some((now, why.to_owned()));
        if self.is_reported || now.saturating_sub(self.since) < UNNOTICED {
            return None;
        }
        self.is_reported = true;
        Some(format!("a request to etcd keeps failing and is retried for up to {} s: {why}", self.limit.as_secs_f64()))
    }

    /// Extends the request's deadline by the duration of an outage. The pause before the first reconnect is not added,
    /// because a request that breaks every connection would otherwise never reach its deadline.
    pub(super) fn skip(&mut self, outage: PastOutage) {
        let begun = outage.begun.max(self.since).saturating_add(outage.pause);
        let skipped = outage.ended.saturating_sub(begun);
        self.since += skipped;
        if let Some((failed, _)) = &mut self.failed {
            *failed += skipped;
        }
    }

    /// Returns true if the last failure is so old that a new failure would be unrelated to it.
    pub(super) fn is_over(&self, now: u64) -> bool {
        self.failed.as_ref().is_some_and(|(failed, _)| now.saturating_sub(*failed) > CALM)
    }

    /// Returns the message that explains why the request was abandoned.
    pub(super) fn why(&self) -> String {
        let seconds = self.limit.as_secs_f64();
        match &self.failed {
            Some((_, why)) => format!("a request to etcd has failed for {seconds} s; the last time: {why}"),
            None => format!("etcd did not answer a request within {seconds} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const LIMIT: u64 = 60_000;
    const MS: u64 = 1_000_000;

    /// Generates the timing of a failing attempt, in milliseconds: the time until the failure, the length of the
    /// outage that follows, and the pause before the first reconnect.
    fn an_attempt() -> impl Strategy<Value = (u64, u64, u64)> {
        let pause = 5..1000_u64;
        (0..3000_u64, pause, prop_oneof![Just(0), 0..3_600_000_u64])
            .prop_map(|(ran, pause, more)| (ran, pause + more, pause))
    }

    proptest! {
        #[test]
        fn outages_do_not_count_toward_the_time_limit_of_a_request(attempts in vec(an_attempt(), 1..400)) {
            let start = 7 * MS;
            let mut retries = Retries::begin(start, Duration::from_millis(LIMIT));
            let (mut now, mut counted, mut reports) = (start, 0, 0);
            for (ran, outage, pause) in attempts {
                now += ran * MS;
                counted += ran;
                prop_assert_eq!(now >= retries.deadline(), counted >= LIMIT);
                if counted >= LIMIT {
                    break;
                }
                reports += usize::from(retries.fail(now, "no").is_some());
                prop_assert_eq!(reports, usize::from(counted >= 1000));
                let begun = now;
                now += outage * MS;
                counted += pause;
                retries.skip(PastOutage { begun, ended: now, pause: pause * MS });
            }
        }

        #[test]
        fn an_outage_from_before_a_request_does_not_shorten_its_time_limit(early in 0..100_u64, length in 0..100_u64) {
            let mut retries = Retries::begin(early, Duration::from_millis(LIMIT));
            let before = retries.deadline();
            retries.skip(PastOutage { begun: 0, ended: early + length, pause: 0 });
            prop_assert_eq!(retries.deadline(), before + length);
        }
    }

    #[test]
    fn the_last_failure_reason_is_reported() {
        let mut retries = Retries::begin(0, Duration::from_secs(60));
        assert!(retries.why().contains("did not answer"));
        retries.fail(1, "one");
        retries.fail(2, "another");
        assert!(retries.why().ends_with("another"));
        assert!(!retries.is_over(CALM + 2) && retries.is_over(CALM + 3));
    }
}
