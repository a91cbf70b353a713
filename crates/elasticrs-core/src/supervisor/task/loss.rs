//! A nursery that hangs, dies, or cannot even die.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use elasticrs_runtime::clock::{Stamp, boot_now};

use super::{Current, Task};
use crate::exit::WorkerExit;
use crate::nursery::fence::Look;
use crate::signal::Signal;
use crate::spec::StopPolicy;
use crate::supervisor::deadlines::{GIVE_UP_AFTER, Timer};
use crate::supervisor::event::{Event, NurseryEnd, Swept};
use crate::supervisor::state::{HOPELESS_SWEEP, Input};
use crate::supervisor::watch;
use crate::sys::stage::Stage;

/// So much longer the nursery has to see by itself that the fence has passed.
pub(super) const FENCE_AFTER: Duration = Duration::from_millis(100);

impl Task {
    pub(super) fn on_hung_start(&mut self) {
        let Current::Starting(starting) = &mut self.current else { return };
        if let Some(nursery) = &mut self.nursery {
            let stage = nursery.stage_reached();
            let wait_channel = match stage {
                Some(Stage::Fork | Stage::NextFork) => watch::wait_channel(nursery.pid),
                _ => watch::wait_channel_of_child(nursery.pid, &starting.pids()),
            };
            starting.hung(stage, wait_channel);
            // The child that hangs dies with it, as far as it can: `on_nursery_death` sweeps, for so long as that takes.
            nursery.kill();
        }
    }

    /// The start was to end by now. Its workers die with the nursery, and so does one that hangs.
    pub(super) fn kill_start(&mut self) {
        if let (Current::Starting(starting), Some(nursery)) = (&self.current, &mut self.nursery)
            && !starting.has_failed()
        {
            nursery.kill();
        }
    }

    /// The nursery cannot look at the fence while it waits for a start, so that is done here.
    pub(super) fn fence_start(&mut self) {
        let Current::Starting(starting) = &mut self.current else { return };
        match self.shared.fence.look() {
            Ok(Look::At(deadline)) => {
                let left = Duration::from_nanos(deadline.saturating_sub(boot_now()));
                self.deadlines.arm(Timer::Fence, left + FENCE_AFTER, Instant::now());
            }
            // The nursery has seen it, or there is none.
            Ok(Look::Passed { first: false } | Look::Unset) | Err(_) => {}
            Ok(Look::Passed { first: true }) => {
                self.shared.queue.push(Event::Fenced { at: Stamp::now() });
                starting.stop(StopPolicy { signal: Signal::KILL, grace: Duration::ZERO });
                self.kill_start();
            }
        }
    }

    /// Its workers do not die with it, so they are killed, and its descendants swept, as far as they can be. When it can be
    /// ended, it ends: its SIGKILL is pending.
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
        let lost = self.nursery.take();
        let end = NurseryEnd { exit, hung: lost.as_ref().is_some_and(|nursery| nursery.hung) };
        self.shared.nursery_pid.store(0, Ordering::Relaxed);
        if let Some(import) = lost.and_then(|nursery| nursery.import)
            && self.on_lost_import(import, end)
        {
            return;
        }
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.nursery_lost(end);
                self.deadlines.disarm(Timer::Start);
                self.deadlines.disarm(Timer::Fence);
                self.sweep(Duration::ZERO, Duration::ZERO, GIVE_UP_AFTER);
            }
            Current::Running(running) => {
                // Nobody reports their exits any more.
                for member in running.members.iter().filter(|member| !member.adopted) {
                    if running.group.living().any(|pid| pid == member.pid) {
                        self.watched.spawn(watch::until_exit(member.pid, Arc::clone(&member.pidfd), None));
                    }
                }
                self.input(Input::NurseryLost(end));
            }
        }
    }
}

/// The line for a nursery that is given up.
pub(super) fn left_behind(nursery: i32) -> String {
    let channel = watch::wait_channel(nursery);
    let channel = if channel.is_empty() { "the kernel" } else { &channel };
    format!("the nursery (pid {nursery}) does not end after SIGKILL (waits in {channel}): it is left behind")
}
