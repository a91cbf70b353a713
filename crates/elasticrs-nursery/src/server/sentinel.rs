//! The sentinel: a small process that kills the job's processes when their nursery cannot do so, because the nursery is
//! importing modules, hangs while starting a worker, or is dead.
//!
//! When the agent is gone, the sentinel waits until the nursery has killed all of its descendants. If the nursery does
//! not watch its agent yet, dies too early, or hangs while starting a worker, the sentinel itself kills all processes
//! that carry the token. It also kills them if the fence deadline passes while the nursery hangs.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use elasticrs_sys::process;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{LAST_SWEEP, NurseryServer};
use crate::activity::{ActivityPage, Doing, PATIENCE_MS};
use crate::connections::{Connections, HeldSocket, Release};
use crate::fence::Fence;
use crate::protocol::{NurseryLink, Request};
use crate::sweep::kill_by_token;
use crate::token::Token;

/// Time limit for a nursery that is killing its processes. A nursery that takes longer is assumed to be stuck in
/// the kernel. The limit is three times the nursery's own time limit.
const HOPELESS: Duration = LAST_SWEEP.saturating_mul(3);

pub(super) struct Sentinel {
    /// Token that identifies the processes to kill.
    token: Token,
    link: NurseryLink,
    agent: OwnedFd,
    nursery: Option<Guarded>,
    fence: Option<Fence>,
    /// Duplicates of the nursery's connections, held by this process.
    held: Connections,
}

struct Guarded {
    pidfd: OwnedFd,
    activity: ActivityPage,
    /// Activity of the nursery at the last check, if it was still starting a worker after the deadline for killing all
    /// workers. Otherwise `None`.
    ///
    /// If the next check finds the same activity, the nursery is considered hung.
    overdue: Option<Doing>,
}

impl Sentinel {
    pub(super) fn new(process: NurseryServer, token: Token) -> Self {
        let NurseryServer { link, agent, held, .. } = process;
        Self { token, link, agent, nursery: None, fence: None, held }
    }

    /// Serves requests until the agent is gone, or until this process has killed a hung nursery and its workers.
    pub(super) fn serve(mut self) -> io::Result<()> {
        loop {
            let timer = self.nursery.as_ref().map_or(self.link.as_fd(), |nursery| nursery.activity.timer());
            let mut polled =
                [self.agent.as_fd(), timer, self.link.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            poll(&mut polled, PollTimeout::NONE)?;
            let [agent_gone, timer, _] = polled.map(|fd| fd.any().unwrap_or(true));
            let has_hung_up = !self.serve_requests();
            if agent_gone || has_hung_up {
                self.outlive();
                return Ok(());
            }
            if timer && self.fences() {
                kill_by_token(self.token, LAST_SWEEP);
                return Ok(());
            }
        }
    }

    /// Serves all requests that have arrived. Returns false if the link is closed.
    fn serve_requests(&mut self) -> bool {
        loop {
            let (request, fds) = match self.link.receive() {
                Ok(Some(received)) => received,
                Ok(None) => return true,
                Err(_) => return false,
            };
            // Ignore missing or unusable descriptors, because this process can still perform the tasks that do not need
            // them.
            match request {
                Request::Guard => self.nursery = Guarded::new(fds),
                Request::Fence { holder } => self.fence = Fence::from_descriptors(fds, holder).ok(),
                Request::Hold { beside, word } => {
                    for socket in fds {
                        let _ = self.held.hold(HeldSocket { socket, word }, beside);
                    }
                }
                Request::Release(which) => self.held.release(which),
                _ => {}
            }
        }
    }

    fn outlive(mut self) {
        if !self.nursery.is_some_and(Guarded::ends_by_itself) {
            kill_by_token(self.token, LAST_SWEEP);
        }
        self.held.release(Release::All);
    }

    /// Kills a nursery that hangs while it starts a worker, if the deadline for killing the workers has passed. Returns
    /// true if the nursery was killed.
    fn fences(&mut self) -> bool {
        let (Some(nursery), Some(fence)) = (&mut self.nursery, &self.fence) else { return false };
        let doing = nursery.activity.look_again();
        let is_overdue = matches!(doing, Doing::Starts(_)) && fence.has_passed();
        let hangs = is_overdue && nursery.overdue == Some(doing);
        nursery.overdue = is_overdue.then_some(doing);
        if hangs {
            // Call `look` to mark the deadline as passed in shared memory, because the hung nursery cannot do so.
            // Ignore the result, because no error is expected.
            let _ = fence.look();
            // Kill the nursery before the worker that it is starting, because it would otherwise report the worker's
            // exit. Ignore an error, because it means that the nursery is already dead.
            let _ = process::send_signal(&nursery.pidfd, libc::SIGKILL);
        }
        hangs
    }
}

impl Guarded {
    fn new(fds: Vec<OwnedFd>) -> Option<Self> {
        let [pidfd, page, timer] = <[OwnedFd; 3]>::try_from(fds).ok()?;
        Some(Self { pidfd, activity: ActivityPage::from_descriptors(vec![page, timer]).ok()?, overdue: None })
    }

    /// Waits until the nursery has killed all of its descendants and exited. Returns false if the nursery dies before
    /// that, hangs, or does not watch its agent.
    fn ends_by_itself(self) -> bool {
        // Resume the nursery in case it was stopped. The only possible error is ESRCH.
        let _ = process::send_signal(&self.pidfd, libc::SIGCONT);
        let give_up = Instant::now() + HOPELESS;
        let mut before = None;
        while Instant::now() < give_up {
            let doing = self.activity.look();
            match doing {
                Doing::Done => return true,
                Doing::Imports => return false,
                Doing::Starts(_) if before == Some(doing) => return false,
                Doing::Waits | Doing::Starts(_) => before = Some(doing),
            }
            let mut polled = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
            if poll(&mut polled, PollTimeout::from(PATIENCE_MS)) == Ok(1) {
                return self.activity.look() == Doing::Done;
            }
        }
        false
    }
}
