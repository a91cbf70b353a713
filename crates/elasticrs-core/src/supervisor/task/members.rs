//! Adds processes that Python started to the group, and sends signals to the members.

use std::os::fd::AsFd;
use std::sync::Arc;

use elasticrs_nursery::cleaner;
use elasticrs_nursery::protocol::Request;
use elasticrs_sys::pidfd;
use elasticrs_sys::signal::Signal;
use nix::unistd::{Pid, getpgid};

use super::{Current, Member, Task};
use crate::spec::StopScope;
use crate::supervisor::command::{Adopted, SupervisorError};
use crate::supervisor::state::Input;
use crate::supervisor::watch;

impl Member {
    /// Kills the other processes in this member's process group, except those that clean up after the member. Does not
    /// use the nursery, because Python started the member.
    fn kill_rest_of_group(&self) {
        let rest = cleaner::others_in_groups(self.pid, |group| group == self.pid);
        // Do not signal the processes if the member has exited, because its pid may identify another process group by
        // now.
        if watch::ended(&[self.pidfd.as_fd()]) == [false] {
            for target in rest {
                target.signal(nix::sys::signal::Signal::SIGKILL);
            }
        }
    }
}

impl Task {
    pub(super) fn adopt(&mut self, adopted: Adopted) -> Result<(), SupervisorError> {
        let Adopted { local_rank, pid, pidfd, status, page } = adopted;
        let Current::Running(running) = &mut self.current else { return Err(SupervisorError::Idle) };
        let is_watched = page.is_some();
        if let Some(page) = page {
            self.hangs.take_page(local_rank, page).map_err(|source| SupervisorError::Page { local_rank, source })?;
            self.shared.counters.heartbeats.set(self.hangs.pages());
        }
        let pidfd = Arc::new(pidfd);
        let leads_a_group = getpgid(Some(Pid::from_raw(pid))).is_ok_and(|group| group.as_raw() == pid);
        running.members.push(Member { pid, pidfd: Arc::clone(&pidfd), adopted: true, leads_a_group });
        self.watched.spawn(watch::until_exit(pid, pidfd, status));
        self.exits.forget_strangers();
        self.input(Input::Adopted { local_rank, pid });
        if is_watched {
            self.begin_watch();
        }
        Ok(())
    }

    pub(super) fn signal(&mut self, pid: i32, to: StopScope, signal: Signal) {
        let Current::Running(running) = &self.current else { return };
        let Some(member) = running.members.iter().find(|m| m.pid == pid) else { return };
        if signal == Signal::KILL && to == StopScope::Group && member.adopted && member.leads_a_group {
            member.kill_rest_of_group();
        }
        // Ignore errors. ESRCH means that the process has exited. After any other error, for example because the worker
        // is a set-uid program, the worker keeps running and is reported by its rank later.
        let _ = if to == StopScope::Worker || !member.leads_a_group {
            pidfd::send_signal(&member.pidfd, signal.number())
        } else if signal == Signal::KILL {
            if let (false, Some(nursery)) = (member.adopted, &mut self.nursery) {
                // Let the nursery kill the rest of the worker's process group.
                nursery.send(&Request::SignalGroup { pid, signal: signal.number() }, Vec::new());
            }
            pidfd::send_signal(&member.pidfd, signal.number())
        } else if self.features.pidfd_group_signal {
            pidfd::send_group_signal(&member.pidfd, signal.number())
        } else if let (false, Some(nursery)) = (member.adopted, &mut self.nursery) {
            nursery.send(&Request::SignalGroup { pid, signal: signal.number() }, Vec::new());
            Ok(())
        } else {
            // Signal only the member, because the nursery does not know members that Python started. When the member
            // exits, its parent, a keeper process, kills the processes that it leaves behind.
            pidfd::send_signal(&member.pidfd, signal.number())
        };
    }
}
