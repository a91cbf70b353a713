//! The program of a sentinel: it acts where its nursery cannot, which imports, hangs in a start, or is dead.
//!
//! When the agent is gone, it waits until the nursery has ended everything, however long that takes. It kills whatever carries the
//! token if the nursery does not watch its agent yet, dies before it is done, or hangs in a start. The latter also when the
//! deadline of the fence has passed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{LAST_SWEEP, Nursery};
use crate::nursery::activity::{Activity, Doing, PATIENCE_MS};
use crate::nursery::connections::{Connections, Held, Release};
use crate::nursery::fence::Fence;
use crate::nursery::link::NurseryLink;
use crate::nursery::protocol::Request;
use crate::nursery::sweep::kill_by_token;
use crate::nursery::token::Token;
use crate::sys::pidfd;

/// No nursery takes so long to end everything. This one hangs in the kernel.
const HOPELESS: Duration = LAST_SWEEP.saturating_mul(3);

pub(super) struct Sentinel {
    /// Of all that is to end.
    token: Token,
    link: NurseryLink,
    agent: OwnedFd,
    nursery: Option<Guarded>,
    fence: Option<Fence>,
    /// The same as the nursery's.
    held: Connections,
}

struct Guarded {
    pidfd: OwnedFd,
    activity: Activity,
    /// What it did at the last look, if the deadline of the fence had passed.
    overdue: Option<Doing>,
}

impl Sentinel {
    pub(super) fn new(process: Nursery, token: Token) -> Self {
        let Nursery { link, agent, held, .. } = process;
        Self { token, link, agent, nursery: None, fence: None, held }
    }

    /// Returns when it is over.
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

    /// Returns false if nothing comes any more.
    fn serve_requests(&mut self) -> bool {
        loop {
            let (request, fds) = match self.link.receive() {
                Ok(Some(received)) => received,
                Ok(None) => return true,
                Err(_) => return false,
            };
            // Ignore a descriptor that cannot be used. The sentinel then does not guard the object behind it. This is
            // no worse than having no sentinel.
            match request {
                Request::Guard => self.nursery = Guarded::new(fds),
                Request::Fence => self.fence = Fence::from_descriptors(fds).ok(),
                Request::Hold { beside, word } => {
                    for socket in fds {
                        self.held.hold(Held { socket, word }, beside);
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

    /// Kills a nursery that hangs if the deadline has passed, and says whether it has done so.
    fn fences(&mut self) -> bool {
        let (Some(nursery), Some(fence)) = (&mut self.nursery, &self.fence) else { return false };
        let doing = nursery.activity.look_again();
        let is_overdue = matches!(doing, Doing::Starts(_)) && fence.has_passed();
        let hangs = is_overdue && nursery.overdue == Some(doing);
        nursery.overdue = is_overdue.then_some(doing);
        if hangs {
            // It marks the deadline as passed, as the nursery would. There is no error.
            let _ = fence.look();
            // Before what it waits for, whose end it would tell. The only error is ESRCH.
            let _ = pidfd::send_signal(&nursery.pidfd, libc::SIGKILL);
        }
        hangs
    }
}

impl Guarded {
    fn new(fds: Vec<OwnedFd>) -> Option<Self> {
        let [pidfd, page, timer] = <[OwnedFd; 3]>::try_from(fds).ok()?;
        Some(Self { pidfd, activity: Activity::from_descriptors(vec![page, timer]).ok()?, overdue: None })
    }

    /// Waits for the end of a nursery whose agent is gone. Returns false if that is not to be waited for, or if it has left
    /// something.
    fn ends_by_itself(self) -> bool {
        // In case that it was stopped. The only error is ESRCH.
        let _ = pidfd::send_signal(&self.pidfd, libc::SIGCONT);
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
