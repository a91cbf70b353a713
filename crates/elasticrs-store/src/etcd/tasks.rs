//! Queue of a session's tasks. A task is a request that is not finished yet. All functions are pure.
//!
//! - **TASK-1** [`Tasks::attempted`] returns the retry state of every queued task that was attempted at least once.

use std::collections::VecDeque;

use super::jobs::Job;
use super::retries::Retries;
use crate::types::Watch;

/// Maximum number of started but unfinished tasks. There are two after a reconnect: the connection check and the task
/// that was interrupted.
const MOST_ATTEMPTED: usize = 2;

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
    queue: VecDeque<Task>,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn front_mut(&mut self) -> Option<&mut Task> {
        self.queue.front_mut()
    }

    pub(super) fn pop_front(&mut self) {
        self.queue.pop_front();
    }

    pub(super) fn push_back(&mut self, what: What) {
        self.queue.push_back(what.into());
    }

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
                    Step::Request => tasks.push_back(What::Job(a_job())),
                    Step::Reconnect => tasks.check_connection(),
                    Step::ForgottenWatch => tasks.insert_behind_attempted(a_job()),
                    Step::Attempt => {
                        if let Some(task) = tasks.front_mut() {
                            task.retries.get_or_insert_with(|| Retries::begin(0, Duration::from_secs(1)));
                        }
                    }
                    Step::Finish => {
                        if tasks.front_mut().is_some_and(|task| task.retries.is_some()) {
                            tasks.pop_front();
                        }
                    }
                }
                let all = tasks.queue.iter().filter(|task| task.retries.is_some()).count();
                prop_assert_eq!(tasks.attempted().count(), all);
                prop_assert_eq!(tasks.attempted_mut().count(), all);
            }
        }
    }
}
