//! Cleans up after a failed worker and starts its replacement.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_nursery::tree::Status;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::pidfd;
use elasticrs_sys::stage::Stage;

use super::ending::SWEEP_SLACK;
use super::{Current, Member, Task};
use crate::supervisor::command::SupervisorError;
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::{Event, StartFailure, Swept};
use crate::supervisor::state::Input;
use crate::supervisor::task::loss::FENCE_AFTER;
use crate::supervisor::watch;

/// Time limit for a hanging start to fail after the starting process was sent SIGKILL.
const KILL_LIMIT: Duration = Duration::from_secs(5);

impl Task {
    pub(super) fn sweep_left(&mut self, local_rank: u32, pid: i32, give_up: Duration) {
        let Some(nursery) = &mut self.nursery else { return };
        self.sweeps = self.sweeps.wrapping_add(1);
        self.sweeps_left = Some((self.sweeps, local_rank));
        let give_up_ms = u64::try_from(give_up.as_millis()).unwrap_or(u64::MAX);
        nursery.send(&Request::SweepLeft { number: self.sweeps, worker: pid, give_up_ms }, Vec::new());
        self.deadlines.arm(Timer::Sweep, give_up.saturating_add(SWEEP_SLACK), Instant::now());
    }

    pub(super) fn on_left_swept(&mut self, swept: Swept) {
        let Some((_, local_rank)) = self.sweeps_left.take() else { return };
        self.deadlines.disarm(Timer::Sweep);
        self.tell_all_held(&swept);
        // Finish the log files of this rank, because all processes of the failed worker that could write to them are
        // gone.
        self.shared.logs.finish_rank(local_rank);
        self.exits.forget(local_rank);
        self.input(Input::LeftSwept(swept, Stamp::now()));
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
        self.hangs.give_page_again(&mut process, &mut descriptors).map_err(SupervisorError::Heartbeats)?;
        self.shared.counters.heartbeats.set(self.hangs.pages());
        let (request, fds) = running.terms.spawn_request(&process, &descriptors)?;
        let Some(nursery) = &mut self.nursery else { return Err(SupervisorError::Idle) };
        let now = Instant::now();
        self.deadlines.arm(Timer::Replace(local_rank), running.terms.deadline, now);
        self.deadlines.arm(Timer::Fence, FENCE_AFTER, now);
        nursery.send(&request, fds);
        self.input(Input::Replace { local_rank });
        Ok(())
    }

    pub(super) fn on_replaced(&mut self, local_rank: u32, pid: i32, pidfd: Option<OwnedFd>) {
        let Current::Running(running) = &mut self.current else { return };
        let Some(pidfd) = pidfd else {
            if let Some(nursery) = &mut self.nursery {
                nursery.send(&Request::SignalGroup { pid, signal: libc::SIGKILL }, Vec::new());
            }
            return self.replace_has_failed(StartFailure::Worker {
                local_rank,
                stage: Stage::Receive,
                errno: libc::EMFILE,
                subject: format!("/proc/{pid}"),
            });
        };
        self.deadlines.disarm(Timer::Replace(local_rank));
        running.hung = None;
        for ended in running.members.iter_mut().filter(|member| member.pid == pid) {
            // Forget the pid of a member that has exited, because the replacement has got the same pid from the kernel.
            ended.pid = 0;
        }
        if let Some(member) = running.members.get_mut(local_rank as usize) {
            *member = Member { pid, pidfd: Arc::new(pidfd), adopted: false, leads_a_group: true };
        }
        self.exits.forget_strangers();
        self.input(Input::Replaced { local_rank, pid, started: Stamp::now() });
    }

    pub(super) fn replace_has_failed(&mut self, failure: StartFailure) {
        let (StartFailure::Worker { local_rank, .. } | StartFailure::Hung { local_rank, .. }) = &failure;
        self.deadlines.disarm(Timer::Replace(*local_rank));
        if let Current::Running(running) = &mut self.current {
            running.hung = None;
        }
        self.input(Input::ReplaceFailed(failure));
    }

    /// Handles a replacement whose start has exceeded its deadline and blocks the nursery. Kills the hanging child
    /// first. The start then fails, or, if the worker has started in the meantime, the worker fails. If that does not
    /// help, kills the nursery, and all workers die with it.
    pub(super) fn on_hung_replace(&mut self, local_rank: u32) {
        let Current::Running(running) = &mut self.current else { return };
        let Some(nursery) = &mut self.nursery else { return };
        if let Some(failure) = running.hung.take() {
            nursery.kill();
            return self.replace_has_failed(failure);
        }
        let (stage, deadline) = (nursery.stage_reached(), running.terms.deadline);
        let others: Vec<i32> = running.members.iter().map(|member| member.pid).collect();
        let child = match stage {
            Some(Stage::Fork | Stage::NextFork) => None,
            _ => watch::child_that_starts(nursery.pid, &others),
        };
        let wait_channel = watch::wait_channel(child.unwrap_or(nursery.pid));
        let failure = StartFailure::Hung { local_rank, stage, wait_channel, deadline };
        if running.group.is_running() {
            self.shared.queue.push(Event::Degraded { message: failure.to_string() });
        }
        running.hung = Some(failure);
        let now = Instant::now();
        for later in running.group.starting() {
            self.deadlines.arm(Timer::Replace(later), deadline.saturating_add(KILL_LIMIT), now);
        }
        let limit = if child.is_some_and(|child| kill_child(nursery.pid, child)) { KILL_LIMIT } else { Duration::ZERO };
        self.deadlines.arm(Timer::Replace(local_rank), limit, now);
    }
}

/// Kills a process if it is a child of `parent`. Returns true if SIGKILL was sent.
fn kill_child(parent: i32, child: i32) -> bool {
    let Ok(pidfd) = pidfd::open(child) else { return false };
    // Check the parent after opening the pidfd, because the pid could be reused between a check and the opening.
    Status::of(child).is_some_and(|status| status.parent == parent) && pidfd::send_signal(&pidfd, libc::SIGKILL).is_ok()
}
