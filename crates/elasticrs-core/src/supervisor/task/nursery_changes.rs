//! Handles a nursery that becomes ready, hangs, dies, or does not exit even after SIGKILL, and switches to another
//! nursery.

use std::time::Instant;

use elasticrs_nursery::activity::ActivityPage;
use elasticrs_nursery::fence::FenceState;
use elasticrs_nursery::held;
use elasticrs_nursery::launch::LaunchError;
use elasticrs_nursery::report::{self, ImportFailure};
use elasticrs_nursery::token::Token;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;

use super::Task;
use super::check::NurseryAction;
use super::launches::{Finished, LAUNCH_LIMIT, Purpose, Reason, SLOW_LAUNCH};
use super::nursery::{self, Import, Nursery, Retired, SentinelLink};
use super::running::Current;
use crate::supervisor::deadlines::{AT_ONCE, Deadline};
use crate::supervisor::event::{Event, NurseryExit, StartFailure};
use crate::supervisor::start::Starting;
use crate::supervisor::state::Input;

impl Task {
    /// Switches to a new nursery.
    pub(super) fn use_nursery(&mut self, mut nursery: Nursery) {
        self.guard.equip(&mut nursery);
        if let Some(previous) = self.nursery.replace(nursery) {
            self.retired.add_nursery(previous);
        }
        self.sweeps.restore_own();
        self.nursery.arm_import(&mut self.deadlines);
    }

    /// Stops the nursery, so that the next start launches a new nursery. Returns false and keeps the nursery if a group
    /// exists, or if the deadline for killing all workers has passed.
    pub(super) fn renew_nursery(&mut self) -> bool {
        // Hand over the deadline for killing all workers to the next nursery. The current nursery may still run
        // briefly, but it no longer enforces the deadline.
        if !self.current.is_idle() || !self.shared.fence.hand_over() {
            return false;
        }
        self.launches.cancel(|_| true);
        nursery::disarm_import(&mut self.deadlines);
        if let Some(nursery) = self.nursery.take() {
            self.retired.add_nursery(nursery);
        }
        true
    }

    // --- launches ---------------------------------------------------------------------------------------------

    /// Launches the first nursery. If the launch takes longer than [`SLOW_LAUNCH`], returns while it is still running,
    /// so that the agent can handle signals in the meantime.
    pub(super) async fn launch_first(&mut self) -> Result<(), LaunchError> {
        self.launch(Reason::Needed, None);
        if let Ok(Finished { result, .. }) = tokio::time::timeout(SLOW_LAUNCH, self.launches.finished()).await {
            self.use_nursery(result?);
        }
        Ok(())
    }

    fn launch(&mut self, reason: Reason, since: Option<u64>) {
        self.launches.nursery(reason, self.images.all(), since, LAUNCH_LIMIT);
    }

    pub(super) fn on_launched(&mut self, Finished { purpose, result }: Finished) {
        match (purpose, result) {
            (None, Ok(unwanted)) => self.retired.add_nursery(unwanted),
            (None, Err(_)) => {}
            (Some(Purpose::Current(reason)), result) => self.on_current_launched(reason, result),
            (Some(Purpose::Sentinel(token, activity)), result) => self.on_sentinel_launched(token, activity, result),
        }
    }

    fn on_current_launched(&mut self, reason: Reason, result: Result<Nursery, LaunchError>) {
        match (reason, result) {
            (Reason::ImportRest(_), Ok(nursery)) if nursery.import.is_some() => self.use_nursery(nursery),
            (Reason::ImportRest(exit), result) => {
                if let Ok(nursery) = result {
                    self.retired.add_nursery(nursery);
                }
                self.go_on_cold(exit);
            }
            (Reason::Needed | Reason::GoOnCold(_), Ok(nursery)) => {
                self.use_nursery(nursery);
                self.start_waiting();
            }
            (reason, Err(error)) => {
                // Ignore the error if no group is waiting, because the next start of a group launches a nursery again
                // and reports any error.
                let waiting = self.current.starting_mut().and_then(Starting::take_waiting);
                match reason {
                    _ if waiting.is_none() => {}
                    Reason::GoOnCold(exit) => self.end_without_nursery(exit),
                    Reason::Needed | Reason::ImportRest(_) => self.start_has_failed(StartFailure::no_nursery(&error)),
                }
            }
        }
    }

    fn on_sentinel_launched(&mut self, token: Token, activity: ActivityPage, result: Result<Nursery, LaunchError>) {
        let nursery = self.nursery.get().filter(|nursery| nursery.token == token);
        let guarded = match (nursery, result) {
            (Some(nursery), Ok(sentinel)) => {
                nursery.guard_by(sentinel, activity).map(|sentinel| self.guard.equip_one(sentinel)).map_err(Into::into)
            }
            (None, Ok(sentinel)) => {
                self.retired.add_nursery(sentinel);
                Ok(())
            }
            (Some(_), Err(error)) => Err(error),
            (None, Err(_)) => Ok(()),
        };
        if let Err(error) = guarded {
            let message = format!("the nursery's sentinel was lost, and cannot be replaced: {error}");
            self.shared.queue.degraded(message);
        }
        self.start_waiting();
    }

    // --- the current nursery ----------------------------------------------------------------------------------

    pub(super) fn on_ready(&mut self) {
        if self.nursery.finish_import(&mut self.deadlines) {
            self.shared.queue.push(Event::Warmed { failure: None });
            self.start_waiting();
        }
    }

    /// Replaces the guard process of the nursery if it was lost. Only the guard process can clean up if the agent is
    /// killed while the nursery hangs.
    pub(super) fn check_sentinel(&mut self) {
        if let Some(nursery) = self.nursery.get()
            && let Some(activity) = nursery.take_lost_sentinel()
        {
            self.launches.sentinel(self.images.all(), nursery.token, activity);
        }
    }

    /// Stops an import that exceeds its time limit.
    pub(super) fn on_overdue_import(&mut self) {
        let is_rest = |purpose: &Purpose| matches!(purpose, Purpose::Current(Reason::ImportRest(_)));
        for purpose in self.launches.cancel(is_rest) {
            if let Purpose::Current(Reason::ImportRest(exit)) = purpose {
                self.go_on_cold(exit);
            }
        }
        self.nursery.kill_hung_import();
    }

    /// Checks for dead workers whose exits the nursery has not reported.
    ///
    /// If a tracer (such as a debugger) holds the worker, reports the exit in place of the nursery. Otherwise, resumes
    /// the nursery, because a signal may have stopped it.
    ///
    /// If the exit is still unreported at the next check, kills the nursery, because it hangs.
    pub(super) fn check(&mut self) {
        if self.owns_process {
            self.orphans.reap(self.nursery.pid());
        }
        self.check_sentinel();
        let Current::Running(running) = &mut self.current else { return };
        let adopted = running.adopted();
        let workers = running.group.living().filter(|pid| !adopted.contains(pid));
        // Ignore workers that are traced by the nursery (`PTRACE_TRACEME`), because the nursery reaps them as usual.
        let nursery = self.nursery.pid();
        let by_others = |pid: i32| held::by_tracer(pid).filter(|held| Some(held.tracer) != nursery);
        let held: Vec<_> = workers.filter_map(|pid| by_others(pid).map(|held| (pid, held))).collect();
        let is_held = |pid: &i32| held.iter().any(|(held, _)| held == pid);
        let dead = running.dead().into_iter().filter(|pid| !adopted.contains(pid) && !is_held(pid)).collect();
        let is_starting = running.group.starting().next().is_some();
        let outcome = running.unreported.check(dead, held, is_starting);
        match (outcome.nursery, self.nursery.get()) {
            (Some(NurseryAction::Resume), Some(nursery)) => nursery.resume(),
            (Some(NurseryAction::Kill), Some(nursery)) => nursery.kill_hung(),
            _ => {}
        }
        self.deadlines.arm(Deadline::Check, outcome.pause, Instant::now());
        for (pid, held) in outcome.held {
            self.held.report(pid, held.told);
            self.input(Input::Exited { pid, exit: held.exit, seen: Stamp::now() });
        }
    }

    /// Continues without a nursery that does not exit after SIGKILL. Kills the workers directly, because the kernel
    /// kills them only when the nursery dies.
    ///
    /// The nursery dies later, as soon as the kernel can deliver the pending SIGKILL.
    pub(super) fn give_up_nursery(&mut self) {
        if let Some(nursery) = self.nursery.get() {
            nursery.hung = false;
            self.shared.queue.degraded(nursery.left_behind());
            self.sweeps.shorten_own();
        }
        self.on_nursery_death(WorkerExit::Unknown);
    }

    pub(super) fn on_nursery_death(&mut self, exit: WorkerExit) {
        self.sweeps.nursery_lost();
        let lost = self.nursery.take();
        let exit = NurseryExit { exit, hung: lost.as_ref().is_some_and(|nursery| nursery.hung) };
        let (import, sentinel) = lost.map_or((None, None), |nursery| (nursery.import, nursery.sentinel));
        if let Some(import) = import {
            return self.on_lost_import(import, sentinel, exit);
        }
        if let Some(SentinelLink { mut sentinel, .. }) = sentinel {
            // Kill the sentinel, because this process cleans up instead.
            sentinel.kill();
            self.retired.add_nursery(*sentinel);
        }
        self.end_without_nursery(exit);
    }

    /// Stops the group, because its nursery has exited and is not replaced.
    fn end_without_nursery(&mut self, exit: NurseryExit) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.nursery_lost(exit);
                if !starting.is_stopped() && self.has_fence_passed() {
                    // Report in place of the nursery that the deadline for killing all workers has passed, because the
                    // nursery hung and was killed.
                    self.on_fenced_start();
                }
                self.deadlines.disarm(Deadline::Start);
                self.deadlines.disarm(Deadline::Fence);
                self.sweep(AT_ONCE);
            }
            Current::Running(running) => {
                // The lost nursery no longer reports exits, so this process watches the remaining workers itself.
                running.watch_exits();
                let is_starting = running.group.is_running() && running.group.starting().next().is_some();
                if is_starting && self.has_fence_passed() {
                    // Report in place of the nursery that the deadline for killing all workers has passed, because the
                    // nursery died while it was starting a replacement worker.
                    self.on_fenced_start();
                }
                self.input(Input::NurseryLost(exit));
            }
        }
    }

    fn has_fence_passed(&self) -> bool {
        matches!(self.shared.fence.look(), Ok(FenceState::Passed { .. }))
    }

    /// Handles the death of a nursery during its imports.
    fn on_lost_import(&mut self, import: Import, sentinel: Option<SentinelLink>, exit: NurseryExit) {
        match rest(import, sentinel, exit, &mut self.retired) {
            Some(since) => self.launch(Reason::ImportRest(exit), Some(since)),
            None => self.go_on_cold(exit),
        }
    }

    /// Launches a replacement nursery that imports no modules. Nurseries import no modules for the rest of the job.
    fn go_on_cold(&mut self, exit: NurseryExit) {
        nursery::disarm_import(&mut self.deadlines);
        self.images.forget_warm();
        self.shared.queue.push(Event::Warmed { failure: Some(exit) });
        self.launch(Reason::GoOnCold(exit), None);
    }
}

/// Cleans up after a nursery that died during its imports. If a module killed the nursery, another nursery can import
/// the remaining modules. In that case, returns the offset in the report file at which the records of these imports
/// start. Otherwise, returns `None`.
fn rest(import: Import, sentinel: Option<SentinelLink>, exit: NurseryExit, retired: &mut Retired) -> Option<u64> {
    let Import { warm, since, failure, is_unguarded, .. } = import;
    if let Some(SentinelLink { sentinel, .. }) = sentinel {
        retired.add_sentinel(*sentinel);
    }
    if is_unguarded {
        report::fail(&warm.report, "the process that guards the import was lost");
        return None;
    }
    let failure = failure.unwrap_or(ImportFailure::Exited(exit.exit));
    let can_go_on = !exit.hung && report::blame(&warm.report, since, failure);
    can_go_on.then_some(since)
}

/// Kills a nursery that speaks another protocol version. The job then continues with a nursery that does not preload
/// modules. Only a nursery that preloads modules can use another version. Such a nursery runs an installed program, and
/// another version may have been installed since this process started.
pub(super) fn refuse(nursery: &mut Nursery) {
    if let Some(import) = &nursery.import {
        report::fail(
            &import.warm.report,
            "another build of elasticrs was installed while this job was running; start the job again to use --warm",
        );
    }
    nursery.kill();
}
