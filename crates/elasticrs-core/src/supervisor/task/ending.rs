//! Cleans up the processes that members of a group leave behind, and closes the supervisor.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use elasticrs_nursery::held;
use elasticrs_nursery::protocol::Request;

use super::beside::Beside;
use super::loss::left_behind;
use super::{CLOSE_LIMIT, Current, Member, Task};
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::{Event, Swept};
use crate::supervisor::state::{End, Input};
use crate::supervisor::watch;

/// Time that a sweep may take beyond its own time limits. After that, the nursery or thread that performs it counts as
/// hung.
pub(super) const SWEEP_SLACK: Duration = Duration::from_secs(5);

impl Task {
    pub(super) fn sweep(&mut self, linger: Duration, grace: Duration, give_up: Duration) {
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        if let Some(nursery) = &mut self.nursery {
            self.sweeps = self.sweeps.wrapping_add(1);
            let (linger_ms, grace_ms, give_up_ms) = (millis(linger), millis(grace), millis(give_up));
            let request = Request::Sweep { number: self.sweeps, linger_ms, grace_ms, give_up_ms };
            nursery.send(&request, Vec::new());
        } else {
            let members: &[Member] = match &self.current {
                Current::Running(running) => &running.members,
                Current::Idle | Current::Starting(_) => &[],
            };
            let pids = |adopted| members.iter().filter(|m| m.adopted == adopted).map(|m| m.pid).collect::<Vec<_>>();
            let (mut spared, sessions) = (pids(true), pids(false));
            spared.extend(self.beside.iter().flat_map(Beside::pids));
            let give_up = give_up.min(self.sweep_limit);
            let (token, owns_process) = (self.token, self.config.owns_process);
            self.own_sweep = Some(tokio::task::spawn_blocking(move || {
                watch::sweep_after_loss(token, owns_process, &spared, &sessions, give_up)
            }));
        }
        let limit = linger.saturating_add(grace).saturating_add(give_up).saturating_add(SWEEP_SLACK);
        self.deadlines.arm(Timer::Sweep, limit, Instant::now());
    }

    /// Handles a sweep that has exceeded its deadline. If the nursery performs it, kills the nursery. If this process
    /// performs it, reports the sweep as failed.
    pub(super) fn on_overdue_sweep(&mut self) {
        if let Some(nursery) = &mut self.nursery {
            nursery.kill_hung();
        } else if self.own_sweep.take().is_some() {
            let message = "what the lost nursery has left could not be ended: a look at the processes does not end";
            self.shared.queue.push(Event::Degraded { message: message.to_owned() });
            self.on_swept(Swept::default());
        }
    }

    pub(super) fn tell_all_held(&mut self, swept: &Swept) {
        for &pid in &swept.held {
            self.tell_held(pid, held::told(pid));
        }
    }

    pub(super) fn on_swept(&mut self, swept: Swept) {
        self.tell_all_held(&swept);
        self.deadlines.disarm(Timer::Sweep);
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => match starting.take_end() {
                Ok(failure) => self.start_has_failed(failure),
                Err((outcome, nursery)) => {
                    self.tell_end(End { outcome, nursery, stuck_workers: Vec::new(), swept });
                }
            },
            Current::Running(_) => self.input(Input::Swept(swept)),
        }
    }

    /// Closes the supervisor. Its nursery kills all remaining processes, or with `keep_descendants` leaves them running
    /// if no group exists.
    pub(super) async fn close(mut self, keep_descendants: bool) {
        self.give_up_evidence();
        self.end_beside();
        self.close_nursery(keep_descendants).await;
        while self.retired.join_next().await.is_some() {}
    }

    async fn close_nursery(&mut self, keep_descendants: bool) {
        let Some(nursery) = self.nursery.take() else {
            // If the processes of a lost nursery are still being swept, wait for that. All of them have already been
            // sent SIGKILL.
            if let Some(sweep) = self.own_sweep.take() {
                let _ = tokio::time::timeout(CLOSE_LIMIT, sweep).await;
            }
            return;
        };
        self.shared.nursery_pid.store(0, Ordering::Relaxed);
        let leave = keep_descendants && matches!(self.current, Current::Idle);
        let message = left_behind(nursery.pid);
        if nursery.end(leave, CLOSE_LIMIT).await.is_none() {
            self.shared.queue.push(Event::Degraded { message });
        }
    }
}
