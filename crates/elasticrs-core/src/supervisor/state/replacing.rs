//! Replaces failed workers while the rest of the group continues.
//!
//! Each member has a place in the group. The place is *left* once the worker has failed, *free* once all of the
//! worker's processes are gone, *promised* while a replacement is being started, and *taken* while a worker is running
//! in it. A place also stays taken after its worker has exited with code 0.

use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::signal::Signal;

use super::member::{Member, Place, to_group};
use super::{Effect, Event, Group, Phase, SweepOutcome, Timer};
use crate::spec::StopScope;
use crate::supervisor::event::StartFailure;

/// Time limit for each replacement worker that is still starting while the group is being killed. A start that takes
/// longer is aborted.
const LAST_CHANCE: Duration = Duration::from_secs(1);

impl Group {
    /// Returns the reason why this worker cannot be replaced now. `None` if it can be replaced.
    pub fn refusal(&self, local_rank: u32) -> Option<&'static str> {
        let member = self.members.iter().find(|m| m.local_rank == local_rank);
        match (member.map(|m| (m.place, m.ended)), self.phase) {
            _ if !self.policy.replaces => Some("this group does not replace workers"),
            (None, _) => Some("there is no such worker"),
            (Some(_), phase) if phase != Phase::Running => Some("the group is stopping"),
            (Some((Place::Free, _)), _) => None,
            (Some((Place::Promised, _)), _) => Some("its replacement is starting"),
            (Some((Place::Left, _)), _) => Some("its leftover processes are not cleaned up yet"),
            (Some((Place::Taken, false)), _) => Some("it is running"),
            (Some((Place::Taken, true)), _) => Some("it has succeeded"),
        }
    }

    /// Returns the local ranks whose replacements are being started.
    pub fn starting(&self) -> impl Iterator<Item = u32> {
        self.members.iter().filter(|m| m.place == Place::Promised).map(|m| m.local_rank)
    }

    /// Returns true if the other members continue when this member fails. Returns false if Python started the member,
    /// because the nursery cannot clean up the processes of such a member.
    pub(super) fn survives(&self, index: usize) -> bool {
        self.policy.replaces && self.phase == Phase::Running && !self.members[index].adopted
    }

    /// Returns the index of the member with this pid if the other members continue when it fails. Otherwise, returns
    /// `None`. See [`Self::survives`].
    pub(super) fn survivable(&self, pid: i32) -> Option<usize> {
        self.members.iter().position(|m| m.pid == pid && !m.ended).filter(|&index| self.survives(index))
    }

    /// Handles the exit of a failed member. Leftover processes are cleaned up for one member at a time, in the order
    /// of the failures.
    pub(super) fn leave(&mut self, index: usize) {
        self.members[index].place = Place::Left;
        if let Some(watch) = &mut self.watch {
            watch.lose(index);
            // Check the heartbeats of the other members now, because these checks were paused while the failed member
            // was about to exit.
            self.effects.push(Effect::Arm(Timer::Hang, Duration::ZERO));
        }
        self.left.push_back(index);
        if self.left.len() == 1 {
            self.sweep_left();
        }
    }

    fn sweep_left(&mut self) {
        if let Some(&first) = self.left.front().filter(|_| self.phase == Phase::Running) {
            let Member { local_rank, pid, .. } = self.members[first];
            self.effects.push(Effect::SweepWorker { local_rank, pid });
        }
    }

    pub(super) fn on_worker_swept(&mut self, swept: SweepOutcome) {
        let Some(index) = self.left.pop_front() else { return };
        self.members[index].place = Place::Free;
        self.report(Event::WorkerSwept { local_rank: self.members[index].local_rank, swept });
        self.sweep_left();
    }

    /// Adds a member that Python started.
    pub(super) fn on_adopted(&mut self, local_rank: u32, pid: i32) {
        let mut member = Member::new(local_rank, pid, true);
        // If the group is no longer running, kill the new member.
        if self.phase != Phase::Running {
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
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

    pub(super) fn on_replaced(&mut self, local_rank: u32, pid: i32, started: Stamp) {
        let Some(index) = self.promised(local_rank) else { return };
        for ended in self.members.iter_mut().filter(|m| m.pid == pid) {
            // Forget the pid of a member that has exited, because the kernel has reused it for the replacement.
            ended.pid = 0;
        }
        self.members[index] = Member::new(local_rank, pid, false);
        if let Some(watch) = &mut self.watch {
            watch.restart(index, started.0);
        }
        self.report(Event::WorkerReplaced { local_rank, pid, started });
        let member = &mut self.members[index];
        match (self.phase, self.stop_signal) {
            (Phase::Running, _) if self.suspended => self.effects.push(to_group(pid, Signal::STOP)),
            (Phase::Running, _) => {}
            (Phase::Stopping, Some(signal)) => self.effects.push(member.stop(signal, self.policy.stop_scope)),
            _ => self.effects.push(member.send(Signal::KILL, StopScope::Group)),
        }
    }

    pub(super) fn on_replace_failed(&mut self, failure: StartFailure) {
        let Some(index) = self.promised(failure.local_rank()) else { return };
        self.members[index].place = Place::Free;
        self.report(Event::ReplaceFailed(failure));
        self.sweep_when_all_have_ended();
    }

    /// Forgets the pending clean-ups and the pending replacements, because the nursery that would have performed them
    /// is lost.
    pub(super) fn forget_places(&mut self) {
        self.left.clear();
        for member in self.members.iter_mut().filter(|m| m.place == Place::Promised) {
            member.place = Place::Free;
        }
    }

    /// Shortens the deadlines of replacements that are being started, so that they do not delay the end of the group.
    pub(super) fn hasten_starts(&mut self) {
        let starting: Vec<u32> = self.starting().collect();
        let hasten = |local_rank| Effect::Hasten(Timer::Replace(local_rank), LAST_CHANCE);
        self.effects.extend(starting.into_iter().map(hasten));
    }
}
