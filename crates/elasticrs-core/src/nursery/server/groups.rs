//! Signals to the process groups of workers: SIGKILL, and all for an agent whose kernel cannot send them through a pidfd.

use nix::sys::signal::Signal;

use super::Nursery;
use crate::nursery::cleaner;
use crate::sys::signals;

impl Nursery {
    /// The group may be gone, or have changed its user: the agent sees who does not end.
    pub(super) fn signal_group(&mut self, pid: i32, signal: i32) {
        if signal != libc::SIGKILL && self.workers.contains(&pid) {
            let _ = signals::kill_group(pid, signal);
        } else if self.sessions.contains(&pid) {
            // Its number may mean somebody else by now; and SIGKILL is not for those that clean up.
            self.left_groups.insert(pid, signal);
        }
    }

    /// Looks once for all processes of groups that are signalled in this way, and signals each by itself.
    pub(super) fn signal_left_groups(&mut self) {
        let groups = std::mem::take(&mut self.left_groups);
        if groups.is_empty() {
            return;
        }
        for target in cleaner::others_in_groups(self.pid, |group| groups.contains_key(&group)) {
            if let Some(Ok(signal)) = groups.get(&target.status.group).map(|&signal| Signal::try_from(signal)) {
                target.signal(signal);
            }
        }
    }
}
