//! What the nursery holds for the agent: the connection of its lease, and the fence.

use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;

use super::Task;
use crate::nursery::protocol::Request;
use crate::supervisor::event::Event;

impl Task {
    pub(super) fn guard(&mut self, connection: Option<OwnedFd>) {
        self.guard = connection;
        match (&self.guard, &mut self.nursery) {
            (None, Some(nursery)) => nursery.send(&Request::Release, Vec::new()),
            (Some(_), _) => self.send_guard(),
            (None, None) => {}
        }
    }

    pub(super) fn send_guard(&mut self) {
        if let Some(guard) = &self.guard {
            let guard = guard.try_clone();
            self.send_descriptors(&Request::Hold, guard.map(|guard| vec![guard]));
        }
    }

    pub(super) fn send_fence(&mut self) {
        let descriptors = self.shared.fence.descriptors();
        self.send_descriptors(&Request::Fence, descriptors);
    }

    pub(super) fn send_descriptors(&mut self, request: &Request, fds: io::Result<Vec<OwnedFd>>) {
        match (&mut self.nursery, fds) {
            (None, _) => {}
            (Some(nursery), Ok(fds)) => nursery.send(request, fds),
            (Some(_), Err(error)) => self.tell_not_guarded(error.raw_os_error().unwrap_or(libc::EMFILE)),
        }
    }

    pub(super) fn tell_not_guarded(&self, errno: i32) {
        let reason = Errno::from_raw(errno).desc();
        let message = format!("the nursery cannot guard the connection to the store: {reason}");
        self.shared.queue.push(Event::Degraded { message });
    }
}
