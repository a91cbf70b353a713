//! The store on sockets: a task that accepts, and one for each connection, all on one thread.
//!
//! A connection's task alone touches its socket. What it has to say to another connection (a wait is over) it appends to
//! that one's output, and wakes its task. Nothing here waits for a peer: a connection whose output is not taken is not read
//! from, and is closed when that lasts too long.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use elasticrs_core::sys::readiness::register;
use elasticrs_runtime::door::{Door, Purpose};
use elasticrs_runtime::notices::Notices;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinSet};

use super::connection::{CHUNK, Connection};
use super::hub::{Hub, Limits, Peer};
use super::map::{Id, Map};

/// What the thread of the store is asked.
pub(super) enum Question {
    Waiting(SyncSender<BTreeMap<String, Vec<String>>>),
    Close(SyncSender<()>),
}

/// Waits until somebody connects, so that a store that nobody uses needs no thread; `None`: it was closed before.
pub(super) async fn first_client(
    listener: std::net::TcpListener,
    mut questions: UnboundedReceiver<Question>,
) -> Option<(std::net::TcpListener, UnboundedReceiver<Question>)> {
    let listener = Arc::new(OwnedFd::from(listener));
    // Without a watch it is handed over at once; whoever serves it finds out what is wrong, and says so.
    if let Ok(watched) = register(Arc::clone(&listener), Interest::READABLE) {
        loop {
            let question = tokio::select! {
                biased;
                question = questions.recv() => question?,
                _ = watched.readable() => break,
            };
            // Whoever has asked may have given up since.
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

/// The task of a store: ends when it is told to, or when the handle is gone.
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
    let closed = match Door::new(listener, Purpose::Store) {
        Ok(mut door) => serve(&mut door, &hub, &mut connections, &mut questions).await,
        Err(error) => {
            notices.say(format!("the workers' store cannot be served: {error}"));
            None
        }
    };
    connections.shutdown().await;
    if let Some(reply) = closed {
        // Whoever asked may have given up since.
        let _ = reply.send(());
    }
}

/// Ends with whom to tell that everything is closed.
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
                // Whoever has asked may have given up since.
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
        // Said before the socket is closed: who sees it closed can know why.
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
