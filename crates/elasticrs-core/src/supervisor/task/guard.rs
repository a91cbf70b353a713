//! Passes to the nursery what it holds for the agent: the connection of the agent's lease, the links to other agents,
//! and the fence, which is the deadline for killing all workers.

use std::io;
use std::os::fd::OwnedFd;

use elasticrs_nursery::connections::{Held, Release};
use elasticrs_nursery::protocol::Request;
use nix::errno::Errno;

use super::{Nursery, Task};
use crate::supervisor::command::Guarded;
use crate::supervisor::event::Event;

impl Task {
    pub(super) fn guard(&mut self, guarded: Guarded) {
        match guarded {
            Guarded::Hold(socket) => {
                self.hold(Held { socket, word: None }, false);
            }
            Guarded::Link { link, word, is_first } => {
                self.hold(Held { socket: link, word: Some(word) }, !is_first);
            }
            Guarded::Beside(socket, held) => {
                if !self.hold(Held { socket, word: None }, true) {
                    // Release the newest socket here as well. Otherwise, a later request to release the newest socket
                    // would close different sockets in this process and in the nursery.
                    self.guard.release(Release::Newest);
                    let _ = held.send(false);
                } else if let Some(nursery) = &mut self.nursery {
                    nursery.tell_sent(held);
                }
            }
            Guarded::NotDuplicated { errno, is_link: false } => self.tell_not_guarded(errno),
            Guarded::NotDuplicated { errno, is_link: true } => {
                self.tell_link_not_guarded(Errno::from_raw(errno).desc());
            }
            Guarded::Release(which) => {
                self.guard.release(which);
                self.send_to_both(&Request::Release(which), Ok(Vec::new()));
            }
        }
    }

    /// Gives the nursery a socket to hold. If that fails, reports an event and returns false.
    fn hold(&mut self, held: Held, beside: bool) -> bool {
        let request = Request::Hold { beside, word: held.word };
        let copy = held.socket.try_clone().map(|copy| vec![copy]);
        match self.guard.hold(held, beside) {
            Ok(()) => self.send_to_both(&request, copy),
            Err(reason) => {
                self.tell_link_not_guarded(&reason.to_string());
                false
            }
        }
    }

    /// Gives a new nursery or sentinel duplicates of all held sockets, and the fence.
    pub(super) fn equip(&self, nursery: &mut Nursery) {
        let mut send = |request, fds: io::Result<Vec<OwnedFd>>| match fds {
            Ok(fds) => nursery.send(&request, fds),
            Err(error) => self.tell_not_guarded(error.raw_os_error().unwrap_or(libc::EMFILE)),
        };
        for held in self.guard.all() {
            send(Request::Hold { beside: true, word: held.word }, held.socket.try_clone().map(|copy| vec![copy]));
        }
        send(Request::Fence { holder: self.shared.fence.holder() }, self.shared.fence.descriptors());
    }

    /// Sends a request to the nursery and its sentinel. If no descriptor is free for the duplicates, reports an event
    /// and returns false.
    fn send_to_both(&mut self, request: &Request, fds: io::Result<Vec<OwnedFd>>) -> bool {
        let Some(nursery) = &mut self.nursery else { return true };
        let sent = fds.and_then(|fds| nursery.send_to_both(request, fds));
        if let Err(error) = &sent {
            self.tell_not_guarded(error.raw_os_error().unwrap_or(libc::EMFILE));
        }
        sent.is_ok()
    }

    /// Replaces the sentinel if it was lost. Without a sentinel, the processes would not be cleaned up if the agent
    /// were killed while the nursery hangs.
    pub(super) fn check_sentinel(&mut self) {
        let Some(mut nursery) = self.nursery.take_if(|nursery| nursery.has_lost_sentinel()) else { return };
        match nursery.renew_sentinel(&self.config.nursery) {
            Ok(Some(sentinel)) => self.equip(sentinel),
            Ok(None) => {}
            Err(error) => {
                let message = format!("the nursery's sentinel was lost, and cannot be replaced: {error}");
                self.shared.queue.push(Event::Degraded { message });
            }
        }
        self.nursery = Some(nursery);
    }

    pub(super) fn tell_not_guarded(&self, errno: i32) {
        let reason = Errno::from_raw(errno).desc();
        let message = format!("the nursery cannot guard the connection to the store: {reason}");
        self.shared.queue.push(Event::Degraded { message });
    }

    fn tell_link_not_guarded(&self, reason: &str) {
        let message = format!(
            "the nursery cannot guard the link of another agent: {reason}. If this node is lost, that agent learns it \
             only when the lease of this node expires"
        );
        self.shared.queue.push(Event::Degraded { message });
    }
}
