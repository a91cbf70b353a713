//! A worker, as the state of its group sees it.

use super::Effect;
use crate::signal::Signal;
use crate::spec::StopScope;
use crate::supervisor::event::{KillReason, WorkerRaised};
use elasticrs_runtime::clock::Stamp;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Pause {
    #[default]
    Running,
    /// Stopped, and not told yet.
    Noticed(i32),
    Told,
}

/// Of a member that has failed in a group that replaces; see [`super::replacing`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Place {
    #[default]
    Taken,
    Left,
    Free,
    Promised,
}

#[derive(Debug, Default)]
pub(super) struct Member {
    pub(super) local_rank: u32,
    pub(super) pid: i32,
    pub(super) adopted: bool,
    pub(super) ended: bool,
    /// Its exit is not told yet.
    pub(super) dead: bool,
    pub(super) sent: Option<Signal>,
    /// Signal that asked the worker to exit, and after which it had its grace. `None` if there was none, because its
    /// exit after an uncaught exception was slow and was left alone for the grace.
    asked_by: Option<Signal>,
    /// The last signal that was sent to its whole group.
    group_sent: Option<Signal>,
    pub(super) pause: Pause,
    pub(super) raised: Option<WorkerRaised>,
    /// Since then it has failed, whatever it exits with, and the others go on.
    pub(super) condemned: Option<Stamp>,
    pub(super) place: Place,
}

impl Member {
    pub(super) fn new(local_rank: u32, pid: i32, adopted: bool) -> Self {
        Self { local_rank, pid, adopted, ..Self::default() }
    }

    /// Signals it or its group, and keeps that in mind for its end.
    pub(super) fn send(&mut self, signal: Signal, to: StopScope) -> Effect {
        if self.runs() {
            self.sent = Some(signal);
        }
        if to == StopScope::Group {
            self.group_sent = Some(signal);
        }
        Effect::Signal { pid: self.pid, to, signal }
    }

    /// Sends a signal that asks the worker to exit within the grace.
    pub(super) fn stop(&mut self, signal: Signal, to: StopScope) -> Effect {
        self.asked_by = Some(signal);
        self.send(signal, to)
    }

    /// Records that another task sends this signal to the worker, to ask it to exit within the grace.
    pub(super) fn is_stopped_by(&mut self, signal: Signal) {
        (self.asked_by, self.sent) = (Some(signal), Some(signal));
    }

    /// Reason for killing the worker at the end of its grace.
    pub(super) fn why_overdue(&self) -> KillReason {
        self.asked_by.map_or(KillReason::SlowExit, KillReason::AfterSignal)
    }

    /// True if its whole group was sent this signal, or SIGKILL, last.
    pub(super) fn group_has_got(&self, signal: Signal) -> bool {
        self.group_sent.is_some_and(|sent| sent == signal || sent == Signal::KILL)
    }

    /// Nothing of it is left, not even its number.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self.place, Place::Free | Place::Promised)
    }

    /// As far as is known.
    pub(super) fn runs(&self) -> bool {
        !self.ended && !self.dead
    }
}

/// Signals the whole group, for a reason that is none of its end.
pub(super) fn to_group(pid: i32, signal: Signal) -> Effect {
    Effect::Signal { pid, to: StopScope::Group, signal }
}
