//! What the nursery holds for the agent: the connection of its lease, and the fence.

use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;

use super::Task;
use crate::nursery::protocol::Request;
use crate::supervisor::command::Guarded;
use crate::supervisor::event::Event;

impl Task {
    pub(super) fn guard(&mut self, guarded: Guarded) {
        match guarded {
            Guarded::Hold(connection) => self.hold(connection, false),
            Guarded::Beside(connection, held) => {
                self.hold(connection, true);
                if let Some(nursery) = &mut self.nursery {
                    nursery.tell_sent(held);
                }
            }
            Guarded::Release(which) => {
                self.guard.release(which);
                if let Some(nursery) = &mut self.nursery {
                    nursery.send(&Request::Release(which), Vec::new());
                }
            }
        }
    }

    fn hold(&mut self, connection: OwnedFd, beside: bool) {
        self.send_descriptors(&Request::Hold { beside }, connection.try_clone().map(|copy| vec![copy]));
        self.guard.hold(connection, beside);
    }

    /// For a nursery that is new.
    pub(super) fn send_guard(&mut self) {
        let held: Vec<_> = self.guard.all().iter().map(OwnedFd::try_clone).collect();
        for copy in held {
            self.send_descriptors(&Request::Hold { beside: true }, copy.map(|copy| vec![copy]));
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
