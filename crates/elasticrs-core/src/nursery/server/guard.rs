//! What the nursery does for an agent that cannot any more: it keeps the connection open until nothing is left, and acts
//! when the deadline of the fence has passed.

use std::os::fd::OwnedFd;

use elasticrs_runtime::clock::Stamp;

use super::{Nursery, at_once};
use crate::nursery::activity::Activity;
use crate::nursery::connections::{Held, LastWord, Release};
use crate::nursery::fence::{Fence, Look};
use crate::nursery::protocol::{Reply, Request};

impl Nursery {
    pub(super) fn hold(&mut self, fds: Vec<OwnedFd>, beside: bool, word: Option<LastWord>) {
        match fds.into_iter().next() {
            Some(socket) => self.held.hold(Held { socket, word }, beside),
            // The descriptor was lost, because this process has reached its limit of open files.
            None => self.tell(&Reply::NotGuarded { errno: libc::EMFILE }, Vec::new()),
        }
    }

    /// Lets the session of a dead agent end, because none of its processes is left.
    pub(super) fn end_session(&mut self) {
        // Read the agent's last requests first, because they may say that the session has moved to another connection,
        // or that the agent is alive.
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
        // Without the activity page, the sentinel does not wait for the nursery when the agent is gone.
        self.activity = Activity::from_descriptors(fds).ok();
        if let Some(activity) = &mut self.activity {
            activity.wait();
        }
    }

    pub(super) fn set_fence(&mut self, fds: Vec<OwnedFd>) {
        match Fence::from_descriptors(fds) {
            Ok(fence) => {
                self.fence = Some(fence);
                self.check_fence();
            }
            Err(error) => self.cannot_guard(&error),
        }
    }

    /// Kills everything if the deadline of the fence has passed. Returns true if it has.
    pub(super) fn check_fence(&mut self) -> bool {
        match self.fence.as_ref().map(Fence::look) {
            None | Some(Ok(Look::Unset | Look::At(_))) => false,
            Some(Ok(Look::Passed { first })) => {
                if first {
                    self.end_lease();
                }
                true
            }
            Some(Err(error)) => {
                self.cannot_guard(&error);
                false
            }
        }
    }

    fn end_lease(&mut self) {
        self.settle();
        // Who has ended by itself so far is told as such.
        self.reap();
        self.tell(&Reply::Fenced { seen: Stamp::now() }, Vec::new());
        if !self.orphaned {
            self.begin_sweep(at_once(), None, None);
        }
    }

    fn cannot_guard(&mut self, error: &std::io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
        self.tell(&Reply::NotGuarded { errno }, Vec::new());
    }
}
