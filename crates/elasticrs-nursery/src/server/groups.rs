//! Sends signals to the process groups of workers. Used for every SIGKILL, and for all signals if the kernel does not
//! support signalling a process group through a pidfd.

use elasticrs_sys::signal;
use nix::sys::signal::Signal;

use super::NurseryServer;
use crate::cleaner;

impl NurseryServer {
    /// Sends a signal to the process group of a worker. Ignores errors, because the group may be gone, or may now
    /// belong to another user. The agent notices workers that do not exit.
    pub(super) fn signal_group(&mut self, pid: i32, signal: i32) {
        if signal != libc::SIGKILL && self.workers.contains(&pid) {
            let _ = signal::kill_group(pid, signal);
        } else if self.sessions.contains(&pid) {
            // Queue the signal for each process in the group. Do not signal the whole group, because SIGKILL would also
            // kill processes that unlink shared memory. The group's number may also have been reused.
            self.left_groups.insert(pid, signal);
        }
    }

    /// Sends the pending signals to process groups. Lists the processes once for all groups, and signals each member
    /// individually.
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
