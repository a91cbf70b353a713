//! State that the tasks of a store share.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use elasticrs_runtime::notices::Notices;

use super::map::{Id, Map, Refused};
use super::wire::WireError;

/// Maximum number of clients in a report of waiting clients.
const TOLD_WAITERS: usize = 256;
const TOLD_KEYS: usize = 16;

/// Limits for the clients of the store.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum number of bytes for all stored values, requests and replies together.
    pub bytes: usize,
    /// Time limit for a peer to identify itself as a client of the store. After that, the store closes the
    /// connection.
    pub greeting: Duration,
    /// Time limit for a client to accept further bytes of a reply. After that, the store closes the connection.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 1 << 30, greeting: Duration::from_secs(5), stall: Duration::from_secs(60) }
    }
}

/// Reason why the store closed a connection.
#[derive(Debug, thiserror::Error)]
pub enum Closed {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("it did not show within {} s that it is a client", .0.as_secs_f32())]
    Silent(Duration),
    #[error("it ended within a request")]
    Truncated,
    #[error("it did not take its replies for {} s", .0.as_secs_f32())]
    Stalled(Duration),
    /// The connection was reset or timed out.
    #[error("{0}")]
    Socket(#[from] io::Error),
}

/// State shared by all tasks of a store. No task holds a borrow of it across an `await`.
pub(super) struct Hub {
    pub(super) map: Map,
    pub(super) peers: HashMap<Id, Rc<Peer>>,
    /// Read buffer that all connections share, so that idle connections need no buffer.
    pub(super) scratch: Vec<u8>,
    pub(super) limits: Limits,
    pub(super) notices: Rc<Notices>,
}

/// The part of a connection that the tasks of other connections can access.
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    /// Pid of the client. Only clients of torch 2.5 and later send it.
    pub(super) pid: Cell<Option<u32>>,
    pub(super) out: RefCell<Vec<u8>>,
    pub(super) waker: RefCell<Option<Waker>>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        self.pid.get().map_or(Ok(()), |pid| write!(f, " (pid {pid})"))
    }
}

impl Hub {
    pub(super) fn waiting(&self) -> BTreeMap<String, Vec<String>> {
        let waiters = self.map.waiters(TOLD_KEYS);
        let more = waiters.len().saturating_sub(TOLD_WAITERS);
        let mut told: BTreeMap<_, _> = waiters
            .into_iter()
            .take(TOLD_WAITERS)
            .filter_map(|(id, keys)| Some((self.peers.get(&id)?.to_string(), keys.into_iter().map(clip).collect())))
            .collect();
        if more > 0 {
            told.insert(format!("and {more} more"), Vec::new());
        }
        told
    }
}

fn clip(key: &[u8]) -> String {
    String::from_utf8_lossy(&key[..key.len().min(200)]).into_owned()
}
