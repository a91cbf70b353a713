//! Handles processes that are still saving after a stop signal has killed their worker.
//!
//! A worker may be a wrapper, such as a shell, that starts the trainer and does not forward signals. The stop signal
//! kills the wrapper, but the trainer handles the signal and saves a checkpoint.

use std::time::Duration;

use elasticrs_nursery::protocol::{Savers, SweepLimits};
use elasticrs_sys::signal::Signal;

use super::{AT_ONCE, Deadline, Effect, Event, GIVE_UP_AFTER, Group, Member, Phase, StopRole, StopScope};
use crate::supervisor::event::{KillReason, WorkersKilled};

impl Group {
    /// Cleans up after the last exit, but does not kill processes that may be saving. Returns false if no process can
    /// be saving.
    ///
    /// If a worker handled the stop signal, its helpers are killed, because the worker could have waited for them.
    /// Helpers that do not handle the signal are killed as well.
    pub(super) fn sweep_others(&mut self) -> bool {
        let Some(signal) = self.stop_signal.filter(|signal| *signal != Signal::KILL) else { return false };
        let mut workers = Vec::new();
        for member in self.members.iter_mut().filter(|m| is_wrapper(m)) {
            if !member.group_has_got(signal) {
                self.effects.push(member.send(signal, StopScope::Group));
            }
            workers.push(member.pid);
        }
        if workers.is_empty() {
            return false;
        }
        self.phase = Phase::Saving;
        let limits = SweepLimits::at_once(self.grace.saturating_add(GIVE_UP_AFTER));
        self.effects.push(Effect::SweepOthers(limits, Savers { workers, signal: signal.number() }));
        true
    }

    /// Kills the processes that are still saving at the end of the grace period, and reports them.
    pub(super) fn on_overdue_saves(&mut self) {
        let Some(signal) = self.stop_signal else { return };
        self.kill_savers(KillReason::AfterSignal(signal), self.grace);
    }

    /// Kills the processes that are still saving, and reports the workers that started them.
    pub(super) fn kill_savers(&mut self, reason: KillReason, limit: Duration) {
        let workers = self.members.iter().filter(|m| is_wrapper(m)).map(|m| (m.local_rank, m.pid)).collect();
        self.end_saves();
        self.report(Event::WorkersKilled(WorkersKilled { workers, reason, limit }));
    }

    /// Kills the processes that are still saving.
    pub(super) fn end_saves(&mut self) {
        self.sweep(AT_ONCE);
        self.effects.push(Effect::Disarm(Deadline::Kill));
    }
}

/// Returns true if the worker may have been a wrapper around a process that is still saving. Returns false for adopted
/// workers, because the nursery is not their parent and cannot clean up after them.
fn is_wrapper(member: &Member) -> bool {
    member.stop_role == StopRole::EndedBySignal && !member.adopted && !member.is_gone()
}
