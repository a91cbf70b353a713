//! Workers whose places are taken by others after they have failed, while the rest of the group goes on.
//!
//! A place is left when its worker has failed, free when nothing of that worker is left, promised while another process is
//! started there, and taken when that runs. A member that has exited 0 keeps its place.

use std::time::Duration;

use super::member::{Member, Place, to_group};
use super::{Effect, Event, GIVE_UP_AFTER, Group, Phase, Swept, Timer};
use crate::signal::Signal;
use crate::spec::StopScope;
use crate::supervisor::event::StartFailure;
use elasticrs_runtime::clock::Stamp;

/// What is left to a start that goes on when the group is killed.
const LAST_CHANCE: Duration = Duration::from_secs(1);

impl Group {
    /// The same group, whose workers are replaced.
    #[must_use]
    pub fn replacing(mut self) -> Self {
        self.replaces = true;
        self
    }

    /// Why no process can be started in the place of this worker.
    pub fn refusal(&self, local_rank: u32) -> Option<&'static str> {
        let member = self.members.iter().find(|m| m.local_rank == local_rank);
        match (member.map(|m| (m.place, m.ended)), self.phase) {
            _ if !self.replaces => Some("workers of this group are not replaced"),
            (None, _) => Some("there is no such worker"),
            (Some(_), phase) if phase != Phase::Running => Some("the group is being stopped"),
            (Some((Place::Free, _)), _) => None,
            (Some((Place::Promised, _)), _) => Some("a process is being started in its place"),
            (Some((Place::Left, _)), _) => Some("what it has left is not swept yet"),
            (Some((Place::Taken, false)), _) => Some("it runs"),
            (Some((Place::Taken, true)), _) => Some("it has succeeded"),
        }
    }

    /// Local ranks in whose places processes are being started.
    pub fn starting(&self) -> impl Iterator<Item = u32> {
        self.members.iter().filter(|m| m.place == Place::Promised).map(|m| m.local_rank)
    }

    /// True if the others go on when this member fails. What Python has started is not the nursery's to sweep.
    pub(super) fn survives(&self, index: usize) -> bool {
        self.replaces && self.phase == Phase::Running && !self.members[index].adopted
    }

    /// As [`Self::survives`], by pid.
    pub(super) fn survivable(&self, pid: i32) -> Option<usize> {
        self.members.iter().position(|m| m.pid == pid && !m.ended).filter(|&index| self.survives(index))
    }

    /// A member has failed and ended: what it has left is swept, after what those before it have.
    pub(super) fn leave(&mut self, index: usize, effects: &mut Vec<Effect>) {
        self.members[index].place = Place::Left;
        if let Some(watch) = &mut self.watch {
            watch.lose(index);
            // Nobody was looked at while it had to end.
            effects.push(Effect::Arm(Timer::Hang, Duration::ZERO));
        }
        self.left.push_back(index);
        if self.left.len() == 1 {
            self.sweep_left(effects);
        }
    }

    fn sweep_left(&self, effects: &mut Vec<Effect>) {
        if let Some(&first) = self.left.front().filter(|_| self.phase == Phase::Running) {
            let Member { local_rank, pid, .. } = self.members[first];
            effects.push(Effect::SweepLeft { local_rank, pid, give_up: GIVE_UP_AFTER });
        }
    }

    pub(super) fn on_left_swept(&mut self, swept: Swept, at: Stamp, effects: &mut Vec<Effect>) {
        let Some(index) = self.left.pop_front() else { return };
        let member = &mut self.members[index];
        member.place = Place::Free;
        effects.push(Effect::Tell(Event::WorkerSwept { local_rank: member.local_rank, swept, at }));
        self.sweep_left(effects);
    }

    /// Adds a member that Python started.
    pub(super) fn on_adopted(&mut self, local_rank: u32, pid: i32, effects: &mut Vec<Effect>) {
        let mut member = Member::new(local_rank, pid, true);
        // Kill it if it came too late to be a member of a running group.
        if self.phase != Phase::Running {
            effects.push(member.send(Signal::KILL, StopScope::Group));
        }
        self.members.push(member);
    }

    pub(super) fn on_replace(&mut self, local_rank: u32) {
        if let Some(member) = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.place == Place::Free) {
            member.place = Place::Promised;
        }
    }

    fn promised(&self, local_rank: u32) -> Option<usize> {
        self.members.iter().position(|m| m.local_rank == local_rank && m.place == Place::Promised)
    }

    pub(super) fn on_replaced(&mut self, local_rank: u32, pid: i32, started: Stamp, effects: &mut Vec<Effect>) {
        let Some(index) = self.promised(local_rank) else { return };
        for ended in self.members.iter_mut().filter(|m| m.pid == pid) {
            // The kernel has given its pid out again.
            ended.pid = 0;
        }
        self.members[index] = Member::new(local_rank, pid, false);
        if let Some(watch) = &mut self.watch {
            watch.restart(index, started.0);
        }
        effects.push(Effect::Tell(Event::WorkerReplaced { local_rank, pid, started }));
        let member = &mut self.members[index];
        match (self.phase, self.stop_signal) {
            (Phase::Running, _) if self.suspended => effects.push(to_group(pid, Signal::STOP)),
            (Phase::Running, _) => {}
            (Phase::Stopping, Some(signal)) => effects.push(member.stop(signal, self.stop_scope)),
            _ => effects.push(member.send(Signal::KILL, StopScope::Group)),
        }
    }

    pub(super) fn on_replace_failed(&mut self, failure: StartFailure, effects: &mut Vec<Effect>) {
        let (StartFailure::Worker { local_rank, .. } | StartFailure::Hung { local_rank, .. }) = &failure;
        let Some(index) = self.promised(*local_rank) else { return };
        self.members[index].place = Place::Free;
        effects.push(Effect::Tell(Event::ReplaceFailed(failure)));
        self.sweep_when_all_have_ended(effects);
    }

    /// Nobody sweeps what was left, and nobody starts what was promised.
    pub(super) fn forget_places(&mut self) {
        self.left.clear();
        for member in self.members.iter_mut().filter(|m| m.place == Place::Promised) {
            member.place = Place::Free;
        }
    }

    /// Those that are being started get a last chance, so that the end of the group does not wait for them.
    pub(super) fn hasten_starts(&self, effects: &mut Vec<Effect>) {
        effects.extend(self.starting().map(|local_rank| Effect::Hasten(Timer::Replace(local_rank), LAST_CHANCE)));
    }
}
