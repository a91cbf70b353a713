//! Handles a nursery that hangs, dies, or does not exit even after SIGKILL.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use elasticrs_nursery::fence::Look;
use elasticrs_sys::clock::{Stamp, boot_now};
use elasticrs_sys::exit::WorkerExit;
use elasticrs_sys::signal::Signal;
use elasticrs_sys::stage::Stage;

use super::{Current, Guard, Task};
use crate::spec::StopPolicy;
use crate::supervisor::deadlines::{GIVE_UP_AFTER, Timer};
use crate::supervisor::event::{Event, NurseryEnd, Swept};
use crate::supervisor::state::{HOPELESS_SWEEP, Input};
use crate::supervisor::watch;

/// Extra time in which the nursery can notice by itself that the fence deadline has passed.
pub(super) const FENCE_AFTER: Duration = Duration::from_millis(100);
const FENCED: StopPolicy = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };

impl Task {
    pub(super) fn on_hung_start(&mut self) {
        let Current::Starting(starting) = &mut self.current else { return };
        if let Some(nursery) = &mut self.nursery {
            let stage = nursery.stage_reached();
            let wait_channel = match stage {
                Some(Stage::Fork | Stage::NextFork) => watch::wait_channel(nursery.pid),
                _ => {
                    watch::child_that_starts(nursery.pid, &starting.pids()).map(watch::wait_channel).unwrap_or_default()
                }
            };
            starting.hung(stage, wait_channel);
            // If the hanging child can be killed, it dies together with the nursery. `on_nursery_death` sweeps until
            // the child is gone or the time limit has passed.
            nursery.kill();
        }
    }

    /// Kills the nursery, because a stop was requested during the start and the grace period is over. All workers die
    /// with the nursery, including those that are still being started.
    pub(super) fn kill_start(&mut self) {
        if let (Current::Starting(starting), Some(nursery)) = (&self.current, &mut self.nursery)
            && !starting.has_failed()
        {
            nursery.kill();
        }
    }

    /// Checks the fence deadline on behalf of the nursery, which cannot check it while it is blocked in a start.
    pub(super) fn fence_start(&mut self) {
        let is_starting = match &self.current {
            Current::Idle => false,
            Current::Starting(_) => true,
            Current::Running(running) => running.group.starting().next().is_some(),
        };
        if !is_starting {
            return;
        }
        match self.shared.fence.look() {
            Ok(Look::At(deadline)) => {
                let left = Duration::from_nanos(deadline.saturating_sub(boot_now()));
                self.deadlines.arm(Timer::Fence, left + FENCE_AFTER, Instant::now());
            }
            // Do nothing, because no deadline is set, or because the nursery or its sentinel has already noticed that
            // it has passed.
            Ok(Look::Passed { first: false } | Look::Unset | Look::HandedOver(_)) | Err(_) => {}
            Ok(Look::Passed { first: true }) => {
                self.end_fenced();
                if matches!(self.current, Current::Starting(_)) {
                    return self.kill_start();
                }
                if let Some(nursery) = &mut self.nursery {
                    nursery.kill();
                }
            }
        }
    }

    /// Reports and handles a fence deadline that passed during a start, because the nursery does not report it then.
    fn end_fenced(&mut self) {
        self.shared.queue.push(Event::Fenced { at: Stamp::now() });
        match &mut self.current {
            Current::Starting(starting) => starting.stop(FENCED),
            Current::Idle | Current::Running(_) => self.input(Input::Fenced),
        }
    }

    /// Stops waiting for a nursery that does not exit after SIGKILL. Its workers do not die until it does, so they are
    /// killed, and its descendants are swept as far as possible. The SIGKILL stays pending, so the nursery dies as soon
    /// as the kernel can kill it.
    pub(super) fn give_up_nursery(&mut self) {
        if let Some(nursery) = &mut self.nursery {
            nursery.hung = false;
            self.shared.queue.push(Event::Degraded { message: left_behind(nursery.pid) });
            self.sweep_limit = HOPELESS_SWEEP;
        }
        self.on_nursery_death(WorkerExit::Unknown);
    }

    pub(super) fn on_nursery_death(&mut self, exit: WorkerExit) {
        self.swept = Swept::default();
        self.sweeps_left = None;
        let lost = self.nursery.take();
        let end = NurseryEnd { exit, hung: lost.as_ref().is_some_and(|nursery| nursery.hung) };
        self.shared.nursery_pid.store(0, Ordering::Relaxed);
        let (import, sentinel) = lost.map_or((None, None), |nursery| (nursery.import, nursery.sentinel));
        if let Some(import) = import {
            if self.on_lost_import(import, sentinel, end) {
                return;
            }
        } else if let Some(Guard { mut sentinel, .. }) = sentinel {
            // Kill the sentinel, because this process cleans up in its place.
            sentinel.kill();
            self.retire(*sentinel);
        }
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.nursery_lost(end);
                if !starting.is_stopped() && matches!(self.shared.fence.look(), Ok(Look::Passed { .. })) {
                    // The nursery hung, so the sentinel has killed it at the fence deadline. Report that the deadline
                    // has passed.
                    self.end_fenced();
                }
                self.deadlines.disarm(Timer::Start);
                self.deadlines.disarm(Timer::Fence);
                self.sweep(Duration::ZERO, Duration::ZERO, GIVE_UP_AFTER);
            }
            Current::Running(running) => {
                // Watch the exits of the remaining workers from here, because the lost nursery no longer reports them.
                for member in running.members.iter().filter(|member| !member.adopted) {
                    if running.group.living().any(|pid| pid == member.pid) {
                        self.watched.spawn(watch::until_exit(member.pid, Arc::clone(&member.pidfd), None));
                    }
                }
                let started = running.group.is_running() && running.group.starting().next().is_some();
                if started && matches!(self.shared.fence.look(), Ok(Look::Passed { .. })) {
                    // Report that the fence deadline has passed, as in the case above.
                    self.end_fenced();
                }
                self.input(Input::NurseryLost(end));
            }
        }
    }
}

/// Returns the message about a nursery that does not exit after SIGKILL.
pub(super) fn left_behind(nursery: i32) -> String {
    let channel = watch::wait_channel(nursery);
    let channel = if channel.is_empty() { "the kernel" } else { &channel };
    format!("the nursery (pid {nursery}) does not end after SIGKILL (waits in {channel}): it is left behind")
}
