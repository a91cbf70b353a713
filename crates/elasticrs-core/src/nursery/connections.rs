//! The sockets that keep an agent's session with its store: one, and two while the session moves to the second.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{Shutdown, shutdown};
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

/// Sockets that are held, the newest last.
#[derive(Debug, Default)]
pub struct Connections(Vec<OwnedFd>);

impl Connections {
    /// Holds this one beside the others, or in place of them.
    pub fn hold(&mut self, socket: OwnedFd, beside: bool) {
        if !beside {
            self.0.clear();
        }
        self.0.push(socket);
    }

    /// Holds these no longer.
    pub fn release(&mut self, which: Release) {
        match which {
            Release::All => {
                for socket in self.0.drain(..) {
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
    pub fn all(&self) -> &[OwnedFd] {
        &self.0
    }
}
