//! State of one worker in a group.

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::signal::Signal;

use super::Effect;
use crate::spec::StopScope;
use crate::supervisor::event::{ExitStage, KillReason, Origin, WorkerRaised};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Pause {
    #[default]
    Running,
    /// The worker was stopped by this signal, but the stop has not been reported yet.
    Noticed(i32),
    Reported,
}

/// State of a worker slot in a group that replaces failed workers, as described in [`super::replacing`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Place {
    #[default]
    Taken,
    Left,
    Free,
    Promised,
}

/// Whether a worker gets the stop signal when its group is stopped, and how it reacts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum StopRole {
    #[default]
    Usual,
    /// The worker's own exception stopped the group. The worker gets no stop signal, because it exits by itself. Its
    /// own time limit for the exit applies instead of the grace period.
    Excused,
    /// The worker had no handler for the stop signal, so the signal killed the worker.
    EndedBySignal,
}

#[derive(Debug, Default)]
pub(super) struct Member {
    pub(super) local_rank: u32,
    pub(super) pid: i32,
    pub(super) adopted: bool,
    pub(super) ended: bool,
    /// True if the process is dead but its exit has not been reported yet.
    pub(super) dead: bool,
    pub(super) sent: Option<Signal>,
    /// Signal that asked the worker to exit within its grace period. `None` if no signal was sent, for example
    /// because the worker is exiting slowly after an uncaught exception.
    asked_by: Option<Signal>,
    /// Last signal that was sent to the worker's whole process group.
    group_sent: Option<Signal>,
    pub(super) pause: Pause,
    pub(super) raised: Option<WorkerRaised>,
    /// Time at which the worker was considered failed while it was still running. The failure counts even if the worker
    /// exits with code 0.
    ///
    /// `None` if there was no such failure. Set only in groups that replace failed workers.
    pub(super) condemned: Option<Stamp>,
    pub(super) place: Place,
    pub(super) stop_role: StopRole,
}

impl Member {
    pub(super) fn new(local_rank: u32, pid: i32, adopted: bool) -> Self {
        Self { local_rank, pid, adopted, ..Self::default() }
    }

    /// Records that a signal is sent to the worker or its process group, and returns the effect that sends it.
    pub(super) fn send(&mut self, signal: Signal, to: StopScope) -> Effect {
        if self.runs() {
            self.sent = Some(signal);
        }
        if to == StopScope::Group {
            self.group_sent = Some(signal);
        }
        Effect::Signal { pid: self.pid, to, signal }
    }

    /// Same as [`Self::send`], for a signal that asks the worker to exit within its grace period.
    pub(super) fn stop(&mut self, signal: Signal, to: StopScope) -> Effect {
        self.asked_by = Some(signal);
        self.send(signal, to)
    }

    /// Records that `signal` is sent to the worker because a timer has expired. The signal asks the worker to exit
    /// within its grace period.
    pub(super) fn is_stopped_by(&mut self, signal: Signal) {
        (self.asked_by, self.sent) = (Some(signal), Some(signal));
    }

    /// Returns the reason for killing the worker after its grace period.
    pub(super) fn why_overdue(&self) -> KillReason {
        self.asked_by.map_or(KillReason::SlowExit, KillReason::AfterSignal)
    }

    /// Returns true if the last signal sent to the worker's whole process group was this one or SIGKILL.
    pub(super) fn group_has_got(&self, signal: Signal) -> bool {
        self.group_sent.is_some_and(|sent| sent == signal || sent == Signal::KILL)
    }

    /// Returns true if the worker is still exiting after the exception that has stopped the group.
    pub(super) fn is_excused(&self) -> bool {
        self.stop_role == StopRole::Excused && self.runs()
    }

    /// Returns true if this exit is the default action of the signal that was sent to stop the worker.
    pub(super) fn is_ended_by_stop(&self, exit: WorkerExit) -> bool {
        let sent = self.sent.filter(|sent| *sent != Signal::KILL).map(Signal::number);
        matches!(exit, WorkerExit::Signaled { signal } if sent == Some(signal))
    }

    /// Returns true if the worker is exiting because of its own uncaught exception. An exception in a descendant does
    /// not count, because the worker may survive it.
    pub(super) fn ends_by_its_exception(&self) -> bool {
        self.runs() && self.raised.as_ref().is_some_and(|raised| raised.origin == Origin::Own && raised.pid == self.pid)
    }

    /// Returns true if the worker's exit after an exception has exceeded its time limit but still makes progress.
    pub(super) fn is_slow(&self) -> bool {
        self.raised.as_ref().is_some_and(|raised| raised.exit == ExitStage::Slow)
    }

    /// Returns true if all processes of the worker are gone and its pid may be reused.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self.place, Place::Free | Place::Promised)
    }

    /// Returns true unless the worker is known to have exited.
    pub(super) fn runs(&self) -> bool {
        !self.ended && !self.dead
    }
}

/// Returns the effect that sends a signal such as SIGCONT to a whole process group. The signal is not recorded as a
/// stop signal, because it does not ask the worker to exit.
pub(super) fn to_group(pid: i32, signal: Signal) -> Effect {
    Effect::Signal { pid, to: StopScope::Group, signal }
}
