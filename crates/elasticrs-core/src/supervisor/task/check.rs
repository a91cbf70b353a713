//! What was told of the workers against what the kernel says, now and then.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::{Current, Running, Task};
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::TimerExpired;
use crate::supervisor::state::Input;
use crate::supervisor::watch;

/// How often what was told is compared with what the kernel says.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

impl Running {
    /// Members that died before what the input is about. A timer expired, or a worker hung, when that worker lived, and the
    /// evidence took time since.
    pub(super) fn dead_before(&self, input: &Input) -> Vec<i32> {
        let mut dead = self.dead();
        let lived = match input {
            Input::TimerExpired(TimerExpired { local_rank, .. }) => Some(*local_rank),
            Input::Hung(hung) => Some(hung.local_rank),
            _ => None,
        };
        dead.retain(|pid| lived.is_none() || self.group.rank_of(*pid) != lived);
        dead
    }

    /// Members that are dead and whose exits were not told yet.
    pub(super) fn dead(&self) -> Vec<i32> {
        let living: BTreeSet<i32> = self.group.living().collect();
        let living = self.members.iter().filter(|member| living.contains(&member.pid));
        let (pids, pidfds): (Vec<_>, Vec<_>) = living.map(|member| (member.pid, member.pidfd.as_fd())).unzip();
        let ended = watch::ended(&pidfds);
        pids.into_iter().zip(ended).filter_map(|(pid, ended)| ended.then_some(pid)).collect()
    }
}

impl Task {
    /// A worker is dead without a word from the nursery: it is stopped. One that keeps silent for a whole interval
    /// hangs.
    pub(super) fn check(&mut self) {
        if self.config.owns_process && std::process::id() == 1 {
            watch::reap_orphans(self.nursery.as_ref().map(|nursery| nursery.pid));
        }
        let Current::Running(running) = &mut self.current else { return };
        let is_adopted = |pid: i32| running.members.iter().any(|m| m.pid == pid && m.adopted);
        let dead: Vec<i32> = running.dead().into_iter().filter(|&pid| !is_adopted(pid)).collect();
        let overdue = dead.iter().any(|pid| running.unreported.contains(pid));
        if let (false, Some(nursery)) = (dead.is_empty(), &mut self.nursery) {
            if overdue { nursery.kill_hung() } else { nursery.resume() }
        }
        running.unreported = dead;
        self.deadlines.arm(Timer::Check, CHECK_INTERVAL, Instant::now());
    }
}
