//! Starts the workers of a group, and replacements for failed workers.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use std::{fs, io};

use elasticrs_nursery::fence::FenceState;
use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_nursery::tree::Status;
use elasticrs_sys::clock::{Stamp, boot_now};
use elasticrs_sys::signal::Signal;
use elasticrs_sys::stage::Stage;
use elasticrs_sys::{process, procfs};

use super::check::CHECK_INTERVAL;
use super::launches::{Purpose, Reason};
use super::running::{Current, Running};
use super::{FENCE_SLACK, Task};
use crate::spec::{GroupSpec, StopPolicy};
use crate::supervisor::command::{Adopted, SupervisorError};
use crate::supervisor::deadlines::{AT_ONCE, Deadline};
use crate::supervisor::event::{Event, StartFailure, SweepOutcome};
use crate::supervisor::start::Starting;
use crate::supervisor::state::Input;

/// Time limit for the nursery to report a failed start after the hanging process was killed.
const KILL_LIMIT: Duration = Duration::from_secs(5);
const FENCED: StopPolicy = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };

impl Task {
    // --- starting a group -------------------------------------------------------------------------------------

    pub(super) fn begin_start(&mut self, mut spec: GroupSpec) -> Result<(), SupervisorError> {
        if !self.current.is_idle() {
            return Err(SupervisorError::Busy);
        }
        self.heartbeats.give_pages(&mut spec).map_err(SupervisorError::Heartbeats)?;
        self.check_sentinel();
        let mut starting = Starting::new(&spec);
        if !self.nursery.exists() && !self.launches.are_running(Purpose::is_current) {
            self.launches.nursery(Reason::Needed, self.images.fitting(&spec), None, spec.policy.start_deadline);
        }
        if self.has_ready_nursery() {
            self.current = Current::Starting(starting);
            self.request_start(&spec).inspect_err(|_| self.current = Current::Idle)?;
        } else {
            starting.wait_for_nursery(spec);
            self.current = Current::Starting(starting);
            self.deadlines.disarm(Deadline::Warm);
            self.nursery.arm_import(&mut self.deadlines);
            self.deadlines.arm(Deadline::Fence, FENCE_SLACK, Instant::now());
        }
        Ok(())
    }

    fn request_start(&mut self, spec: &GroupSpec) -> io::Result<()> {
        let requests = spec.processes.iter().map(|process| spec.policy.spawn_request(process, &spec.descriptors));
        let requests = requests.collect::<io::Result<Vec<_>>>()?;
        let Some(nursery) = self.nursery.get() else { return Ok(()) };
        // Discard progress reports that earlier worker starts left in the pipe.
        nursery.stage_reached();
        for (request, fds) in requests {
            nursery.send(&request, fds);
        }
        self.deadlines.arm(Deadline::Start, spec.policy.start_deadline, Instant::now());
        self.deadlines.arm(Deadline::Fence, FENCE_SLACK, Instant::now());
        self.start_when_answered();
        Ok(())
    }

    /// Returns true if a nursery is running, has finished its imports, and no launch of a nursery or sentinel is
    /// pending.
    fn has_ready_nursery(&self) -> bool {
        let is_launching = self.launches.are_running(|purpose| purpose.is_current() || purpose.is_sentinel());
        self.nursery.exists() && !self.nursery.is_warming() && !is_launching
    }

    /// Starts the group that is waiting for a nursery. Does nothing if no group is waiting, or if the nursery is not
    /// ready.
    pub(super) fn start_waiting(&mut self) {
        if !self.has_ready_nursery() {
            return;
        }
        let Some(spec) = self.current.starting_mut().and_then(Starting::take_waiting) else { return };
        if let (Err(error), Current::Starting(starting)) = (self.request_start(&spec), &mut self.current) {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            let (stage, subject) = (Stage::Receive, String::new());
            for local_rank in (0..).take(spec.processes.len()) {
                starting.failed(StartFailure::Worker { local_rank, stage, errno, subject: subject.clone() });
            }
            self.start_when_answered();
        }
    }

    pub(super) fn on_spawned(&mut self, local_rank: u32, pid: i32, pidfd: Option<OwnedFd>) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.spawned(local_rank, pid, pidfd);
                self.start_when_answered();
            }
            Current::Running(_) => self.on_replaced(local_rank, pid, pidfd),
        }
    }

    pub(super) fn on_spawn_failed(&mut self, failure: StartFailure) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.failed(failure);
                self.start_when_answered();
            }
            Current::Running(_) => self.replace_has_failed(failure),
        }
    }

    fn start_when_answered(&mut self) {
        let Current::Starting(starting) = &mut self.current else { return };
        if !starting.all_answered() {
            return;
        }
        self.deadlines.disarm(Deadline::Start);
        self.deadlines.disarm(Deadline::Fence);
        if starting.has_failed() {
            // Kill the workers that were started, because either all workers of a group start, or none (**SUP-1**).
            return self.sweep(AT_ONCE);
        }
        let Current::Starting(starting) = std::mem::replace(&mut self.current, Current::Idle) else { return };
        let (group, workers, early) = starting.into_group();
        let pids = workers.iter().map(|(pid, _)| *pid).collect();
        self.shared.queue.push(Event::GroupStarted { pids, started: Stamp::now() });
        self.current = Current::Running(Running::new(group, workers));
        self.deadlines.arm(Deadline::Check, CHECK_INTERVAL, Instant::now());
        self.watch_for_hangs();
        for input in early {
            self.input(input);
        }
    }

    pub(super) fn start_has_failed(&mut self, failure: StartFailure) {
        self.current = Current::Idle;
        self.deadlines.clear();
        self.shared.logs.finish_all();
        self.shared.queue.push(Event::StartFailed(failure));
    }

    pub(super) fn on_hung_start(&mut self) {
        let Current::Starting(starting) = &mut self.current else { return };
        if let Some(nursery) = self.nursery.get() {
            let stage = nursery.stage_reached();
            let wait_channel = match stage {
                Some(Stage::Fork | Stage::NextFork) => procfs::wait_channel(nursery.pid),
                _ => child_that_starts(nursery.pid, &starting.pids()).map(procfs::wait_channel).unwrap_or_default(),
            };
            starting.hung(stage, wait_channel);
            // Kill the nursery, because the kernel then kills the hanging child as well. If the child survives,
            // `on_nursery_death` stops waiting for it after a time limit.
            nursery.kill();
        }
    }

    /// Cancels the start of a group that is still waiting for a nursery. Returns false if no group is waiting.
    pub(super) fn end_waiting(&mut self) -> bool {
        if self.current.starting_mut().and_then(Starting::take_waiting).is_none() {
            return false;
        }
        let is_only_for_it = |purpose: &Purpose| {
            matches!(purpose, Purpose::Current(Reason::Needed | Reason::GoOnCold(_))) || purpose.is_sentinel()
        };
        self.launches.cancel(is_only_for_it);
        // Skip the clean-up of leftover processes, because the nursery has not started any worker yet.
        self.on_swept(SweepOutcome::default());
        true
    }

    /// Kills the nursery, because a stop was requested during the start and the grace period has passed. All workers
    /// die with the nursery, including those that are still being started.
    pub(super) fn kill_start(&mut self) {
        if let (Current::Starting(starting), Some(nursery)) = (&self.current, self.nursery.get())
            && !starting.has_failed()
        {
            nursery.kill();
        }
    }

    // --- the fence deadline while workers are being started -----------------------------------------------------

    /// If a worker is being started, checks the deadline for killing all workers. Normally, the nursery process checks
    /// the deadline, but the start may block the nursery.
    pub(super) fn fence_start(&mut self) {
        if !self.current.starts_a_worker() {
            return;
        }
        match self.shared.fence.look() {
            Ok(FenceState::At(deadline)) => {
                let left = Duration::from_nanos(deadline.saturating_sub(boot_now()));
                self.deadlines.arm(Deadline::Fence, left + FENCE_SLACK, Instant::now());
            }
            // Do nothing, because no deadline is set, or because the nursery or its sentinel has already noticed that
            // the deadline has passed.
            Ok(FenceState::Passed { first: false } | FenceState::Unset | FenceState::HandedOver(_)) | Err(_) => {}
            Ok(FenceState::Passed { first: true }) => {
                self.on_fenced_start();
                if self.end_waiting() {
                    return;
                }
                if self.current.is_starting() {
                    return self.kill_start();
                }
                if let Some(nursery) = self.nursery.get() {
                    nursery.kill();
                }
            }
        }
    }

    /// Called if the deadline for killing all workers passes while the nursery is blocked or dead during the start of a
    /// worker. Reports the passed deadline in place of the nursery, and stops the group.
    pub(super) fn on_fenced_start(&mut self) {
        self.shared.queue.push(Event::Fenced);
        match &mut self.current {
            Current::Starting(starting) => starting.stop(FENCED),
            Current::Idle | Current::Running(_) => self.input(Input::Fenced),
        }
    }

    // --- members that join a running group --------------------------------------------------------------------

    pub(super) fn adopt(&mut self, adopted: Adopted) -> Result<(), SupervisorError> {
        let Adopted { local_rank, pid, pidfd, status, page } = adopted;
        let Current::Running(running) = &mut self.current else { return Err(SupervisorError::Idle) };
        let is_watched = page.is_some();
        if let Some(page) = page {
            self.heartbeats
                .take_page(local_rank, page)
                .map_err(|source| SupervisorError::Page { local_rank, source })?;
        }
        running.adopt(pid, pidfd, status);
        self.raised.forget_strangers();
        self.input(Input::Adopted { local_rank, pid });
        if is_watched {
            self.watch_for_hangs();
        }
        Ok(())
    }

    pub(super) fn replace(
        &mut self,
        mut process: ProcessSpec,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), SupervisorError> {
        let local_rank = process.local_rank;
        let Current::Running(running) = &self.current else { return Err(SupervisorError::Idle) };
        if let Some(reason) = running.group.refusal(local_rank) {
            return Err(SupervisorError::Replace { local_rank, reason });
        }
        self.heartbeats.give_page_again(&mut process, &mut descriptors).map_err(SupervisorError::Heartbeats)?;
        let (request, fds) = running.group.policy.spawn_request(&process, &descriptors)?;
        let Some(nursery) = self.nursery.get() else { return Err(SupervisorError::Idle) };
        let now = Instant::now();
        self.deadlines.arm(Deadline::Replace(local_rank), running.group.policy.start_deadline, now);
        self.deadlines.arm(Deadline::Fence, FENCE_SLACK, now);
        nursery.send(&request, fds);
        self.input(Input::Replace { local_rank });
        Ok(())
    }

    fn on_replaced(&mut self, local_rank: u32, pid: i32, pidfd: Option<OwnedFd>) {
        let Current::Running(running) = &mut self.current else { return };
        let Some(pidfd) = pidfd else {
            self.nursery.send(&Request::SignalGroup { pid, signal: libc::SIGKILL }, Vec::new());
            return self.replace_has_failed(StartFailure::no_descriptor(local_rank, pid));
        };
        self.deadlines.disarm(Deadline::Replace(local_rank));
        running.replace(local_rank, pid, pidfd);
        self.raised.forget_strangers();
        self.input(Input::Replaced { local_rank, pid, started: Stamp::now() });
    }

    fn replace_has_failed(&mut self, failure: StartFailure) {
        self.deadlines.disarm(Deadline::Replace(failure.local_rank()));
        if let Some(running) = self.current.running_mut() {
            running.hung = None;
        }
        self.input(Input::ReplaceFailed(failure));
    }

    /// Handles a replacement worker that takes too long to start. The nursery is blocked during the start.
    ///
    /// The first call kills the hanging child, so that its start fails.
    ///
    /// If the nursery is still blocked at the next call, kills the nursery, which also kills all workers.
    pub(super) fn on_hung_replace(&mut self, local_rank: u32) {
        let Current::Running(running) = &mut self.current else { return };
        let Some(nursery) = self.nursery.get() else { return };
        if let Some(failure) = running.hung.take() {
            nursery.kill();
            return self.replace_has_failed(failure);
        }
        let (stage, deadline) = (nursery.stage_reached(), running.group.policy.start_deadline);
        let others: Vec<i32> = running.pids().collect();
        let child = match stage {
            Some(Stage::Fork | Stage::NextFork) => None,
            _ => child_that_starts(nursery.pid, &others),
        };
        let wait_channel = procfs::wait_channel(child.unwrap_or(nursery.pid));
        let failure = StartFailure::Hung { local_rank, stage, wait_channel, deadline };
        if running.group.is_running() {
            self.shared.queue.degraded(failure.to_string());
        }
        running.hung = Some(failure);
        let now = Instant::now();
        for later in running.group.starting() {
            self.deadlines.arm(Deadline::Replace(later), deadline.saturating_add(KILL_LIMIT), now);
        }
        let limit = if child.is_some_and(|child| kill_child(nursery.pid, child)) { KILL_LIMIT } else { Duration::ZERO };
        self.deadlines.arm(Deadline::Replace(local_rank), limit, now);
    }
}

/// Kills a process if it is a child of `parent`. Returns true if SIGKILL was sent.
fn kill_child(parent: i32, child: i32) -> bool {
    let Ok(pidfd) = process::open_pidfd(child) else { return false };
    // Check the parent after opening the pidfd. Otherwise, the pid could be reused between the two steps.
    Status::of(child).is_some_and(|status| status.parent == parent)
        && process::send_signal(&pidfd, libc::SIGKILL).is_ok()
}

/// Returns the child that the nursery `pid` is still starting. It is the newest child of the nursery that executes the
/// same program as the nursery and is not one of `others`.
#[allow(clippy::disallowed_methods, reason = "links below /proc are read without blocking")]
fn child_that_starts(pid: i32, others: &[i32]) -> Option<i32> {
    let program = |pid: i32| fs::read_link(procfs::folder(pid)?.join("exe")).ok();
    let own = program(pid);
    let children = procfs::read(pid, &format!("task/{pid}/children")).unwrap_or_default();
    let mut children = children.split_whitespace().rev().filter_map(|child| child.parse().ok());
    children.find(|child| !others.contains(child) && program(*child) == own)
}
