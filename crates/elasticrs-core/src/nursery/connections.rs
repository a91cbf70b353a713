//! The sockets that the nursery holds for its agent.
//!
//! With our own store, the connection of the agent's session: one, and two while the session moves to the second. With etcd,
//! the links on which other agents wait for this one, each with its last word: a secret that only the nursery says, and only
//! when nothing of a dead agent is left.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{MsgFlags, Shutdown, send, shutdown};
use serde::{Deserialize, Serialize};

/// Which sockets are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// All of them: nothing depends on the session any more. The store is told so.
    All,
    /// All of them, and the session goes on: the agent lives, and needs this nursery no more.
    Quietly,
    /// All but the newest: the session has moved there.
    Older,
    /// The newest: the session has not moved there.
    Newest,
}

/// What is said on a link when nothing of the agent is left.
pub type LastWord = [u8; 32];

/// Maximum number of links that are held. Two agents have links with each one, and a link that is made again leaves the
/// one before it behind.
const MAX_LINKS: usize = 8;

/// A socket that is held.
#[derive(Debug)]
pub struct Held {
    pub socket: OwnedFd,
    /// `None` for the connection of a session.
    pub word: Option<LastWord>,
}

/// Sockets that are held, the newest last.
#[derive(Debug, Default)]
pub struct Connections(Vec<Held>);

impl Connections {
    /// Holds this socket beside the others, or in place of them. Of too many links the oldest is let go.
    pub fn hold(&mut self, held: Held, beside: bool) {
        if !beside {
            self.0.clear();
        }
        if held.word.is_some() && self.0.len() >= MAX_LINKS {
            self.0.remove(0);
        }
        self.0.push(held);
    }

    /// Holds these no longer.
    pub fn release(&mut self, which: Release) {
        match which {
            Release::All => {
                for Held { socket, word } in self.0.drain(..) {
                    if let Some(word) = word {
                        // Nothing else is ever sent on a link, so the kernel takes it. An error: the link has ended.
                        let _ = send(socket.as_raw_fd(), &word, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
                    }
                    // Without it the kernel would reset a connection of which something is unread, and a reset does not tell
                    // the store that nothing runs here. An error: it has no peer any more.
                    let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
                }
            }
            Release::Quietly => self.0.clear(),
            Release::Older => drop(self.0.drain(..self.0.len().saturating_sub(1))),
            Release::Newest => drop(self.0.pop()),
        }
    }

    /// What is held, the newest last.
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
