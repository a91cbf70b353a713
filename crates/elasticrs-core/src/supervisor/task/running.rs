//! The group of workers that is being started or is running. Keeps the group's state machine, and the descriptors of
//! its members.
//!
//! Also watches the processes whose exits are reported by no nursery (the process that starts the workers): processes
//! that a program started itself, and the workers of a nursery that has died.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use elasticrs_nursery::cleaner;
use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::tree::Status;
use elasticrs_runtime::readiness::register;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::{self, WorkerExit};
use elasticrs_sys::procfs::Stat;
use elasticrs_sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getpgid, getsid};
use tokio::io::Interest;
use tokio::task::JoinSet;

use super::check::Unreported;
use super::nursery::Nursery;
use super::or_panic;
use crate::spec::StopScope;
use crate::supervisor::event::StartFailure;
use crate::supervisor::start::Starting;
use crate::supervisor::state::Group;

/// Maximum number of ancestors to check when looking for the worker that a process descends from.
const MAX_DEPTH: usize = 64;

/// A running group, and the descriptors used to signal its members.
pub(super) struct Running {
    pub(super) group: Group,
    /// Error of a replacement worker whose start hangs. It is reported if the start still hangs at the next deadline.
    /// `None` if no start hangs.
    pub(super) hung: Option<StartFailure>,
    pub(super) unreported: Unreported,
    members: Vec<Member>,
    /// Tasks that wait for exits that the nursery does not report.
    exits: JoinSet<MemberExit>,
}

#[derive(Debug, Clone)]
struct Member {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    /// True if Python started the member.
    adopted: bool,
    leads_a_group: bool,
}

/// Way to deliver a signal to a member or to its process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    /// Signal only the member.
    Member,
    /// Signal the process group through the member's pidfd.
    Group,
    /// Make the nursery signal the process group.
    GroupByNursery,
    /// Signal the member directly, and make the nursery kill the other processes in the member's process group.
    MemberAndRestByNursery,
    /// Signal the member and kill the rest of its process group directly, because the nursery does not manage them.
    MemberAndRest,
}

impl Running {
    /// Creates the state of a group whose workers were started by the nursery. `workers` is ordered by local rank.
    pub(super) fn new(group: Group, workers: Vec<(i32, OwnedFd)>) -> Self {
        let members = workers.into_iter().map(|(pid, pidfd)| Member::started(pid, pidfd)).collect();
        Self { group, hung: None, unreported: Unreported::default(), members, exits: JoinSet::new() }
    }

    /// Adds a process that Python started.
    pub(super) fn adopt(&mut self, pid: i32, pidfd: OwnedFd, status: Option<OwnedFd>) {
        let pidfd = Arc::new(pidfd);
        let leads_a_group = getpgid(Some(Pid::from_raw(pid))).is_ok_and(|group| group.as_raw() == pid);
        self.members.push(Member { pid, pidfd: Arc::clone(&pidfd), adopted: true, leads_a_group });
        self.exits.spawn(until_exit(pid, pidfd, status));
    }

    /// Replaces a failed worker with a new worker that the nursery has started.
    pub(super) fn replace(&mut self, local_rank: u32, pid: i32, pidfd: OwnedFd) {
        self.hung = None;
        for exited in self.members.iter_mut().filter(|member| member.pid == pid) {
            // Forget the pid of a member that has exited, because the kernel has reused it for the replacement.
            exited.pid = 0;
        }
        if let Some(member) = self.members.get_mut(local_rank as usize) {
            *member = Member::started(pid, pidfd);
        }
    }

    /// Returns the pids of all members in the order of their local ranks, including members that have exited.
    pub(super) fn pids(&self) -> impl Iterator<Item = i32> {
        self.members.iter().map(|member| member.pid)
    }

    /// Returns the pids of the members that Python started.
    pub(super) fn adopted(&self) -> Vec<i32> {
        self.members.iter().filter(|member| member.adopted).map(|member| member.pid).collect()
    }

    /// Returns the pids of the members that the nursery started.
    pub(super) fn started(&self) -> Vec<i32> {
        self.members.iter().filter(|member| !member.adopted).map(|member| member.pid).collect()
    }

    /// Returns the pids of the members that are dead but whose exits have not been reported yet.
    pub(super) fn dead(&self) -> Vec<i32> {
        let living: BTreeSet<i32> = self.group.living().collect();
        let living = self.members.iter().filter(|member| living.contains(&member.pid));
        let (pids, pidfds): (Vec<_>, Vec<_>) = living.map(|member| (member.pid, member.pidfd.as_fd())).unzip();
        let ended = process::have_ended(&pidfds);
        pids.into_iter().zip(ended).filter_map(|(pid, ended)| ended.then_some(pid)).collect()
    }

    /// Returns the pids of the members that are exiting in the kernel. The kernel closes the connections of such a
    /// process before it reports the exit. This may take seconds if the process uses much memory or a GPU.
    pub(super) fn dying(&self) -> Vec<i32> {
        self.group.living().filter(|pid| Stat::of(*pid).is_some_and(|stat| stat.is_ending())).collect()
    }

    /// Returns the pid of the running worker with this local rank.
    pub(super) fn pid_of(&self, local_rank: u32) -> Option<i32> {
        self.pids().find(|pid| self.group.rank_of(*pid) == Some(local_rank))
    }

    /// Returns the local rank of the worker to which this process belongs. That worker is the process itself, or its
    /// closest ancestor that is a worker. For an orphan, it is the worker that leads the orphan's session.
    pub(super) fn worker_of(&self, pid: i32) -> Option<u32> {
        let mut ancestor = pid;
        for _ in 0..MAX_DEPTH {
            if let Some(local_rank) = self.group.rank_of(ancestor) {
                return Some(local_rank);
            }
            match Status::of(ancestor).map(|status| status.parent) {
                Some(parent) if parent > 1 => ancestor = parent,
                _ => break,
            }
        }
        let session = getsid(Some(Pid::from_raw(pid))).ok()?.as_raw();
        let leads = self.members.iter().any(|member| member.pid == session && member.leads_a_group);
        if leads { self.group.rank_of(session) } else { None }
    }

    /// Watches for the exits of the remaining workers, because the lost nursery no longer reports them.
    pub(super) fn watch_exits(&mut self) {
        for member in self.members.iter().filter(|member| !member.adopted) {
            if self.group.living().any(|pid| pid == member.pid) {
                self.exits.spawn(until_exit(member.pid, Arc::clone(&member.pidfd), None));
            }
        }
    }

    /// Waits for the exit of any member that is not watched by the nursery, such as a process that Python started.
    /// Returns `None` if there is no such member. Cancel-safe.
    pub(super) async fn next_exit(&mut self) -> Option<MemberExit> {
        self.exits.join_next().await.map(or_panic)
    }

    /// Sends a signal to the member with this pid, or to its process group. `has_group_signals` is true if the kernel
    /// can signal a process group through a pidfd.
    pub(super) fn signal(
        &self,
        pid: i32,
        to: StopScope,
        signal: Signal,
        has_group_signals: bool,
        nursery: Option<&mut Nursery>,
    ) {
        let Some(member) = self.members.iter().find(|member| member.pid == pid) else { return };
        let delivery = member.delivery(to, signal, has_group_signals, nursery.is_some());
        match (delivery, nursery) {
            (Delivery::MemberAndRest, _) => member.kill_rest_of_group(),
            (Delivery::GroupByNursery | Delivery::MemberAndRestByNursery, Some(nursery)) => {
                nursery.send(&Request::SignalGroup { pid, signal: signal.number() }, Vec::new());
            }
            _ => {}
        }
        // Ignore errors. ESRCH means that the process has already exited. A process that cannot be signalled, such as a
        // set-uid program, is later reported as stuck.
        let _ = match delivery {
            Delivery::GroupByNursery => Ok(()),
            Delivery::Group => process::send_group_signal(&member.pidfd, signal.number()),
            Delivery::Member | Delivery::MemberAndRest | Delivery::MemberAndRestByNursery => {
                process::send_signal(&member.pidfd, signal.number())
            }
        };
    }
}

impl Member {
    fn started(pid: i32, pidfd: OwnedFd) -> Self {
        Self { pid, pidfd: Arc::new(pidfd), adopted: false, leads_a_group: true }
    }

    fn delivery(&self, to: StopScope, signal: Signal, has_group_signals: bool, has_nursery: bool) -> Delivery {
        let by_nursery = has_nursery && !self.adopted;
        if to == StopScope::Worker || !self.leads_a_group {
            Delivery::Member
        } else if signal == Signal::KILL {
            match (self.adopted, by_nursery) {
                (true, _) => Delivery::MemberAndRest,
                (false, true) => Delivery::MemberAndRestByNursery,
                (false, false) => Delivery::Member,
            }
        } else if has_group_signals {
            Delivery::Group
        } else if by_nursery {
            Delivery::GroupByNursery
        } else {
            // Signal only the member, because the nursery does not know members that Python started. When the member
            // exits, its parent, a keeper process, kills the processes that the member leaves behind.
            Delivery::Member
        }
    }

    /// Kills the other processes in this member's process group, except those that clean up after the member.
    ///
    /// Used only for members that Python started, because the nursery does not manage them.
    fn kill_rest_of_group(&self) {
        let rest = cleaner::others_in_groups(self.pid, |group| group == self.pid);
        // Signal the processes of the group only while the member is running, because another process group may reuse
        // the member's pid afterwards.
        if process::have_ended(&[self.pidfd.as_fd()]) == [false] {
            for target in rest {
                target.signal(nix::sys::signal::Signal::SIGKILL);
            }
        }
    }
}

/// Exit of a process that the agent itself watches.
#[derive(Debug)]
pub(super) struct MemberExit {
    pub(super) pid: i32,
    pub(super) exit: WorkerExit,
    pub(super) seen: Stamp,
}

/// Time limit within which a parent must send the exit status of a child after the child's exit.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// Waits until a process exits, and returns its exit status.
///
/// A child of this process is not reaped, because Python reaps the children that it started. The exit status of any
/// other process is read from the pipe `status`, and is unknown without a pipe.
async fn until_exit(pid: i32, pidfd: Arc<OwnedFd>, status: Option<OwnedFd>) -> MemberExit {
    let seen_by_epoll = match register(Arc::clone(&pidfd), Interest::READABLE) {
        Ok(watched) => watched.readable().await.is_ok(),
        Err(_) => false,
    };
    let seen = Stamp::now();
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    let own = waitid(Id::PIDFd(pidfd.as_fd()), flags).ok().filter(|_| seen_by_epoll);
    let exit = match (own.map_or(WorkerExit::Unknown, WorkerExit::of), status) {
        (WorkerExit::Unknown, Some(status)) => status_from_parent(status).await.unwrap_or(WorkerExit::Unknown),
        (exit, _) => exit,
    };
    MemberExit { pid, exit, seen }
}

/// Reads the status of an exited process from a pipe. The process's parent has written the four bytes that
/// `wait4` returned.
async fn status_from_parent(status: OwnedFd) -> Option<WorkerExit> {
    let pipe = register(status, Interest::READABLE).ok()?;
    // The pipe also becomes readable if the writer exits without writing anything.
    let _guard = tokio::time::timeout(STATUS_LIMIT, pipe.readable()).await.ok()?.ok()?;
    let mut bytes = [0; 4];
    // One read returns all four bytes, because pipes do not split such short writes.
    match nix::unistd::read(pipe.get_ref(), &mut bytes) {
        Ok(4) => WorkerExit::from_wait_status(i32::from_ne_bytes(bytes)),
        Ok(_) | Err(_) => None,
    }
}

/// State of the current group of workers.
#[expect(clippy::large_enum_variant, reason = "there is only one")]
pub(super) enum Current {
    Idle,
    Starting(Starting),
    Running(Running),
}

impl Current {
    pub(super) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    pub(super) fn is_starting(&self) -> bool {
        matches!(self, Self::Starting(_))
    }

    pub(super) fn running(&self) -> Option<&Running> {
        if let Self::Running(running) = self { Some(running) } else { None }
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        if let Self::Running(running) = self { Some(running) } else { None }
    }

    pub(super) fn starting_mut(&mut self) -> Option<&mut Starting> {
        if let Self::Starting(starting) = self { Some(starting) } else { None }
    }

    /// Returns true while the nursery may be blocked starting a worker.
    pub(super) fn starts_a_worker(&self) -> bool {
        match self {
            Self::Idle => false,
            Self::Starting(_) => true,
            Self::Running(running) => running.group.starting().next().is_some(),
        }
    }

    /// Waits for the exit of any member that is not watched by the nursery, such as a process that Python started.
    /// Returns `None` if there is no such member. Cancel-safe.
    pub(super) async fn next_exit(&mut self) -> Option<MemberExit> {
        self.running_mut()?.next_exit().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(adopted: bool, leads_a_group: bool) -> Member {
        let own = std::process::id().cast_signed();
        Member { adopted, leads_a_group, ..Member::started(own, process::open_pidfd(own).expect("this process lives")) }
    }

    #[test]
    fn the_delivery_of_a_group_signal_depends_on_kernel_and_nursery() {
        use Delivery::*;
        let (worker, adopted) = (member(false, true), member(true, true));
        let cases = [
            // Columns: member, signal, true if the kernel supports signals to groups, true if there is a nursery,
            // expected delivery.
            (&worker, Signal::TERM, true, true, Group),
            (&worker, Signal::TERM, true, false, Group),
            (&worker, Signal::TERM, false, true, GroupByNursery),
            (&worker, Signal::TERM, false, false, Member),
            (&worker, Signal::KILL, true, true, MemberAndRestByNursery),
            (&worker, Signal::KILL, true, false, Member),
            (&adopted, Signal::TERM, true, true, Group),
            (&adopted, Signal::TERM, false, true, Member),
            (&adopted, Signal::KILL, true, true, MemberAndRest),
            (&adopted, Signal::KILL, false, false, MemberAndRest),
        ];
        for (member, signal, has_group_signals, has_nursery, expected) in cases {
            let found = member.delivery(StopScope::Group, signal, has_group_signals, has_nursery);
            assert_eq!(found, expected, "{signal:?} {has_group_signals} {has_nursery} {}", member.adopted);
        }
    }

    #[test]
    fn a_worker_without_its_own_process_group_is_signalled_alone() {
        for signal in [Signal::TERM, Signal::KILL] {
            for adopted in [false, true] {
                assert_eq!(member(adopted, true).delivery(StopScope::Worker, signal, true, true), Delivery::Member);
                assert_eq!(member(adopted, false).delivery(StopScope::Group, signal, true, true), Delivery::Member);
            }
        }
    }
}
