//! Forwards connections of workers from the port of the agents' store to the workers' store.
//!
//! Scripts may set `MASTER_ADDR` and `MASTER_PORT` to the rendezvous endpoint, because torch's launcher serves agents
//! and workers from a single store at this endpoint. The agents' store recognises clients of torch's `TCPStore` by
//! their first bytes, and forwards their connections to the workers' store of the current round. The agent that hosts
//! the agents' store notifies the store of the address of the workers' store. A store without an agent reads the
//! address from a key, see `Hub::announced`.
//!
//! - **RELAY-1** a connection is forwarded only to the store of the current round, so no worker sees the keys of
//!   another round;
//! - **RELAY-2** a connection is forwarded only if it comes from this machine or from the address of a client that has
//!   a session. Therefore, a store with a token does not serve machines that do not know the token;
//! - **RELAY-3** the bytes are copied on the thread of the workers' stores, so that the copying does not delay the
//!   agents;
//! - **RELAY-4** in a job with only one node, only descendants of its agent are served, because a worker of another job
//!   on this machine may use the same endpoint.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use elasticrs_runtime::door::{Purpose, share};
use elasticrs_runtime::runtime::HandOver;
use elasticrs_sys::procfs::Stat;
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::session::network::{QUESTION, connect, resolve};

/// Time limit for connecting to the workers' store.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of generations between an agent and a worker.
const MOST_GENERATIONS: usize = 64;
/// Number of the field that contains the parent's pid in `/proc/PID/stat`, see proc(5).
const PARENT: usize = 4;
/// Opcode of the first request that [`crate::session::network::is_tcp_store`] sends after the greeting.
const NUM_KEYS: u8 = 7;
/// Opcode of the first request that torch 2.5 and later versions send after the greeting.
const PING: u8 = 13;
/// First bytes that a client of torch's `TCPStore` sends.
const GREETING: &[u8] = QUESTION.split_at(5).0;

/// Location of the workers' store of the current round.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Target {
    /// Connections of workers are not forwarded.
    #[default]
    Nowhere,
    /// No round is running. Connections of workers wait until a round starts.
    Later,
    At {
        host: String,
        port: u16,
        /// Pid of the agent if it is the only agent of the job. `None` if the job has several agents.
        agent: Option<u32>,
    },
}

/// Forwards connections to the workers' store.
pub(crate) struct Relay {
    pub(super) target: watch::Receiver<Target>,
    /// Function that runs a task on the thread that serves the stores in which workers meet.
    run: HandOver,
    /// Each forwarded connection holds a clone, so the number of references tells how many connections are forwarded.
    forwarded: Arc<()>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("target", &self.target).finish_non_exhaustive()
    }
}

impl Relay {
    pub(super) fn new(target: watch::Receiver<Target>, run: HandOver) -> Self {
        Self { target, run, forwarded: Arc::default() }
    }

    /// Starts forwarding a connection. `begun` contains the bytes that were already read from the connection. Fails if
    /// too many connections are forwarded, or if the thread of the workers' stores cannot be started.
    pub(super) fn pass_on(&self, near: TcpStream, begun: Vec<u8>, host: String, port: u16) -> io::Result<()> {
        let near = near.into_std()?;
        let forwarded = Arc::clone(&self.forwarded);
        // Check the number of forwarded connections here, because each needs a second file descriptor that the listener
        // does not count.
        if Arc::strong_count(&forwarded) - 1 > share(Purpose::Workers) / 3 {
            return Err(io::Error::from_raw_os_error(nix::libc::EMFILE));
        }
        let copy = move || async move {
            // Ignore an error, because it means that one side has closed its connection. Dropping both sockets closes
            // the other connection as well.
            let _ = copy(near, &begun, &host, port).await;
            drop(forwarded);
        };
        if (self.run)(Box::new(move || Box::pin(copy()))) { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    }
}

async fn copy(near: std::net::TcpStream, begun: &[u8], host: &str, port: u16) -> io::Result<()> {
    let mut near = TcpStream::from_std(near)?;
    let find = async {
        let addresses = resolve(host, port).await.ok()?;
        connect(host, &addresses, PATIENCE, drop::<SocketAddr>).await.ok()
    };
    let found = tokio::time::timeout(PATIENCE, find).await?;
    let (mut far, _) = found.ok_or(io::ErrorKind::NotConnected)?;
    far.set_nodelay(true)?;
    far.write_all(begun).await?;
    copy_bidirectional(&mut near, &mut far).await.map(drop)
}

/// Kind of a peer that is not a client of this store, recognised by its first bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// The kind is not known yet, because more bytes are needed.
    Unknown,
    /// A worker and its pid. The pid is `None` before torch 2.5, because older versions do not send it.
    Worker(Option<u32>),
    Stranger,
}

/// Determines from a peer's first bytes which program it is. Our own probe [`crate::session::network::is_tcp_store`]
/// sends the greeting of torch's clients, too, but asks for the number of keys at once, which they never do. It counts
/// as [`Caller::Stranger`].
pub(super) fn recognise(bytes: &[u8]) -> Caller {
    let known = bytes.len().min(GREETING.len());
    match bytes[known..] {
        _ if bytes[..known] != GREETING[..known] => Caller::Stranger,
        [NUM_KEYS, ..] => Caller::Stranger,
        [PING, a, b, c, d, ..] => Caller::Worker(Some(u32::from_le_bytes([a, b, c, d]))),
        [] | [PING, ..] => Caller::Unknown,
        [..] => Caller::Worker(None),
    }
}

/// Returns true if the process `pid` is `ancestor` or a descendant of `ancestor`.
pub(super) fn descends(pid: u32, ancestor: u32) -> bool {
    let mut at = Some(pid.cast_signed());
    for _ in 0..MOST_GENERATIONS {
        match at {
            Some(pid) if pid == ancestor.cast_signed() => return true,
            Some(pid) if pid > 1 => at = Stat::of(pid).and_then(|stat| stat.field(PARENT)),
            Some(_) | None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_recognised_by_its_greeting_and_first_request() {
        let worker = [0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4];
        for length in 0..10 {
            assert_eq!(recognise(&worker[..length]), Caller::Unknown);
        }
        assert_eq!(recognise(&worker), Caller::Worker(Some(0x0403_0201)));
        // The first request of a client of torch 2.4 contains no process id.
        assert_eq!(recognise(&[0, 0xce, 0xf7, 0x85, 0x3c, 4]), Caller::Worker(None));
        assert_eq!(recognise(&QUESTION), Caller::Stranger);
        assert_eq!(recognise(b"GET / HTTP/1.1"), Caller::Stranger);
        assert_eq!(recognise(&[0, 1]), Caller::Stranger);
    }

    #[test]
    fn only_descendants_of_the_agent_are_its_workers() {
        let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
        assert!(descends(own, own) && descends(own, parent) && !descends(parent, own));
        assert!(!descends(0, own) && !descends(u32::MAX, own));
    }
}
