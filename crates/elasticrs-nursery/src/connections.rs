//! Sockets that the nursery holds open for its agent.
//!
//! With the built-in store, the nursery holds a duplicate of the socket that the agent's session uses. While the
//! session moves to a new connection, the nursery holds duplicates of the old and the new socket. With etcd, the
//! nursery holds the agent's links. A link is a connection on which another agent waits for the death of this agent.
//! Each link has a last word: a secret that the nursery sends only after the agent and all of its processes have
//! exited.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, Shutdown, send, shutdown};
use serde::{Deserialize, Serialize};

/// Selects the sockets to close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// Notify the peers and close all sockets, because the session is no longer needed.
    All,
    /// Close all sockets without notifying the peers, because the agent is still alive and its session continues
    /// without this nursery.
    Quietly,
    /// Close all sockets except the newest, because the session has moved to that socket.
    Older,
    /// Close only the newest socket, because the session continues on an older one.
    Newest,
}

/// Secret that the nursery sends to another agent after its own agent, all workers, and their descendants have exited.
/// The secret proves that they have exited.
pub type LastWord = [u8; 32];

/// Maximum number of connections to other agents that the nursery holds. The agent has the same limit, so the nursery
/// reaches it only if it still holds connections that have died unnoticed.
const MAX_LINKS: usize = 64;

/// A socket that the nursery holds open for its agent.
#[derive(Debug)]
pub struct HeldSocket {
    pub socket: OwnedFd,
    /// Secret that the nursery sends through `socket` to prove that the agent and all of its processes have exited.
    /// `None` if `socket` is the agent's connection to the store.
    pub word: Option<LastWord>,
}

impl HeldSocket {
    /// True if this is a link that is broken or was closed by its peer. Data sent on such a link is lost.
    fn is_dead_link(&self) -> bool {
        let closed_by_peer = PollFlags::from_bits_retain(libc::POLLRDHUP);
        let mut polled = [PollFd::new(self.socket.as_fd(), closed_by_peer)];
        self.word.is_some() && poll(&mut polled, PollTimeout::ZERO) == Ok(1)
    }
}

/// Error: the nursery already holds `MAX_LINKS` links, and none of them is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it already holds {MAX_LINKS} links to other agents")]
pub struct TooManyLinks;

/// The sockets that the nursery holds, in the order in which they were added.
#[derive(Debug, Default)]
pub struct Connections(Vec<HeldSocket>);

impl Connections {
    /// Adds a socket. If `beside` is true, the other sockets stay open. Otherwise, closes them first.
    ///
    /// # Errors
    ///
    /// Fails if the new socket would exceed `MAX_LINKS`, the limit on connections to other agents. Never closes a live
    /// connection to make room, because its peer would then miss the death of this agent.
    pub fn hold(&mut self, held: HeldSocket, beside: bool) -> Result<(), TooManyLinks> {
        if !beside {
            self.0.clear();
        }
        if held.word.is_some() {
            self.0.retain(|held| !held.is_dead_link());
            if self.0.iter().filter(|held| held.word.is_some()).count() >= MAX_LINKS {
                return Err(TooManyLinks);
            }
        }
        self.0.push(held);
        Ok(())
    }

    /// Closes some or all of the sockets.
    pub fn release(&mut self, which: Release) {
        match which {
            Release::All => {
                for HeldSocket { socket, word } in self.0.drain(..) {
                    if let Some(word) = word {
                        // Ignore an error, because it means that the connection is down. The send buffer cannot be
                        // full, because no other data is ever sent on the connection.
                        let _ = send(socket.as_raw_fd(), &word, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
                    }
                    // Call `shutdown` first, because the kernel resets a connection that is closed with unread data.
                    // The store ends a session on a clean close, but not on a reset. Ignore an error, because the peer
                    // is then already gone.
                    let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
                }
            }
            Release::Quietly => self.0.clear(),
            Release::Older => drop(self.0.drain(..self.0.len().saturating_sub(1))),
            Release::Newest => drop(self.0.pop()),
        }
    }

    /// Returns the held sockets, newest last.
    pub fn all(&self) -> &[HeldSocket] {
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
        let peers = (0..count).map(|number| add(&mut connections, Some(number)).unwrap()).collect();
        (connections, peers)
    }

    /// Adds a socket and returns its peer. If `number` is given, the socket is a connection to another agent.
    /// Otherwise, it belongs to a session.
    fn add(connections: &mut Connections, number: Option<u8>) -> Result<UnixStream, TooManyLinks> {
        let (own, peer) = UnixStream::pair().unwrap();
        let word = number.map(|number| [number; 32]);
        connections.hold(HeldSocket { socket: own.into(), word }, true).map(|()| peer)
    }

    fn said(mut peer: UnixStream) -> Vec<u8> {
        let mut said = Vec::new();
        peer.read_to_end(&mut said).unwrap();
        said
    }

    #[test]
    fn the_last_word_is_sent_on_each_link_when_all_are_released() {
        let (mut connections, peers) = links(3);
        connections.release(Release::All);
        let said: Vec<_> = peers.into_iter().map(said).collect();
        assert_eq!(said, [[0; 32], [1; 32], [2; 32]]);
    }

    #[test]
    fn no_last_word_is_sent_if_the_agent_is_alive() {
        let (mut connections, peers) = links(3);
        connections.release(Release::Quietly);
        assert!(peers.into_iter().all(|peer| said(peer).is_empty()));
        let (connections, peers) = links(3);
        drop(connections);
        assert!(peers.into_iter().all(|peer| said(peer).is_empty()));
    }

    #[test]
    fn a_new_link_replaces_only_links_that_their_peers_have_closed() {
        let mut connections = Connections::default();
        let session = add(&mut connections, None).unwrap();
        let count = u8::try_from(MAX_LINKS).unwrap();
        let mut peers: Vec<_> = (0..count).map(|number| add(&mut connections, Some(number)).unwrap()).collect();
        assert_eq!(add(&mut connections, Some(200)).unwrap_err(), TooManyLinks);

        // The first peer closes its socket. The second peer only stops sending.
        drop(peers.remove(0));
        peers[0].shutdown(std::net::Shutdown::Write).unwrap();
        peers.extend([201, 202].map(|number| add(&mut connections, Some(number)).unwrap()));
        assert_eq!(add(&mut connections, Some(203)).unwrap_err(), TooManyLinks);

        connections.release(Release::All);
        assert!(said(session).is_empty());
        assert!(said(peers.remove(0)).is_empty(), "a link that its peer has closed is dropped");
        let said: Vec<u8> = peers.into_iter().map(|peer| said(peer)[0]).collect();
        assert_eq!(said, (2..count).chain([201, 202]).collect::<Vec<u8>>());
    }

    #[test]
    fn a_session_connection_is_held_even_if_its_peer_closes_it() {
        let mut connections = Connections::default();
        drop(add(&mut connections, None).unwrap());
        let _peer = add(&mut connections, Some(1)).unwrap();
        assert_eq!(connections.all().len(), 2);
    }
}
