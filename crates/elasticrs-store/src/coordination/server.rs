//! The server: its handle, and who accepts connections.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use super::connection;
use super::hub::Hub;
use super::listen::{ListenError, listen_on};
use super::notices::Notices;
use super::outbox::Outbox;
use super::types::LostKind;
use crate::door::Door;
use crate::runtime::Spawn;

/// How a server works.
#[derive(Debug, Clone)]
pub struct Config {
    /// The run it serves; `None`: any, and all of them see the same keys.
    pub run_id: Option<String>,
    /// What clients have to know.
    pub token: Option<Vec<u8>>,
    /// Connections beyond are refused.
    pub max_connections: usize,
    /// Bytes of keys, values and history.
    pub max_bytes: usize,
}

/// Connections that a server takes when nobody says how many.
pub const MAX_CONNECTIONS: usize = 16_384;
/// What a server holds when nobody says how much.
pub const MAX_BYTES: usize = 256 << 20;

enum Command {
    StopListening(SyncSender<()>),
    Listen(Vec<TcpListener>, SyncSender<io::Result<()>>),
    Close(SyncSender<()>),
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The kernel refused something else.
    #[error("start the store")]
    Resources(#[from] io::Error),
    /// The thread that was to run it has ended.
    #[error("the runtime has ended")]
    Ended,
}

/// A store that serves. Dropping it closes it.
#[derive(Debug)]
pub struct Server {
    commands: UnboundedSender<Command>,
    notices: Arc<Notices>,
    sessions: Arc<AtomicUsize>,
    addresses: Vec<SocketAddr>,
}

impl Server {
    /// Binds, listens and serves.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn start(runtime: &dyn Spawn, addresses: &[(String, u16)], config: Config) -> Result<Self, ServerError> {
        let listeners = listen_on(addresses)?;
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let notices = Arc::new(Notices::new()?);
        let sessions = Arc::new(AtomicUsize::new(0));
        let (commands, inbox) = unbounded_channel();
        let (hub_notices, hub_sessions) = (Arc::clone(&notices), Arc::clone(&sessions));
        let is_running = runtime.spawn(Box::new(move || {
            let hub = Rc::new(Hub::new(config, hub_notices, hub_sessions));
            Box::pin(run(hub, listeners, inbox))
        }));
        if is_running { Ok(Self { commands, notices, sessions, addresses }) } else { Err(ServerError::Ended) }
    }

    /// Where it listens, or has listened.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// How many clients are connected.
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    /// What there is to tell the user.
    pub fn notices(&self) -> &Notices {
        &self.notices
    }

    /// Closes the listening sockets; connections go on. Blocks until they are closed.
    pub fn stop_listening(&self) {
        self.ask(Command::StopListening);
    }

    /// Listens again, at the same addresses.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn listen_again(&self) -> Result<(), ServerError> {
        let addresses: Vec<_> = self.addresses.iter().map(|at| (at.ip().to_string(), at.port())).collect();
        let both = |at: &SocketAddr| at.ip().is_unspecified() && at.is_ipv6();
        let named = self.addresses.iter().zip(addresses);
        let named: Vec<_> =
            named.map(|(at, (host, port))| if both(at) { (String::new(), port) } else { (host, port) }).collect();
        // Listening twice at one port is an error of the kernel's; what was open is closed first.
        self.stop_listening();
        let listeners = listen_on(&named)?;
        self.ask(|reply| Command::Listen(listeners, reply)).unwrap_or(Err(io::ErrorKind::NotConnected.into()))?;
        Ok(())
    }

    /// Closes everything; blocks until it is closed. Idempotent.
    pub fn close(&self) {
        self.ask(Command::Close);
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Option<T> {
        let (reply, answer) = sync_channel(1);
        // A server that has ended has nothing open.
        self.commands.send(command(reply)).ok()?;
        answer.recv().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let (reply, _) = sync_channel(1);
        // As above.
        let _ = self.commands.send(Command::Close(reply));
    }
}

async fn run(hub: Rc<Hub>, listeners: Vec<TcpListener>, mut inbox: UnboundedReceiver<Command>) {
    let mut keepers = JoinSet::new();
    keepers.spawn_local(Rc::clone(&hub).reap());
    keepers.spawn_local(Rc::clone(&hub).expire());
    let mut accepting = JoinSet::new();
    if let Err(error) = listen(&hub, &mut accepting, listeners) {
        hub.notices.add(format!("the store cannot listen: {error}"));
    }
    let closed = loop {
        match inbox.recv().await {
            Some(Command::StopListening(reply)) => {
                accepting.shutdown().await;
                // Nobody waits for the answer any more: as good as told.
                let _ = reply.send(());
            }
            Some(Command::Listen(listeners, reply)) => {
                let _ = reply.send(listen(&hub, &mut accepting, listeners));
            }
            Some(Command::Close(reply)) => break Some(reply),
            None => break None,
        }
    };
    accepting.shutdown().await;
    // Taken out first: connections that end in here look for their hub.
    let mut tasks = std::mem::take(&mut *hub.tasks.borrow_mut());
    tasks.shutdown().await;
    keepers.shutdown().await;
    if let Some(reply) = closed {
        let _ = reply.send(());
    }
}

fn listen(hub: &Rc<Hub>, accepting: &mut JoinSet<()>, listeners: Vec<TcpListener>) -> io::Result<()> {
    for listener in listeners {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        accepting.spawn_local(accept(Rc::clone(hub), Door::new(listener)));
    }
    Ok(())
}

async fn accept(hub: Rc<Hub>, mut door: Door) {
    let tell = |error| hub.notices.add(format!("the store cannot accept connections: {error}"));
    loop {
        let (stream, peer) = door.accept(tell).await;
        admit(&hub, stream, peer);
    }
}

fn admit(hub: &Rc<Hub>, stream: TcpStream, peer: SocketAddr) {
    let mut tasks = hub.tasks.borrow_mut();
    while tasks.try_join_next().is_some() {}
    let limit = hub.config.max_connections;
    if tasks.len() < limit {
        tasks.spawn_local(connection::serve(Rc::clone(hub), stream, peer));
        return;
    }
    let said = format!("the store has its {limit} connections");
    hub.notices.add(format!("refused {peer}: {said}"));
    let outbox = Outbox::default();
    outbox.refuse(LostKind::Limit, said);
    // A socket that is new takes so little at once; one that does not is closed without a word.
    if outbox.flush(&stream).is_ok() {
        let _ = shutdown(stream.as_raw_fd(), Shutdown::Write);
    }
}
