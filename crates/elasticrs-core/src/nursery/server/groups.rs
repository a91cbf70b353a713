//! Signals to the process groups of workers, for an agent whose kernel cannot send them through a pidfd.

use nix::sys::signal::Signal;

use super::Nursery;
use crate::nursery::tree::{self, Target};
use crate::stat::Stat;
use crate::sys::signals;

impl Nursery {
    /// The group may be gone, or have changed its user: the agent sees who does not end.
    pub(super) fn signal_group(&mut self, pid: i32, signal: i32) {
        if self.workers.contains(&pid) {
            let _ = signals::kill_group(pid, signal);
        } else if self.sessions.contains(&pid) {
            // Its number may mean somebody else by now.
            self.left_groups.insert(pid, signal);
        }
    }

    /// Looks once for all processes that are left in groups whose leaders were reaped, and signals each by itself.
    pub(super) fn signal_left_groups(&mut self) {
        let groups = std::mem::take(&mut self.left_groups);
        if groups.is_empty() {
            return;
        }
        for listed in tree::descendants(self.pid, &[]) {
            let Some(target) = Target::open(self.pid, listed) else { continue };
            let group = Stat::of(listed.pid).and_then(|stat| stat.field::<i32>(5));
            let signal = group.and_then(|group| groups.get(&group)).map(|&signal| Signal::try_from(signal));
            if let Some(Ok(signal)) = signal {
                target.signal(signal);
            }
        }
    }
}
