//! Handles workers that have failed but are still running, for example because they hang or because a timer has
//! expired.

use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::signal::Signal;

use super::member::{Member, Pause, to_group};
use super::{Effect, Event, GIVE_UP_AFTER, Group, Outcome, Phase, Timer, TimerExpired};
use crate::spec::StopScope;
use crate::supervisor::event::WorkersKilled;

impl Group {
    /// Handles a timer that was not released in time. If the timer has a signal, sends the signal to the process that
    /// acquired the timer, and marks the worker as failed.
    ///
    /// Ignores the timer if the worker is already being stopped, because the worker then has a deadline for its exit.
    pub(super) fn on_timer_due(&mut self, timer: TimerExpired) {
        let TimerExpired { local_rank, pid, signal, seen, .. } = timer;
        let Some(member) = self.working(local_rank) else { return };
        let Some(signal) = signal else { return self.report(Event::TimerExpired(timer)) };
        let worker = member.pid;
        if worker == pid {
            member.is_stopped_by(signal);
        }
        self.effects.push(Effect::SignalProcess { pid, signal });
        let Some(index) = self.survivable(worker) else {
            let but = (worker == pid).then_some(worker);
            return self.fail(local_rank, worker, but, seen, Some(Event::TimerExpired(timer)));
        };
        let (policy, member) = (self.policy.on_failure, &mut self.members[index]);
        let is_killed = policy.is_hard();
        if is_killed {
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
        } else if worker != pid {
            self.effects.push(member.stop(policy.signal, self.policy.stop_scope));
        }
        if member.pause != Pause::Running && !is_killed {
            self.effects.push(to_group(worker, Signal::CONT));
        }
        let limit = if is_killed { GIVE_UP_AFTER } else { policy.grace };
        self.condemn(index, limit, seen);
        self.report(Event::TimerExpired(timer));
    }

    /// Returns the worker with this local rank if it is running, has not failed, and is not being stopped.
    pub(super) fn working(&mut self, local_rank: u32) -> Option<&mut Member> {
        let runs = |m: &&mut Member| m.local_rank == local_rank && m.runs() && m.condemned.is_none();
        self.members.iter_mut().find(runs).filter(|_| self.phase == Phase::Running)
    }

    /// Kills a failed worker immediately with SIGKILL. Also stops the other workers, unless the group replaces failed
    /// workers.
    ///
    /// `why` is the event that reports the failure. `None` if the failure has already been reported.
    pub(super) fn fail_at_once(&mut self, local_rank: u32, seen: Stamp, why: Option<Event>) {
        let Some(member) = self.working(local_rank) else { return };
        let (worker, kill) = (member.pid, member.send(Signal::KILL, StopScope::Group));
        self.effects.push(kill);
        self.fail_or_condemn(local_rank, worker, GIVE_UP_AFTER, seen, why);
    }

    /// Marks a worker as failed, but gives it a grace period in which to exit. Also stops the other workers, unless the
    /// group replaces failed workers.
    pub(super) fn fail_in_grace(&mut self, local_rank: u32, seen: Stamp, why: Event) {
        let Some(worker) = self.working(local_rank).map(|member| member.pid) else { return };
        self.fail_or_condemn(local_rank, worker, self.policy.on_failure.grace, seen, Some(why));
    }

    /// Handles a failed worker that has not exited yet. If the group replaces failed workers, sets a time limit for the
    /// exit of this worker. Otherwise, stops the group.
    fn fail_or_condemn(&mut self, local_rank: u32, worker: i32, limit: Duration, seen: Stamp, why: Option<Event>) {
        let Some(index) = self.survivable(worker) else {
            return self.fail(local_rank, worker, Some(worker), seen, why);
        };
        self.condemn(index, limit, seen);
        self.effects.extend(why.map(Effect::Report));
    }

    /// Stops the group because of a failed worker, and reports the failure. `but` is the pid of a worker that gets no
    /// signal to stop. `why` is an event to report first.
    pub(super) fn fail(&mut self, local_rank: u32, worker: i32, but: Option<i32>, seen: Stamp, why: Option<Event>) {
        self.outcome = Outcome::Failed;
        let siblings = self.members.iter().filter(|m| m.runs() && m.pid != worker && !m.is_excused()).count();
        let siblings = u32::try_from(siblings).unwrap_or(u32::MAX);
        self.begin_stop(self.policy.on_failure, but);
        self.effects.extend(why.map(Effect::Report));
        self.effects.push(Effect::ReportFailure { local_rank, seen, siblings });
    }

    /// Marks a member as failed and sets the deadline for its exit. The other members keep running.
    fn condemn(&mut self, index: usize, limit: Duration, seen: Stamp) {
        let member = &mut self.members[index];
        member.condemned = Some(seen);
        self.effects.push(Effect::Arm(Timer::Condemned(member.local_rank), limit));
    }

    /// Kills a failed member that has not exited in time. If it does not exit after SIGKILL either, stops the whole
    /// group, because a member that is still alive cannot be replaced.
    pub(super) fn on_condemned(&mut self, local_rank: u32) {
        if self.is_excused(local_rank) {
            return self.on_excused_overdue(local_rank);
        }
        let member = self.members.iter_mut().find(|m| m.local_rank == local_rank && !m.ended);
        let Some(member) = member.filter(|_| self.phase == Phase::Running) else { return };
        let Some(seen) = member.condemned else { return };
        if !member.group_has_got(Signal::KILL) {
            let (workers, reason) = (vec![(local_rank, member.pid)], member.why_overdue());
            self.effects.push(member.send(Signal::KILL, StopScope::Group));
            let limit = self.policy.on_failure.grace;
            self.report(Event::WorkersKilled(WorkersKilled { workers, reason, limit }));
            return self.effects.push(Effect::Arm(Timer::Condemned(local_rank), GIVE_UP_AFTER));
        }
        let pid = member.pid;
        self.fail(local_rank, pid, Some(pid), seen, None);
    }
}
