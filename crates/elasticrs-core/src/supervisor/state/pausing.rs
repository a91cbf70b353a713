//! Handles workers that are stopped and continued by a signal, and the suspension of the whole group.

use elasticrs_sys::signal::Signal;

use super::{Deadline, Effect, Event, Group, PAUSE_REPORT_DELAY, Pause, Phase, to_group};

impl Group {
    pub(super) fn on_paused(&mut self, pid: i32, signal: i32) {
        let (stopping, suspended) = (self.phase != Phase::Running, self.suspended);
        let Some(member) = self.members.iter_mut().find(|m| m.pid == pid && !m.ended) else {
            return;
        };
        if suspended {
            // Do nothing, because the supervisor itself has suspended the whole group, including this member.
        } else if stopping {
            // Send SIGCONT, because a suspended process cannot handle the signal that asks it to exit.
            self.effects.push(to_group(pid, Signal::CONT));
        } else if member.pause == Pause::Running {
            member.pause = Pause::Noticed(signal);
            self.effects.push(Effect::Arm(Deadline::Paused(member.local_rank), PAUSE_REPORT_DELAY));
        }
    }

    pub(super) fn on_continued(&mut self, pid: i32) {
        let Some(member) = self.members.iter_mut().find(|m| m.pid == pid && !m.ended) else {
            return;
        };
        let local_rank = member.local_rank;
        match std::mem::replace(&mut member.pause, Pause::Running) {
            Pause::Running => {}
            Pause::Noticed(_) => self.effects.push(Effect::Disarm(Deadline::Paused(local_rank))),
            Pause::Reported => self.report(Event::WorkerResumed { local_rank, pid }),
        }
    }

    pub(super) fn on_suspend(&mut self) {
        if !self.suspended {
            self.suspended = true;
            self.effects.push(Effect::Freeze);
            if let Some(watch) = &mut self.watch {
                watch.freeze(self.snapshot.at.0);
            }
            self.signal_living(Signal::STOP);
        }
    }

    pub(super) fn on_resume(&mut self) {
        if self.suspended {
            self.signal_living(Signal::CONT);
            self.thaw();
        }
    }

    fn signal_living(&mut self, signal: Signal) {
        let living = self.members.iter().filter(|m| !m.ended);
        self.effects.extend(living.map(|m| to_group(m.pid, signal)));
    }

    pub(super) fn thaw(&mut self) {
        self.suspended = false;
        self.effects.push(Effect::Thaw);
        if let Some(watch) = &mut self.watch {
            watch.thaw(self.snapshot.at.0, &self.snapshot.seen, self.snapshot.line);
        }
    }
}
