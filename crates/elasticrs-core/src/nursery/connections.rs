//! The sockets that the nursery holds for its agent.
//!
//! With the built-in store, the nursery holds a duplicate of the connection of the agent's session. It holds two while
//! the session moves to a new connection. With etcd, the nursery holds the agent's links. A link is a connection on
//! which another agent waits for the death of this agent. Each link has a last word: a secret that the nursery sends
//! only when no process of a dead agent is left.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{MsgFlags, Shutdown, send, shutdown};
use serde::{Deserialize, Serialize};

/// The sockets to close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// Notify the peers and close all sockets, because nothing depends on the session anymore.
    All,
    /// Close all sockets without notifying the peers, because the agent is alive and continues its session without this
    /// nursery.
    Quietly,
    /// Close all sockets except the newest, because the session has moved to the newest.
    Older,
    /// Close only the newest socket, because the session has not moved to it.
    Newest,
}

/// Secret that the nursery sends on a link when no process of the agent is left.
pub type LastWord = [u8; 32];

/// Maximum number of links that the nursery holds. Two are needed, because an agent usually has links with two others.
/// The rest is for broken links, which stay in the list because the nursery does not check them.
const MAX_LINKS: usize = 8;

/// A socket that the nursery holds.
#[derive(Debug)]
pub struct Held {
    pub socket: OwnedFd,
    /// Sent on the socket when no process of the agent is left. `None` for the connection of a session.
    pub word: Option<LastWord>,
}

/// The sockets that the nursery holds, in the order in which they were added.
#[derive(Debug, Default)]
pub struct Connections(Vec<Held>);

impl Connections {
    /// Adds a socket. Drops all other sockets first unless `beside` is set. Drops the oldest socket first if there are
    /// already `MAX_LINKS` sockets and the new one is a link.
    pub fn hold(&mut self, held: Held, beside: bool) {
        if !beside {
            self.0.clear();
        }
        if held.word.is_some() && self.0.len() >= MAX_LINKS {
            self.0.remove(0);
        }
        self.0.push(held);
    }

    /// Closes some or all of the sockets.
    pub fn release(&mut self, which: Release) {
        match which {
            Release::All => {
                for Held { socket, word } in self.0.drain(..) {
                    if let Some(word) = word {
                        // The send buffer has room, because nothing else is ever sent on a link. An error means that
                        // the link is down, so there is no peer to notify.
                        let _ = send(socket.as_raw_fd(), &word, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
                    }
                    // Without `shutdown`, the kernel would reset a connection that has unread data, and a reset does
                    // not tell the store that nothing runs here. An error means that the peer is already gone.
                    let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
                }
            }
            Release::Quietly => self.0.clear(),
            Release::Older => drop(self.0.drain(..self.0.len().saturating_sub(1))),
            Release::Newest => drop(self.0.pop()),
        }
    }

    /// Returns the sockets that are held, the newest last.
    pub fn all(&self) -> &[Held] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn links(count: u8) -> (Connections, Vec<UnixStream>) {
        let mut connections = Connections::default();
        let peers = (0..count).map(|number| {
            let (own, peer) = UnixStream::pair().unwrap();
            connections.hold(Held { socket: own.into(), word: Some([number; 32]) }, number > 0);
            peer
        });
        let peers = peers.collect();
        (connections, peers)
    }

    fn said(mut peer: UnixStream) -> Vec<u8> {
        let mut said = Vec::new();
        peer.read_to_end(&mut said).unwrap();
        said
    }

    #[test]
    fn the_last_word_is_said_on_each_link() {
        let (mut connections, peers) = links(3);
        connections.release(Release::All);
        let said: Vec<_> = peers.into_iter().map(said).collect();
        assert_eq!(said, [[0; 32], [1; 32], [2; 32]]);
    }

    #[test]
    fn nothing_is_said_when_the_agent_lives() {
        let (mut connections, peers) = links(3);
        connections.release(Release::Quietly);
        assert!(peers.into_iter().all(|peer| said(peer).is_empty()));
        let (connections, peers) = links(3);
        drop(connections);
        assert!(peers.into_iter().all(|peer| said(peer).is_empty()));
    }

    #[test]
    fn the_number_of_links_has_a_limit() {
        let (mut connections, peers) = links(20);
        assert_eq!(connections.all().len(), MAX_LINKS);
        connections.release(Release::All);
        assert_eq!(peers.into_iter().filter(|peer| !said(peer.try_clone().unwrap()).is_empty()).count(), MAX_LINKS);
    }
}
