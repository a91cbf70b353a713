//! Serves the store over sockets, with one task that accepts connections and one task per connection, all on one
//! thread.
//!
//! Only a connection's own task uses its socket. When a request ends the wait of another connection, the task appends a
//! byte to the output of that connection and wakes the other task. No task waits for a peer. If a peer does not accept
//! its output, the store stops reading from the connection, and eventually closes the connection.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::task::Waker;
use std::time::Duration;
use std::{fmt, io};

use elasticrs_runtime::door::{Door, Purpose};
use elasticrs_runtime::notices::Notices;
use elasticrs_runtime::readiness::register;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinSet};

use super::connection::{CHUNK, Connection};
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

/// A message to the task that runs the store.
pub(super) enum Question {
    Waiting(SyncSender<BTreeMap<String, Vec<String>>>),
    Close(SyncSender<()>),
}

/// Waits for the first client. Until then, the store needs no thread of its own. Returns `None` if the store is
/// closed before a client connects.
pub(super) async fn first_client(
    listener: std::net::TcpListener,
    mut questions: UnboundedReceiver<Question>,
) -> Option<(std::net::TcpListener, UnboundedReceiver<Question>)> {
    let listener = Arc::new(OwnedFd::from(listener));
    // If `register` fails, return the listener at once, because the server will fail as well and report the error.
    if let Ok(watched) = register(Arc::clone(&listener), Interest::READABLE) {
        loop {
            let question = tokio::select! {
                biased;
                question = questions.recv() => question?,
                _ = watched.readable() => break,
            };
            // Ignore send errors, because the caller may no longer be waiting.
            match question {
                Question::Waiting(reply) => drop(reply.send(BTreeMap::new())),
                Question::Close(reply) => {
                    drop((watched, listener));
                    let _ = reply.send(());
                    return None;
                }
            }
        }
    }
    Some((Arc::into_inner(listener)?.into(), questions))
}

/// Runs a store until it is closed or its handle is dropped.
pub(super) async fn run(
    listener: std::net::TcpListener,
    limits: Limits,
    notices: Notices,
    mut questions: UnboundedReceiver<Question>,
) {
    let notices = Rc::new(notices);
    let hub = Rc::new(RefCell::new(Hub {
        map: Map::new(limits.bytes),
        peers: HashMap::new(),
        scratch: vec![0; CHUNK],
        limits,
        notices: Rc::clone(&notices),
    }));
    let mut connections = JoinSet::new();
    let closed = match Door::new(listener, Purpose::Workers) {
        Ok(mut door) => serve(&mut door, &hub, &mut connections, &mut questions).await,
        Err(error) => {
            notices.say(format!("the workers' store cannot be served: {error}"));
            None
        }
    };
    connections.shutdown().await;
    if let Some(reply) = closed {
        // Ignore send errors, because the caller may no longer be waiting.
        let _ = reply.send(());
    }
}

/// Serves clients until a request to close the store arrives. Returns the request's reply channel. The caller must send
/// the reply after it has closed all connections.
///
/// Returns `None` if the store's handle was dropped.
async fn serve(
    door: &mut Door,
    hub: &Rc<RefCell<Hub>>,
    connections: &mut JoinSet<()>,
    questions: &mut UnboundedReceiver<Question>,
) -> Option<SyncSender<()>> {
    let notices = Rc::clone(&hub.borrow().notices);
    let mut ids = 0..;
    loop {
        tokio::select! {
            biased;
            question = questions.recv() => match question {
                // Ignore send errors, because the caller may no longer be waiting.
                Some(Question::Waiting(reply)) => { let _ = reply.send(hub.borrow().waiting()); }
                Some(Question::Close(reply)) => return Some(reply),
                None => return None,
            },
            Some(ended) = connections.join_next() => tell_panic(&notices, ended),
            (stream, address) = door.accept(&notices, "the workers' store") => {
                admit(hub, connections, ids.next().expect("endless"), stream, address);
            }
        }
    }
}

fn admit(hub: &Rc<RefCell<Hub>>, connections: &mut JoinSet<()>, id: Id, stream: TcpStream, address: SocketAddr) {
    let peer = Rc::new(Peer { address, pid: None.into(), out: RefCell::default(), waker: RefCell::default() });
    hub.borrow_mut().peers.insert(id, Rc::clone(&peer));
    let hub = Rc::clone(hub);
    connections.spawn_local(async move {
        let mut connection = Connection::new(id, stream, Rc::clone(&peer), Rc::clone(&hub));
        // Report the reason before closing the socket, so that the notice to the user exists before the client sees the
        // connection close.
        if let Err(reason) = connection.serve().await {
            let notices = Rc::clone(&hub.borrow().notices);
            notices.say(format!("the workers' store has closed the connection from {peer}: {reason}"));
        }
    });
}

fn tell_panic(notices: &Notices, ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        notices.say(format!("the workers' store has lost a connection: {error}"));
    }
}
