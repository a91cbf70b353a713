//! State of a group while its workers are being started. Either all workers start, or the start fails.

use std::io;
use std::os::fd::OwnedFd;

use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::stage::Stage;

use super::event::{NurseryExit, Outcome, StartFailure};
use super::state::{Group, Input};
use crate::spec::{GroupPolicy, GroupSpec, StopPolicy};

impl GroupPolicy {
    /// Returns the request to start a worker, and the descriptors to send with the request.
    pub(super) fn spawn_request(
        &self,
        process: &ProcessSpec,
        descriptors: &[OwnedFd],
    ) -> io::Result<(Request, Vec<OwnedFd>)> {
        let fds = process.pass_fds.iter().map(|passed| descriptors[passed.source as usize].try_clone());
        let pass_fds = (0..).zip(&process.pass_fds).map(|(source, passed)| PassedFd { source, target: passed.target });
        let keep_ignored = self.keep_ignored.iter().map(|signal| signal.number()).collect();
        let process = ProcessSpec { pass_fds: pass_fds.collect(), keeps_orphans: self.replaces, ..process.clone() };
        Ok((Request::Spawn { process, keep_ignored }, fds.collect::<io::Result<_>>()?))
    }
}

enum WorkerStart {
    Awaited,
    Spawned { pid: i32, pidfd: OwnedFd },
    Failed,
}

/// A group whose workers are being started.
pub(super) struct Starting {
    answers: Vec<WorkerStart>,
    policy: GroupPolicy,
    failure: Option<StartFailure>,
    nursery: Option<NurseryExit>,
    stop: Option<StopPolicy>,
    /// Specification of the group while the group waits for a nursery. `None` once the workers are being started.
    waiting: Option<GroupSpec>,
    /// Events of workers that are already running, stored until all workers have been started.
    early: Vec<Input>,
}

impl Starting {
    pub(super) fn new(spec: &GroupSpec) -> Self {
        Self {
            answers: spec.processes.iter().map(|_| WorkerStart::Awaited).collect(),
            policy: spec.policy.clone(),
            failure: None,
            nursery: None,
            stop: None,
            waiting: None,
            early: Vec::new(),
        }
    }

    /// Delays the start of the workers until a nursery is running and has finished its imports.
    pub(super) fn wait_for_nursery(&mut self, spec: GroupSpec) {
        self.waiting = Some(spec);
    }

    /// Removes and returns the group that waits for a nursery. `None` if the nursery was already asked to start the
    /// workers.
    pub(super) fn take_waiting(&mut self) -> Option<GroupSpec> {
        self.waiting.take()
    }

    pub(super) fn spawned(&mut self, local_rank: u32, pid: i32, pidfd: Option<OwnedFd>) {
        if let Some(pidfd) = pidfd {
            self.answer(local_rank, WorkerStart::Spawned { pid, pidfd });
        } else {
            self.failed(StartFailure::no_descriptor(local_rank, pid));
        }
    }

    /// Records that a worker could not be started. Only the first failure is reported.
    pub(super) fn failed(&mut self, failure: StartFailure) {
        if let StartFailure::Worker { local_rank, .. } = &failure {
            self.answer(*local_rank, WorkerStart::Failed);
        }
        self.failure.get_or_insert(failure);
    }

    /// Records that the start of the workers has exceeded its deadline.
    ///
    /// The first worker without a reply is reported as hung, because workers are started in order. In
    /// [`Stage::NextFork`], the nursery hangs while it forks the next worker, so the second worker without a reply is
    /// reported.
    pub(super) fn hung(&mut self, stage: Option<Stage>, wait_channel: String) {
        let mut waiting = (0..).zip(&self.answers).filter(|(_, answer)| matches!(answer, WorkerStart::Awaited));
        let (behind, stage) = match stage {
            Some(Stage::NextFork) => (1, Some(Stage::Fork)),
            other => (0, other),
        };
        let local_rank = waiting.nth(behind).map_or(0, |(rank, _)| rank);
        self.failed(StartFailure::Hung { local_rank, stage, wait_channel, deadline: self.policy.start_deadline });
    }

    /// Returns the pids of the workers that are already running.
    pub(super) fn pids(&self) -> Vec<i32> {
        let pid = |answer: &WorkerStart| if let WorkerStart::Spawned { pid, .. } = answer { Some(*pid) } else { None };
        self.answers.iter().filter_map(pid).collect()
    }

    pub(super) fn nursery_lost(&mut self, exit: NurseryExit) {
        self.nursery = Some(exit);
    }

    /// Records a request to stop the group. If there are several requests, the one with the shortest grace period
    /// applies.
    pub(super) fn stop(&mut self, policy: StopPolicy) {
        if self.stop.is_none_or(|earlier| policy.grace <= earlier.grace) {
            self.stop = Some(policy);
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_some()
    }

    pub(super) fn early(&mut self, input: Input) {
        self.early.push(input);
    }

    pub(super) fn all_answered(&self) -> bool {
        !self.answers.iter().any(|answer| matches!(answer, WorkerStart::Awaited))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Removes and returns the reason why the group did not start. The `Result` is used as an either type: `Ok`
    /// contains the failure to start a worker, and `Err` the outcome of a group that was stopped or lost its nursery.
    ///
    /// Called once leftover processes have been cleaned up.
    pub(super) fn take_outcome(&mut self) -> Result<StartFailure, (Outcome, Option<NurseryExit>)> {
        match (self.failure.take(), self.stop) {
            (Some(failure), _) => Ok(failure),
            (None, Some(_)) => Err((Outcome::Stopped, None)),
            (None, None) => Err((Outcome::Lost, self.nursery)),
        }
    }

    /// Returns the running group, the pid and pidfd of each worker by local rank, and the inputs that arrived during the
    /// start.
    pub(super) fn into_group(self) -> (Group, Vec<(i32, OwnedFd)>, Vec<Input>) {
        let spawned = |answer| match answer {
            WorkerStart::Spawned { pid, pidfd } => Some((pid, pidfd)),
            WorkerStart::Awaited | WorkerStart::Failed => None,
        };
        let members: Vec<_> = self.answers.into_iter().filter_map(spawned).collect();
        let pids: Vec<i32> = members.iter().map(|(pid, _)| *pid).collect();
        let early = self.early.into_iter().chain(self.stop.map(Input::Stop)).collect();
        (Group::new(&pids, self.policy), members, early)
    }

    fn answer(&mut self, local_rank: u32, answer: WorkerStart) {
        if let Some(slot) = self.answers.get_mut(local_rank as usize) {
            *slot = answer;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use elasticrs_sys::process::{self, WorkerExit};
    use elasticrs_sys::signal::Signal;

    use super::*;
    use crate::spec::{Descendants, StopScope};

    const TERM: StopPolicy = StopPolicy { signal: Signal::TERM, grace: Duration::ZERO };

    /// Returns the policy of a group that is stopped without a grace period, and whose descendants are left running.
    pub(in crate::supervisor) fn policy() -> GroupPolicy {
        GroupPolicy {
            on_failure: TERM,
            stop_scope: StopScope::Group,
            on_success: Descendants::Keep,
            start_deadline: Duration::ZERO,
            keep_ignored: Vec::new(),
            replaces: false,
            keep_grace: Duration::ZERO,
        }
    }

    /// Returns a group with one worker. If `warm` is true, the worker needs modules that the nursery has imported.
    pub(in crate::supervisor) fn group(warm: bool) -> GroupSpec {
        GroupSpec {
            processes: vec![ProcessSpec { warm, ..ProcessSpec::new(Vec::new(), Vec::new()) }],
            descriptors: Vec::new(),
            policy: policy(),
        }
    }

    #[test]
    fn a_group_that_waits_for_a_nursery_is_started_once() {
        let mut starting = Starting::new(&group(true));
        assert!(starting.take_waiting().is_none());
        starting.wait_for_nursery(group(true));
        assert!(starting.take_waiting().is_some());
        assert!(starting.take_waiting().is_none());
    }

    #[test]
    fn a_stopped_start_is_reported_as_stopped_unless_it_failed() {
        let exit = NurseryExit { exit: WorkerExit::Unknown, hung: false };
        let failure = StartFailure::Worker { local_rank: 0, stage: Stage::Exec, errno: 2, subject: String::new() };
        let mut starting = Starting::new(&group(false));
        starting.nursery_lost(exit);
        assert_eq!(starting.take_outcome(), Err((Outcome::Lost, Some(exit))));
        starting.stop(TERM);
        assert_eq!(starting.take_outcome(), Err((Outcome::Stopped, None)));
        starting.failed(failure.clone());
        assert!(starting.all_answered());
        assert_eq!(starting.take_outcome(), Ok(failure));
    }

    #[test]
    fn a_stop_during_the_start_is_applied_after_all_other_early_inputs() {
        let own = std::process::id().cast_signed();
        let mut starting = Starting::new(&group(false));
        starting.stop(TERM);
        starting.early(Input::Continued { pid: own });
        starting.spawned(0, own, process::open_pidfd(own).ok());
        assert!(starting.all_answered());
        let (group, workers, early) = starting.into_group();
        assert_eq!((group.living().collect::<Vec<_>>(), workers.len()), (vec![own], 1));
        assert_eq!(early, [Input::Continued { pid: own }, Input::Stop(TERM)]);
    }
}
