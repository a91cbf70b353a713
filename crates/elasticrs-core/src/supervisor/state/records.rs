//! Flight records for a failure that another worker may have caused.
//!
//! If the workers call a collective with different arguments, gloo may abort a worker whose arguments are right. Only
//! the flight records of the other workers show which call is wrong. These records are lost when the workers are
//! stopped.
//!
//! Therefore, the group requests the flight records before it handles one of these exits: the death of a worker by
//! SIGABRT, or the exit of a worker whose exception reports a lost peer. The group handles the exit when the records
//! are written, or when a short time limit has passed. All other failures stop the group at once.
//!
//! The rest of the state machine cannot tell a held exit from an exit that was noticed a little later.

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;

use super::member::Member;
use super::{Effect, Group, Input, Phase, Timer};
use crate::supervisor::event::Origin;

const SIGABRT: i32 = 6;

/// State of the request for flight records. The records are requested only once, because a second request would delete
/// the records of workers that have exited in the meantime.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Records {
    #[default]
    NotRequested,
    Requested,
    Done,
}

/// Exit that was noticed but is not handled until the flight records are written.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldExit {
    pub(super) pid: i32,
    pub(super) exit: WorkerExit,
    pub(super) seen: Stamp,
}

impl Group {
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Requests the flight records if the exception of a running worker reports a lost peer. The group does not wait
    /// for the records until that worker exits.
    pub(super) fn take_records_after_raise(&mut self) {
        if self.members.iter().any(|m| m.runs() && has_lost_peer(m)) {
            self.take_records();
        }
    }

    /// Returns true if the exit of this member cannot be handled until the flight records are written. Requests the
    /// records if necessary.
    pub(super) fn is_held(&mut self, index: usize, exit: WorkerExit) -> bool {
        if self.is_holding() {
            return true; // Handle all exits in their order.
        }
        let member = &self.members[index];
        let is_aborted = matches!(exit, WorkerExit::Signaled { signal: SIGABRT }) && member.sent.is_none();
        let is_lost_peer = !exit.is_success() && has_lost_peer(member);
        let is_alone = !self.members.iter().enumerate().any(|(other, m)| other != index && m.runs());
        self.phase == Phase::Running && (is_aborted || is_lost_peer) && !is_alone && self.take_records()
    }

    /// Requests the flight records unless they were already requested. Returns true while the workers are writing the
    /// records.
    ///
    /// Returns false and requests nothing if the group is stopping, is not watched for hangs, has pending actions, or
    /// replaces failed workers.
    fn take_records(&mut self) -> bool {
        let is_possible =
            self.phase == Phase::Running && self.watch.is_some() && self.waiting.is_none() && !self.policy.replaces;
        if is_possible && self.records == Records::NotRequested {
            self.records = Records::Requested;
            self.effects.push(Effect::TakeRecords);
        }
        is_possible && self.records == Records::Requested
    }

    pub(super) fn on_recorded(&mut self) {
        self.release();
    }

    /// Handles the held exits now, unless this input can be handled before them.
    pub(super) fn release_before(&mut self, input: &Input) {
        let may_wait = match input {
            Input::Exited { .. }
            | Input::Dead(_)
            | Input::Snapshot(_)
            | Input::Paused { .. }
            | Input::Continued { .. }
            | Input::Expired(Timer::Hang | Timer::Check) => true,
            Input::Raised { workers, .. } => workers.iter().all(|raised| raised.origin != Origin::Own),
            _ => false,
        };
        if self.is_holding() && !may_wait {
            self.release();
        }
    }

    fn release(&mut self) {
        self.records = Records::Done;
        for HeldExit { pid, exit, seen } in std::mem::take(&mut self.held) {
            self.on_exit(pid, exit, seen);
        }
    }
}

fn has_lost_peer(member: &Member) -> bool {
    member.raised.as_ref().is_some_and(|raised| raised.origin == Origin::Peer)
}
