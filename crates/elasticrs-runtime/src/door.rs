//! Accepts connections of clients, but leaves enough file descriptors for the rest of the process. Also has a function
//! that closes a connection without losing the last bytes sent.
//!
//! A store runs in an agent, which must also watch and restart workers. Connections to the store may use only a part of
//! the descriptors, even if there are many unknown clients or the job is very large. The rest is reserved for the agent
//! itself and for health requests. Further connections wait in the kernel's queue.
//!
//! - **DOOR-1** An error of `accept` does not stop the listener. `accept` is retried, and repeated errors are reported
//!   only at intervals.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{Shutdown, shutdown};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;

use crate::notices::{Notices, Rate};

/// Delay before the next attempt to accept a connection after an error.
const PAUSE: Duration = Duration::from_millis(100);
/// Minimum time between two error notices to the user.
const SILENCE: Duration = Duration::from_secs(10);

/// Kind of server that uses a listener. The kind determines how many file descriptors the server leaves free for the
/// rest of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Health,
    /// The store of the agents.
    Store,
    /// The store of the workers. It leaves file descriptors free for the agents, because any program that can reach its
    /// port can connect.
    Workers,
}

/// A listener that stops accepting connections before they use up the process's descriptors.
#[derive(Debug)]
pub struct Door {
    listener: tokio::net::TcpListener,
    purpose: Purpose,
    /// A connection that was accepted when this listener had already used up its share of descriptors. It is held
    /// here until descriptors are free. Later connections wait in the kernel's queue.
    held: Option<(TcpStream, SocketAddr)>,
    reports: Rate,
}

impl Door {
    /// Creates a listener. Must be called on the thread that will accept its connections.
    pub fn new(listener: std::net::TcpListener, purpose: Purpose) -> io::Result<Self> {
        Ok(Self {
            listener: tokio::net::TcpListener::from_std(listener)?,
            purpose,
            held: None,
            reports: Rate::new(1, SILENCE),
        })
    }

    /// Accepts the next connection. Returns the stream and the peer's address, with IPv4-mapped addresses in IPv4 form.
    /// Cancel-safe. While no connection can be accepted, reports the error to `notices` at intervals. `store` is the
    /// name of the server in these reports.
    pub async fn accept(&mut self, notices: &Notices, store: &str) -> (TcpStream, SocketAddr) {
        loop {
            match self.next().await {
                Ok((stream, peer)) => return (stream, SocketAddr::new(peer.ip().to_canonical(), peer.port())),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    if self.reports.admit(Instant::now()).is_some() {
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

/// Returns the number of open file descriptors at which a server of this kind stops accepting connections.
pub fn share(purpose: Purpose) -> usize {
    let soft = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    usize::try_from(soft.saturating_sub(kept(soft, purpose))).unwrap_or(usize::MAX)
}

/// Returns true if this kind of server may keep the connection `fd`: the number of `fd`, or the lowest free descriptor
/// number, is below the server's limit.
///
/// The lowest free number also counts, because descriptors may have been closed since `fd` was opened.
fn is_within_share(fd: BorrowedFd<'_>, purpose: Purpose) -> bool {
    let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return true };
    let below = soft.saturating_sub(kept(soft, purpose));
    let is_below = |number: RawFd| u64::try_from(number).is_ok_and(|number| number < below);
    is_below(fd.as_raw_fd()) || fd.try_clone_to_owned().is_ok_and(|lowest| is_below(lowest.as_raw_fd()))
}

/// Returns the number of file descriptors that a server of this kind must leave free for the rest of the process.
fn kept(soft: u64, purpose: Purpose) -> u64 {
    // An agent needs at most this number of descriptors to start, watch and stop the workers of a node.
    let own = (soft / 8).clamp(16, 64);
    match purpose {
        Purpose::Health => own,
        // Also reserve descriptors for health requests and for one connection per store. A store that has used up its
        // descriptors accepts one more connection and holds it until descriptors are free.
        Purpose::Store => own + (soft / 16).clamp(8, 64),
        Purpose::Workers => kept(soft, Purpose::Store) + (soft / 8).clamp(8, 1024),
    }
}

/// Shuts down the sending side, then reads and discards up to `most` bytes until the peer closes the connection.
/// Without this, closing a socket that has unread bytes would reset the connection, and the peer could lose the
/// last bytes sent to it.
pub async fn part(stream: &mut (impl AsyncRead + AsRawFd + Unpin), most: usize) -> io::Result<()> {
    shutdown(stream.as_raw_fd(), Shutdown::Write)?;
    let mut block = vec![0; 4096];
    let mut left = most;
    while left > 0 {
        match stream.read(&mut block).await? {
            0 => break,
            count => left = left.saturating_sub(count),
        }
        // Let other tasks of the thread run after each read, because the peer may never stop sending. The caller's
        // timeout can pass only while other tasks run.
        yield_now().await;
    }
    Ok(())
}

/// Returns true if this error concerns only one connection, for example because the peer closed it before it was
/// accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_file_descriptors_are_never_used_for_connections() {
        let limits = [64, 256, 1024, 1 << 20];
        assert_eq!(limits.map(|soft| kept(soft, Purpose::Health)), [16, 32, 64, 64]);
        assert_eq!(limits.map(|soft| kept(soft, Purpose::Store)), [24, 48, 128, 128]);
        assert_eq!(limits.map(|soft| kept(soft, Purpose::Workers)), [32, 80, 256, 1152]);
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_within_share(socket.as_fd(), Purpose::Store));
    }
}
