//! Flight records for a failure that another worker may have caused.
//!
//! If the calls of the workers to a collective differ, gloo may abort a worker whose call is right. Only the flight
//! records of the others show which call is wrong, and they are lost when these workers are stopped. So after a death
//! by SIGABRT, or after the exit of a worker whose exception reports a lost peer, the group first requests the records,
//! and handles the exit when they are written. Their time limit is short. Each failure of another kind stops the group
//! at once.
//!
//! To the rest of the state machine, it looks as if the exit had been noticed a little later.

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::exit::WorkerExit;

use super::member::Member;
use super::{Effect, Group, Input, Phase, Timer};
use crate::supervisor::event::Origin;

const SIGABRT: i32 = 6;

/// State of the request for flight records. They are requested only once, because a second request would remove the
/// records of workers that have written theirs and exited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Records {
    #[default]
    NotRequested,
    Requested,
    Done,
}

/// Exit of a member that is not handled yet.
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

    /// Requests the flight records if a worker's exception reports a lost peer. Nothing waits for the records before
    /// that worker exits.
    pub(super) fn take_records_after_raise(&mut self) {
        if self.members.iter().any(|m| m.runs() && has_lost_peer(m)) {
            self.take_records();
        }
    }

    /// Returns true if the exit of this member must not be handled before the flight records are written. Requests the
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

    /// Requests the flight records, if the workers write them and have not been asked yet. Returns true while the
    /// records are being written.
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

    /// Handles the held exits before any input whose handling may depend on them.
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
