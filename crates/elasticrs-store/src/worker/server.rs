//! Serves the store over sockets, with one task that accepts connections and one task per connection, all on one
//! thread.
//!
//! Only a connection's own task uses its socket. When a request ends the wait of another connection, the task appends a
//! byte to the output of that connection and wakes the other task. No task waits for a peer. If a peer does not accept
//! its output, the store stops reading from the connection, and eventually closes the connection.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use elasticrs_runtime::door::{Door, Purpose};
use elasticrs_runtime::notices::Notices;
use elasticrs_runtime::readiness::register;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinSet};

use super::connection::{CHUNK, Connection};
use super::hub::{Hub, Limits, Peer};
use super::map::{Id, Map};

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
