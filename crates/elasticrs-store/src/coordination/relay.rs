//! Connects workers that look for their store at the port of the agents' store.
//!
//! Scripts may set `MASTER_ADDR` and `MASTER_PORT` to the endpoint of the rendezvous, because one store serves agents and
//! workers there with torch's launcher. The store recognises the clients of torch's `TCPStore` by their first bytes, and
//! passes on what they exchange with the workers' store of the current round.
//!
//! - **RELAY-1** a connection is passed on only to the store of the current round, so no worker sees the keys of another
//!   round;
//! - **RELAY-2** a connection is passed on only if it comes from this machine or from the address of a client that has a
//!   session, so a store with a token serves no machine that does not know the token;
//! - **RELAY-4** in a job of one node, only descendants of its agent are served, because the worker of another job on
//!   this machine may have been given the same endpoint;
//! - **RELAY-3** the bytes are copied on the thread of the workers' stores, so they do not delay the agents.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use elasticrs_runtime::door::{Purpose, share};
use elasticrs_runtime::runtime::Task;
use elasticrs_runtime::stream;
use elasticrs_sys::stat::Stat;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::probe::QUESTION;
use crate::session::network::{connect, resolve};

/// Time limit for the connection to the workers' store.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of generations between an agent and a worker.
const MOST_GENERATIONS: usize = 64;
/// Number of the field of a process's parent in proc(5).
const PARENT: usize = 4;
/// Opcodes of the request with which [`super::probe`] goes on after the greeting, and of the one with which torch does.
const NUM_KEYS: u8 = 7;
const PING: u8 = 13;
/// First bytes of a client of torch's `TCPStore`.
const GREETING: &[u8] = QUESTION.split_at(5).0;

/// The workers' store of the current round.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Target {
    /// This store has no workers.
    #[default]
    Nowhere,
    /// No round is running, but one may start.
    Later,
    At {
        host: String,
        port: u16,
        /// Pid of the agent whose workers are the only ones of the job. `None` if other agents have workers, too.
        agent: Option<u32>,
    },
}

/// Function that runs a task on the thread of the workers' stores. Returns `false` if the thread cannot be started.
pub type OnWorkersThread = Box<dyn Fn(Task) -> bool + Send>;

/// Passes connections on to the workers' store.
pub struct Relay {
    pub(super) target: watch::Receiver<Target>,
    run: OnWorkersThread,
    /// Number of connections that are passed on at present.
    count: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("target", &self.target).field("count", &self.count).finish_non_exhaustive()
    }
}

impl Relay {
    pub(super) fn new(target: watch::Receiver<Target>, run: OnWorkersThread) -> Self {
        Self { target, run, count: Arc::default() }
    }

    /// Starts to pass a connection on. `begun` contains the bytes that were already read from it. Fails if too many
    /// connections are passed on, or if the thread cannot be started.
    pub(super) fn pass_on(&self, near: TcpStream, begun: Vec<u8>, host: String, port: u16) -> io::Result<()> {
        let near = near.into_std()?;
        let count = Counted::new(&self.count);
        // Each connection that is passed on takes a second descriptor, which the listener does not know of.
        if self.count.load(Ordering::Relaxed) > share(Purpose::Workers) / 3 {
            return Err(io::Error::from_raw_os_error(nix::libc::EMFILE));
        }
        let copy = move || async move {
            let _count = count;
            // An error means that one side has closed the connection. Dropping both tells the other side.
            let _ = copy(near, &begun, &host, port).await;
        };
        if (self.run)(Box::new(move || Box::pin(copy()))) { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    }
}

/// Counts a connection until it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
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
    stream::write_all(&far, begun).await?;
    copy_bidirectional(&mut near, &mut far).await.map(drop)
}

/// What the first bytes of a connection say about a peer that is no client of this store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// More bytes are needed.
    Unknown,
    /// A worker. Its pid is known since torch 2.5.
    Worker(Option<u32>),
    Stranger,
}

/// Recognises a client of torch's `TCPStore`. The probe of [`super::probe`] is none, although it begins in the same way.
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

/// Returns true if the process is `ancestor` or a descendant of it.
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
        // A client of torch 2.4 begins with another request.
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
