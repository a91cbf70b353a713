//! Queue of a session's tasks, and the limit on how long a failing task is retried. A task is a request that is not
//! finished yet. All functions are pure.
//!
//! - **TASK-1** [`Tasks::attempted`] returns the retry state of every queued task that was attempted at least once.
//! - **RETRY-1** if a request never succeeds, the session ends when the request's time limit has passed, no matter on
//!   how many connections the request was tried;
//! - **RETRY-2** time during which etcd is unreachable does not count toward the limit, because the lease limits the
//!   wait during an outage;
//! - **RETRY-3** the user receives one notice about each request that keeps failing.

use std::collections::VecDeque;
use std::time::Duration;

use elasticrs_sys::clock::nanoseconds;

use super::jobs::Job;
use crate::session::core::PastOutage;
use crate::types::Watch;

/// Maximum number of started but unfinished tasks. There are two after a reconnect: the connection check and the task
/// that was interrupted.
const MOST_ATTEMPTED: usize = 2;

/// Time in nanoseconds. Failures of a request are reported to the user only if they last longer than this.
const UNNOTICED: u64 = 1_000_000_000;
/// Time without a failure after which a watch is considered to be working again, in nanoseconds.
const CALM: u64 = 30_000_000_000;

/// A pending request from the user, or a pending request that the session makes by itself, such as a connection check.
pub(super) struct Task {
    pub(super) what: What,
    /// Deadline and last failure of the task. `None` before the first attempt.
    pub(super) retries: Option<Retries>,
}

pub(super) enum What {
    Job(Job),
    Unwatch(Watch),
}

impl From<What> for Task {
    fn from(what: What) -> Self {
        Self { what, retries: None }
    }
}

/// Pending tasks, in the order in which the session executes them. Only the first task can be running.
#[derive(Default)]
pub(super) struct Tasks {
    pub(super) queue: VecDeque<Task>,
}

impl Tasks {
    /// Adds a check of the new connection in front of all other tasks. Does nothing if the first task is already such
    /// a check.
    pub(super) fn check_connection(&mut self) {
        if !matches!(self.queue.front(), Some(Task { what: What::Job(Job::Look), .. })) {
            self.queue.push_front(What::Job(Job::Look).into());
        }
    }

    /// Queues `job` directly behind the unfinished tasks that were already attempted.
    pub(super) fn insert_behind_attempted(&mut self, job: Job) {
        let last = self.queue.iter().take(MOST_ATTEMPTED).rposition(|task| task.retries.is_some());
        self.queue.insert(last.map_or(0, |last| last + 1), What::Job(job).into());
    }

    /// Returns the retry states of all tasks that have been attempted.
    pub(super) fn attempted(&self) -> impl Iterator<Item = &Retries> {
        self.queue.iter().take(MOST_ATTEMPTED).filter_map(|task| task.retries.as_ref())
    }

    pub(super) fn attempted_mut(&mut self) -> impl Iterator<Item = &mut Retries> {
        self.queue.iter_mut().take(MOST_ATTEMPTED).filter_map(|task| task.retries.as_mut())
    }
}

/// Retry state of one request: its deadline, and its last failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Retries {
    limit: Duration,
    /// Start of the request's time limit, in nanoseconds of the boot clock. Initially the time of the first attempt.
    ///
    /// Each outage (a time without a connection to etcd) moves the start forward, because outages do not count toward
    /// the limit.
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

    /// Records a failed attempt of the request. If the request keeps failing, returns a message for the user. Returns
    /// such a message only once for each request.
    pub(super) fn fail(&mut self, now: u64, why: &str) -> Option<String> {
        self.failed = Some((now, why.to_owned()));
        if self.is_reported || now.saturating_sub(self.since) < UNNOTICED {
            return None;
        }
        self.is_reported = true;
        Some(format!("a request to etcd keeps failing and is retried for up to {} s: {why}", self.limit.as_secs_f64()))
    }

    /// Extends the request's deadline by the duration of an outage (a time without a connection to etcd). Does not add
    /// the pause before the first reconnect, because a request that breaks every connection would otherwise never reach
    /// its deadline.
    pub(super) fn skip(&mut self, outage: PastOutage) {
        let begun = outage.begun.max(self.since).saturating_add(outage.pause);
        let skipped = outage.ended.saturating_sub(begun);
        self.since += skipped;
        if let Some((failed, _)) = &mut self.failed {
            *failed += skipped;
        }
    }

    /// Returns true if the last failure of the request is so old that a new failure would be unrelated to it.
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

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Request,
        Reconnect,
        ForgottenWatch,
        Attempt,
        Finish,
    }

    fn a_job() -> Job {
        Job::CatchUp { number: 1, watch: Watch { prefix: "key".into(), exact: true } }
    }

    proptest! {
        #[test]
        fn iteration_finds_all_attempted_tasks(steps in vec(prop_oneof![
            Just(Step::Request), Just(Step::Reconnect), Just(Step::ForgottenWatch), Just(Step::Attempt), Just(Step::Finish),
        ], 1..60)) {
            let mut tasks = Tasks::default();
            for step in steps {
                match step {
                    Step::Request => tasks.queue.push_back(What::Job(a_job()).into()),
                    Step::Reconnect => tasks.check_connection(),
                    Step::ForgottenWatch => tasks.insert_behind_attempted(a_job()),
                    Step::Attempt => {
                        if let Some(task) = tasks.queue.front_mut() {
                            task.retries.get_or_insert_with(|| Retries::begin(0, Duration::from_secs(1)));
                        }
                    }
                    Step::Finish => {
                        if tasks.queue.front_mut().is_some_and(|task| task.retries.is_some()) {
                            drop(tasks.queue.pop_front());
                        }
                    }
                }
                let all = tasks.queue.iter().filter(|task| task.retries.is_some()).count();
                prop_assert_eq!(tasks.attempted().count(), all);
                prop_assert_eq!(tasks.attempted_mut().count(), all);
            }
        }
    }

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
