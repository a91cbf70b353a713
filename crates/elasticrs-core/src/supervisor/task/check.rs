//! Periodically compares the exits that the nursery has reported with the state of the workers in the kernel.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_nursery::held::{self, Held};
use elasticrs_sys::clock::Stamp;

use super::{Beside, Current, Running, Task};
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::Event;
use crate::supervisor::state::Input;
use crate::supervisor::watch;
use crate::supervisor::zombies::Subjects;

/// Time between two checks of the workers, the nursery and the sentinel.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

impl Running {
    /// Returns the pids of the members that are dead although their exits have not been reported yet.
    pub(super) fn dead(&self) -> Vec<i32> {
        let living: BTreeSet<i32> = self.group.living().collect();
        let living = self.members.iter().filter(|member| living.contains(&member.pid));
        let (pids, pidfds): (Vec<_>, Vec<_>) = living.map(|member| (member.pid, member.pidfd.as_fd())).unzip();
        let ended = watch::ended(&pidfds);
        pids.into_iter().zip(ended).filter_map(|(pid, ended)| ended.then_some(pid)).collect()
    }
}

impl Task {
    /// Looks for workers that are dead although the nursery has not reported their exits. If a tracer holds such a
    /// worker, reports the exit itself. Otherwise resumes the nursery, which may have been stopped by a signal. If the
    /// nursery still has not reported the exit at the next check, it hangs and is killed.
    pub(super) fn check(&mut self) {
        if self.config.owns_process && std::process::id() == 1 {
            let second = self.beside.iter().flat_map(Beside::pids);
            let nurseries: Vec<i32> = self.nursery.iter().map(|nursery| nursery.pid).chain(second).collect();
            watch::reap_orphans(&nurseries);
        }
        self.check_sentinel();
        self.look_for_zombies();
        let Current::Running(running) = &mut self.current else { return };
        let is_adopted = |pid: i32| running.members.iter().any(|m| m.pid == pid && m.adopted);
        let workers = running.group.living().filter(|&pid| !is_adopted(pid));
        // Ignore workers that are traced by the nursery. They have asked their parent to trace them, and the nursery
        // reaps them unless it is stopped itself.
        let nursery = self.nursery.as_ref().map(|nursery| nursery.pid);
        let by_others = |pid: i32| held::by_tracer(pid).filter(|held| Some(held.tracer) != nursery);
        let held: Vec<_> = workers.filter_map(|pid| by_others(pid).map(|held| (pid, held))).collect();
        let is_held = |pid: i32| held.iter().any(|(held, _)| *held == pid);
        let dead: Vec<i32> = running.dead().into_iter().filter(|&pid| !is_adopted(pid) && !is_held(pid)).collect();
        // Unreported exits usually mean that the nursery hangs. While a replacement is being started, the nursery may
        // only be blocked in that start. Do not kill it then, because the start has its own deadline.
        let is_starting = running.group.starting().next().is_some();
        let overdue = !is_starting && dead.iter().any(|pid| running.unreported.contains(pid));
        if let (false, Some(nursery)) = (dead.is_empty(), &mut self.nursery) {
            if overdue { nursery.kill_hung() } else { nursery.resume() }
        }
        let pause = if dead.is_empty() && !held.is_empty() { held::LIMIT } else { CHECK_INTERVAL };
        self.deadlines.arm(Timer::Check, pause, Instant::now());
        running.unreported = dead;
        let before = std::mem::replace(&mut running.held, held.iter().map(|(pid, _)| *pid).collect());
        for (pid, Held { exit, told, .. }) in held {
            if before.contains(&pid) {
                self.tell_held(pid, told);
                self.input(Input::Exited { pid, exit, usage: None, seen: Stamp::now() });
            }
        }
    }

    /// Looks for processes with many zombie children. Runs on another thread, because it reads `/proc`. Does nothing if
    /// the previous scan is still running.
    fn look_for_zombies(&self) {
        let Current::Running(running) = &self.current else { return };
        let group = &running.group;
        let workers = group.living().filter_map(|pid| Some((group.rank_of(pid)?, pid))).collect();
        let subjects = Subjects { workers, agent: self.config.owns_process };
        let (scanner, queue) = (Arc::clone(&self.zombies), Arc::clone(&self.shared.queue));
        tokio::task::spawn_blocking(move || {
            let Ok(mut scanner) = scanner.try_lock() else { return };
            for message in scanner.scan(&subjects) {
                queue.push(Event::Degraded { message });
            }
        });
    }

    /// Reports that an exited process is held by a tracer, but only once for each process.
    pub(super) fn tell_held(&mut self, pid: i32, message: String) {
        if self.held.insert(pid) {
            self.shared.queue.push(Event::Degraded { message });
        }
    }
}
