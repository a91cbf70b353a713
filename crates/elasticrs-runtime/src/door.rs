//! Where connections come in: never so many that the process has no descriptor left for its own work.
//!
//! A store lives in an agent that has workers to watch and to start again. What strangers, or a very large job, may take of
//! the descriptors ends before the agent's own share, and that of those who ask for the agent's health; connections beyond
//! it wait in the kernel's queue.
//!
//! - **DOOR-1** an error of `accept` ends nothing: it is told now and then, and tried again.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use tokio::net::TcpStream;

use crate::notices::Notices;

/// When no descriptor is left, the next look is so much later.
const PAUSE: Duration = Duration::from_millis(100);
/// It is told so often at most.
const SILENCE: Duration = Duration::from_secs(10);

/// What connections are for: each kind leaves those above it their descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Health,
    Store,
}

/// A listener that leaves the rest of the process its share of descriptors.
#[derive(Debug)]
pub struct Door {
    listener: tokio::net::TcpListener,
    purpose: Purpose,
    /// Accepted beyond our share: it waits here, and those after it in the kernel's queue.
    held: Option<(TcpStream, SocketAddr)>,
    told: Option<Instant>,
}

impl Door {
    /// On the thread that runs the store.
    pub fn new(listener: std::net::TcpListener, purpose: Purpose) -> io::Result<Self> {
        Ok(Self { listener: tokio::net::TcpListener::from_std(listener)?, purpose, held: None, told: None })
    }

    /// The next connection, and its peer as users write it: IPv4 is no part of IPv6. Nothing is lost when this future is
    /// dropped. `notices` hears now and then that connections to `store` have to wait.
    pub async fn accept(&mut self, notices: &Notices, store: &str) -> (TcpStream, SocketAddr) {
        loop {
            match self.next().await {
                Ok((stream, peer)) => return (stream, SocketAddr::new(peer.ip().to_canonical(), peer.port())),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    if self.told.is_none_or(|told| told.elapsed() >= SILENCE) {
                        self.told = Some(Instant::now());
                        notices.say(format!("{store} cannot accept connections: {error}"));
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn next(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        let accepted = match self.held.take() {
            Some(accepted) => accepted,
            None => self.listener.accept().await?,
        };
        if is_within_share(accepted.0.as_fd(), self.purpose) {
            return Ok(accepted);
        }
        self.held = Some(accepted);
        Err(io::Error::from_raw_os_error(nix::libc::EMFILE))
    }
}

/// Whether this descriptor, or the lowest that is free by now, is below what is kept for the process.
fn is_within_share(fd: BorrowedFd<'_>, purpose: Purpose) -> bool {
    let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return true };
    let below = soft.saturating_sub(kept(soft, purpose));
    let is_below = |number: RawFd| u64::try_from(number).is_ok_and(|number| number < below);
    is_below(fd.as_raw_fd()) || fd.try_clone_to_owned().is_ok_and(|lowest| is_below(lowest.as_raw_fd()))
}

/// Descriptors that are not for such connections.
fn kept(soft: u64, purpose: Purpose) -> u64 {
    // Enough to watch, end and start the workers of a node.
    let own = (soft / 8).clamp(16, 64);
    match purpose {
        Purpose::Health => own,
        // Requests for the health are short. Beside them, each full store holds one connection that has to wait.
        Purpose::Store => own + (soft / 16).clamp(8, 64),
    }
}

/// Errors that `accept` reports for a connection that has gone already.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_descriptors_are_never_for_connections() {
        let limits = [64, 256, 1024, 1 << 20];
        assert_eq!(limits.map(|soft| kept(soft, Purpose::Health)), [16, 32, 64, 64]);
        assert_eq!(limits.map(|soft| kept(soft, Purpose::Store)), [24, 48, 128, 128]);
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_within_share(socket.as_fd(), Purpose::Store));
    }
}
