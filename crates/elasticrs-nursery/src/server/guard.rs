//! Keeps a dead agent's connections open until all of its processes have exited. Also kills all processes if the agent
//! does not renew its lease before a deadline.

use std::os::fd::OwnedFd;

use super::{LAST_SWEEP, NurseryServer};
use crate::activity::ActivityPage;
use crate::connections::{HeldSocket, LastWord, Release};
use crate::fence::{Fence, FenceState, Holder};
use crate::protocol::{Reply, Request, SweepLimits};

impl NurseryServer {
    pub(super) fn hold(&mut self, fds: Vec<OwnedFd>, beside: bool, word: Option<LastWord>) {
        // `fds` is empty if this process has reached its limit on open files. `hold` is not expected to fail, because
        // the agent enforces the same limit on the number of connections.
        let is_held =
            fds.into_iter().next().is_some_and(|socket| self.held.hold(HeldSocket { socket, word }, beside).is_ok());
        if !is_held {
            self.tell(&Reply::NotGuarded { errno: libc::EMFILE }, Vec::new());
        }
    }

    /// Closes the connections that are held for a dead agent, so that the agent's session ends.
    ///
    /// Called when all workers and their descendants have exited, except processes that unlink shared memory.
    pub(super) fn end_session(&mut self) {
        // First handle the agent's last requests. They may say that the session has moved to another connection, or
        // that the agent is alive.
        while let Ok(Some((request, fds))) = self.link.receive() {
            match request {
                Request::Hold { beside, word } => self.hold(fds, beside, word),
                Request::Release(which) => self.held.release(which),
                _ => {}
            }
        }
        self.held.release(Release::All);
    }

    pub(super) fn set_activity(&mut self, fds: Vec<OwnedFd>) {
        // Ignore an error, because it only means that the process that guards the nursery has to kill all processes
        // when the agent dies.
        self.activity = ActivityPage::from_descriptors(fds).ok();
        if let Some(activity) = &mut self.activity {
            activity.wait();
        }
    }

    pub(super) fn set_fence(&mut self, fds: Vec<OwnedFd>, holder: Holder) {
        match Fence::from_descriptors(fds, holder) {
            Ok(fence) => {
                self.fence = Some(fence);
                self.check_fence();
            }
            Err(error) => self.cannot_guard(&error),
        }
    }

    /// Starts killing all workers and their descendants if the fence deadline has passed, because the other nodes may
    /// then consider this agent dead. Returns true if the deadline has passed.
    pub(super) fn check_fence(&mut self) -> bool {
        match self.fence.as_ref().map(Fence::look) {
            None | Some(Ok(FenceState::Unset | FenceState::At(_))) => false,
            Some(Ok(FenceState::Passed { first })) => {
                if first {
                    self.end_lease();
                }
                true
            }
            Some(Ok(FenceState::HandedOver(_))) => {
                self.fence = None;
                false
            }
            Some(Err(error)) => {
                self.cannot_guard(&error);
                false
            }
        }
    }

    fn end_lease(&mut self) {
        self.settle();
        // First reap the workers that have exited on their own, so that their exits are reported before
        // [`Reply::Fenced`].
        self.reap();
        self.tell(&Reply::Fenced, Vec::new());
        if !self.orphaned {
            self.begin_sweep(SweepLimits::at_once(LAST_SWEEP), None, None);
        }
    }

    fn cannot_guard(&mut self, error: &std::io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
        self.tell(&Reply::NotGuarded { errno }, Vec::new());
    }
}
