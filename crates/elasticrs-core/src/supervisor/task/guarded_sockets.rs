//! Passes resources of the agent to the nursery: the connection of the agent's lease, the links to other agents,
//! and the fence, which is the deadline for killing all workers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use elasticrs_nursery::connections::{Connections, HeldSocket, Release};
use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::protocol::Request;
use nix::errno::Errno;

use super::nursery::Nursery;
use crate::supervisor::command::Guarded;
use crate::supervisor::queue::Queue;

/// Sockets that the nursery holds. This process also keeps them open, so that it can pass them to the next
/// nursery.
#[derive(Debug)]
pub(super) struct GuardedSockets {
    connections: Connections,
    fence: Arc<Fence>,
    queue: Arc<Queue>,
}

impl GuardedSockets {
    pub(super) fn new(fence: Arc<Fence>, queue: Arc<Queue>) -> Self {
        Self { connections: Connections::default(), fence, queue }
    }

    /// Changes which sockets are kept open in this process and in the nursery. Reports a failure as an event.
    pub(super) fn change(&mut self, guarded: Guarded, mut nursery: Option<&mut Nursery>) {
        match guarded {
            Guarded::Hold(socket) => {
                self.hold(HeldSocket { socket, word: None }, false, nursery);
            }
            Guarded::Link { link, word, is_first } => {
                self.hold(HeldSocket { socket: link, word: Some(word) }, !is_first, nursery);
            }
            Guarded::Beside(socket, held) => {
                if !self.hold(HeldSocket { socket, word: None }, true, nursery.as_deref_mut()) {
                    // Drop the socket, because the nursery has no duplicate of it. The nursery and this process must
                    // hold the same sockets, because `Release::Newest` closes the newest socket in each process.
                    self.connections.release(Release::Newest);
                    let _ = held.send(false);
                } else if let Some(nursery) = nursery {
                    nursery.notify_when_sent(held);
                }
            }
            Guarded::NotDuplicated { errno, is_link: false } => self.report_not_guarded(errno),
            Guarded::NotDuplicated { errno, is_link: true } => {
                self.report_link_not_guarded(Errno::from_raw(errno).desc());
            }
            Guarded::Release(which) => {
                self.connections.release(which);
                self.send_to_both(nursery, &Request::Release(which), Ok(Vec::new()));
            }
        }
    }

    /// Passes duplicates of the agent's sockets, and the deadline for killing all workers, to a new nursery and its
    /// sentinel process.
    pub(super) fn equip(&self, nursery: &mut Nursery) {
        self.equip_one(nursery);
        if let Some(guard) = &mut nursery.sentinel {
            self.equip_one(&mut guard.sentinel);
        }
    }

    /// Same as [`Self::equip`], but for a single process.
    pub(super) fn equip_one(&self, nursery: &mut Nursery) {
        let mut send = |request, fds: io::Result<Vec<OwnedFd>>| match fds {
            Ok(fds) => nursery.send(&request, fds),
            Err(error) => self.report_not_guarded(error.raw_os_error().unwrap_or(libc::EMFILE)),
        };
        for held in self.connections.all() {
            send(Request::Hold { beside: true, word: held.word }, held.socket.try_clone().map(|copy| vec![copy]));
        }
        send(Request::Fence { holder: self.fence.holder() }, self.fence.descriptors());
    }

    /// Reports that the nursery process cannot keep a duplicate of the socket that is connected to the store.
    pub(super) fn report_not_guarded(&self, errno: i32) {
        let reason = Errno::from_raw(errno).desc();
        self.queue.degraded(format!("the nursery cannot guard the connection to the store: {reason}"));
    }

    /// Keeps a socket open, and sends a duplicate of it to the nursery. If either step fails, reports the error to the
    /// agent and returns false.
    fn hold(&mut self, held: HeldSocket, beside: bool, nursery: Option<&mut Nursery>) -> bool {
        let request = Request::Hold { beside, word: held.word };
        let copy = held.socket.try_clone().map(|copy| vec![copy]);
        match self.connections.hold(held, beside) {
            Ok(()) => self.send_to_both(nursery, &request, copy),
            Err(reason) => {
                self.report_link_not_guarded(&reason.to_string());
                false
            }
        }
    }

    /// Sends a request with descriptors to the nursery and its sentinel process. If the descriptors cannot be
    /// duplicated, reports the problem to the agent and returns false.
    fn send_to_both(&self, nursery: Option<&mut Nursery>, request: &Request, fds: io::Result<Vec<OwnedFd>>) -> bool {
        let Some(nursery) = nursery else { return true };
        let sent = fds.and_then(|fds| nursery.send_to_both(request, fds));
        if let Err(error) = &sent {
            self.report_not_guarded(error.raw_os_error().unwrap_or(libc::EMFILE));
        }
        sent.is_ok()
    }

    fn report_link_not_guarded(&self, reason: &str) {
        self.queue.degraded(format!(
            "the nursery cannot guard the link of another agent: {reason}. If this node is lost, that agent learns it \
             only when the lease of this node expires"
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;
    use crate::supervisor::queue::Next;

    fn socket() -> OwnedFd {
        UnixStream::pair().expect("a pair of sockets").0.into()
    }

    #[test]
    fn guarded_sockets_are_kept_for_the_next_nursery() {
        let queue = Arc::new(Queue::new().expect("an eventfd"));
        let mut guard = GuardedSockets::new(Arc::new(Fence::new().expect("a fence")), Arc::clone(&queue));
        let (sender, receiver) = oneshot::channel();
        guard.change(Guarded::Hold(socket()), None);
        guard.change(Guarded::Beside(socket(), sender), None);
        assert_eq!(guard.connections.all().len(), 2);
        // The channel is closed without a result, because no nursery exists that could confirm the request.
        assert!(receiver.blocking_recv().is_err());
        guard.change(Guarded::Release(Release::Older), None);
        assert_eq!(guard.connections.all().len(), 1);
        guard.change(Guarded::Hold(socket()), None);
        assert_eq!(guard.connections.all().len(), 1, "a new session replaces the sockets of the previous one");
        assert_eq!(queue.next(Some(Duration::ZERO)).expect("a poll"), Next::TimedOut);
    }

    #[test]
    fn a_socket_that_could_not_be_duplicated_is_reported() {
        let queue = Arc::new(Queue::new().expect("an eventfd"));
        let mut guard = GuardedSockets::new(Arc::new(Fence::new().expect("a fence")), Arc::clone(&queue));
        for (is_link, expected) in [(false, "the connection to the store"), (true, "the link of another agent")] {
            guard.change(Guarded::NotDuplicated { errno: libc::EMFILE, is_link }, None);
            let event = format!("{:?}", queue.next(Some(Duration::ZERO)).expect("a poll"));
            assert!(event.contains(expected), "{event}");
        }
    }
}
