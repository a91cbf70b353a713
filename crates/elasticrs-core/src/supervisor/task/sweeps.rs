//! Asks the nursery to clean up leftover processes, and combines the results of several requests. If the nursery is
//! lost, the agent performs the clean-up itself.

use std::time::Duration;

use elasticrs_nursery::protocol::{Request, Savers, SweepLimits};
use elasticrs_nursery::sweep;
use elasticrs_nursery::token::Token;
use tokio::task::JoinHandle;

use super::nursery::Nursery;
use super::or_panic;
use crate::supervisor::deadlines::AT_ONCE;
use crate::supervisor::event::SweepOutcome;
use crate::supervisor::state::HOPELESS_SWEEP;

/// State of the clean-ups of leftover processes.
#[derive(Debug)]
pub(super) struct Sweeps {
    /// Number of the most recent request to the nursery.
    newest: u32,
    /// Combined outcome of earlier clean-ups. It is reported together with the outcome of the last clean-up.
    combined: SweepOutcome,
    /// Number of the pending request to clean up after a failed worker, and the worker's local rank. `None` if there is
    /// no such request.
    worker: Option<(u32, u32)>,
    own: Option<JoinHandle<SweepOutcome>>,
    /// Maximum duration of a clean-up that this process performs without a nursery.
    own_limit: Duration,
}

/// A completed clean-up of leftover processes, with its outcome.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Completed {
    Group(SweepOutcome),
    Worker(u32, SweepOutcome),
}

impl Default for Sweeps {
    fn default() -> Self {
        Self { newest: 0, combined: SweepOutcome::default(), worker: None, own: None, own_limit: Duration::MAX }
    }
}

impl Sweeps {
    /// Requests that the nursery clean up all processes of the group. If earlier requests are still pending, their
    /// results are combined with the result of this request.
    pub(super) fn request(&mut self, nursery: &mut Nursery, limits: SweepLimits, savers: Option<Savers>) {
        nursery.send(&Request::Sweep { number: self.number(), left_by: None, limits, savers }, Vec::new());
    }

    /// Makes the nursery clean up after the failed worker with this local rank, whose pid was `worker`.
    pub(super) fn request_for_worker(&mut self, nursery: &mut Nursery, local_rank: u32, worker: i32) {
        let number = self.number_for_worker(local_rank);
        nursery.send(&Request::Sweep { number, left_by: Some(worker), limits: AT_ONCE, savers: None }, Vec::new());
    }

    fn number(&mut self) -> u32 {
        self.newest = self.newest.wrapping_add(1);
        self.newest
    }

    fn number_for_worker(&mut self, local_rank: u32) -> u32 {
        let number = self.number();
        self.worker = Some((number, local_rank));
        number
    }

    /// Handles the nursery's answer to the request `number`. Returns `None` if a later request for the group is
    /// pending, because the results are then reported together.
    pub(super) fn answered(&mut self, number: u32, outcome: SweepOutcome) -> Option<Completed> {
        if let Some((_, local_rank)) = self.worker.take_if(|(pending, _)| *pending == number) {
            return Some(Completed::Worker(local_rank, outcome));
        }
        let combined = &mut self.combined;
        combined.ended.extend(outcome.ended);
        combined.more += outcome.more;
        (combined.stuck, combined.spared, combined.held) = (outcome.stuck, outcome.spared, outcome.held);
        (number == self.newest).then(|| Completed::Group(std::mem::take(&mut self.combined)))
    }

    /// Stops waiting for the clean-up of a failed worker's processes.
    pub(super) fn drop_worker(&mut self) {
        self.worker = None;
    }

    /// Drops all pending requests, because the lost nursery will not answer them.
    pub(super) fn nursery_lost(&mut self) {
        self.combined = SweepOutcome::default();
        self.worker = None;
    }

    /// Shortens the time limit of clean-ups by this process. Waiting longer is useless, because the nursery could not
    /// be killed and its workers cannot exit before it does.
    pub(super) fn shorten_own(&mut self) {
        self.own_limit = HOPELESS_SWEEP;
    }

    /// Removes the time limit that [`Self::shorten_own`] has set. Called once a new nursery has replaced the hung one.
    pub(super) fn restore_own(&mut self) {
        self.own_limit = Duration::MAX;
    }

    /// Runs `sweep` on another thread. The time limit passed to `sweep` is `give_up` or `own_limit`, whichever is
    /// shorter.
    pub(super) fn start_own(
        &mut self,
        give_up: Duration,
        sweep: impl FnOnce(Duration) -> SweepOutcome + Send + 'static,
    ) {
        let limit = give_up.min(self.own_limit);
        self.own = Some(tokio::task::spawn_blocking(move || sweep(limit)));
    }

    /// Waits until the clean-up by this process is complete, and returns its outcome. The future never completes if no
    /// clean-up is running. Cancel-safe.
    pub(super) async fn own_completed(&mut self) -> SweepOutcome {
        let Some(own) = &mut self.own else { return std::future::pending().await };
        let outcome = own.await;
        self.own = None;
        or_panic(outcome)
    }

    /// Takes the handle of the running cleanup of leftover processes. `None` if this process runs no cleanup.
    pub(super) fn take_own(&mut self) -> Option<JoinHandle<SweepOutcome>> {
        self.own.take()
    }
}

/// Kills the processes that a dead nursery left behind. May block for slightly longer than `give_up`.
///
/// `sessions` contains the pids of the nursery's workers, each of which was a session leader. `adopted` contains
/// children of this process that must not be killed, because Python started and reaps them.
pub(super) fn sweep_after_loss(
    token: Token,
    owns_process: bool,
    adopted: &[i32],
    sessions: &[i32],
    give_up: Duration,
) -> SweepOutcome {
    if owns_process {
        sweep::sweep_children_of_self(adopted, sessions, give_up)
    } else {
        sweep::kill_by_token(token, give_up)
    }
}

#[cfg(test)]
mod tests {
    use elasticrs_nursery::protocol::Descendant;

    use super::*;

    fn swept(pid: i32) -> SweepOutcome {
        SweepOutcome { ended: vec![Descendant { pid, command: String::new() }], more: 1, ..SweepOutcome::default() }
    }

    #[test]
    fn cleanup_outcomes_of_a_group_are_merged_when_the_last_one_arrives() {
        let mut sweeps = Sweeps::default();
        let (first, second) = (sweeps.number(), sweeps.number());
        assert_eq!(sweeps.answered(first, swept(7)), None);
        let Some(Completed::Group(outcome)) = sweeps.answered(second, swept(8)) else { panic!("it is complete") };
        assert_eq!((outcome.ended.iter().map(|ended| ended.pid).collect::<Vec<_>>(), outcome.more), (vec![7, 8], 2));
        let third = sweeps.number();
        assert_eq!(sweeps.answered(third, swept(9)), Some(Completed::Group(swept(9))));
    }

    #[test]
    fn the_cleanup_of_a_worker_completes_separately_from_that_of_the_group() {
        let mut sweeps = Sweeps::default();
        let worker = sweeps.number_for_worker(3);
        let group = sweeps.number();
        assert_eq!(sweeps.answered(worker, swept(7)), Some(Completed::Worker(3, swept(7))));
        assert_eq!(sweeps.answered(group, swept(8)), Some(Completed::Group(swept(8))));
    }

    #[test]
    fn cleanup_outcomes_of_a_lost_nursery_are_discarded() {
        let mut sweeps = Sweeps::default();
        let first = sweeps.number();
        let _ = sweeps.number_for_worker(3);
        assert_eq!(sweeps.answered(first, swept(7)), None);
        sweeps.nursery_lost();
        let next = sweeps.number();
        assert_eq!(sweeps.answered(next, swept(8)), Some(Completed::Group(swept(8))));
    }

    #[tokio::test]
    async fn a_cleanup_has_a_short_time_limit_while_the_nursery_cannot_be_killed() {
        let mut sweeps = Sweeps::default();
        let limit_of = |limit: Duration| SweepOutcome { more: u32::try_from(limit.as_secs()).unwrap(), ..swept(7) };
        let long = Duration::from_secs(30);
        for (is_hopeless, limit) in [(false, long), (true, HOPELESS_SWEEP), (false, long)] {
            if is_hopeless {
                sweeps.shorten_own();
            } else {
                sweeps.restore_own();
            }
            sweeps.start_own(long, limit_of);
            assert_eq!(u64::from(sweeps.own_completed().await.more), limit.as_secs());
            assert!(sweeps.take_own().is_none());
        }
    }
}
