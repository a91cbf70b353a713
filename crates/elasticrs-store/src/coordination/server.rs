//! The server: its handle, and the tasks that accept connections.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

use elasticrs_runtime::door::{Door, Purpose, share};
use elasticrs_runtime::listen::{ListenError, listen_at_all};
use elasticrs_runtime::notices::{Notices, Tell};
use elasticrs_runtime::runtime::{HandOver, Spawn};
use elasticrs_runtime::threads::ask;
use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};

use super::connection;
use super::durable::{StateError, StateFile};
pub use super::hub::{Config, Durable, MAX_BYTES, MAX_CONNECTIONS, REQUEST_TIMEOUT};
use super::hub::{Hub, Slot};
use super::outbox::Outbox;
use super::relay::{Relay, Target};
use super::state::entry_limit;
use crate::secrets;
use crate::types::LostKind;

pub(super) enum Command {
    StopListening(SyncSender<()>),
    Listen(Vec<TcpListener>, SyncSender<io::Result<()>>),
    Close(SyncSender<()>),
}

/// Reason why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("start the store")]
    Resources(#[from] io::Error),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the runtime has stopped")]
    Stopped,
}

/// A running store. Dropping it closes the store.
#[derive(Debug)]
pub struct Server {
    commands: UnboundedSender<Command>,
    sessions: Arc<AtomicUsize>,
    target: watch::Sender<Target>,
    /// Addresses on which the server listens, in the form that [`listen_at_all`] takes.
    addresses: Vec<(String, u16)>,
}

impl Server {
    /// Listens on the named addresses and starts the server. The server calls `tell` with a message for the user when
    /// it refuses a client, or when a program with another protocol connects. The server calls `on_workers_thread` to
    /// forward the connections of workers on another thread, see [`Self::lead_workers`].
    pub fn start(
        runtime: &dyn Spawn,
        named: &[(String, u16)],
        config: Config,
        on_workers_thread: HandOver,
        tell: Tell,
    ) -> Result<Self, ServerError> {
        let listeners = listen_at_all(named)?;
        let addresses = named.iter().zip(&listeners).map(|((host, _), listener)| {
            let at = listener.local_addr()?;
            // Keep the address instead of the name, because the name may later resolve to a different address.
            let host = if host.is_empty() { String::new() } else { at.ip().to_string() };
            Ok((host, at.port()))
        });
        let addresses = addresses.collect::<io::Result<_>>()?;
        let sessions = Arc::new(AtomicUsize::new(0));
        let (commands, inbox) = unbounded_channel();
        let counted = Arc::clone(&sessions);
        let id = secrets::random()?;
        let open =
            |state: &Durable| StateFile::open(&state.file, config.run_id.as_deref(), id, entry_limit(config.max_bytes));
        let kept = config.state.as_ref().map(open).transpose()?;
        let (target, targets) = watch::channel(Target::default());
        let is_running = runtime.spawn(Box::new(move || {
            let relay = Relay::new(targets, on_workers_thread);
            let hub = Hub::new(config, vec![id], Notices::new(tell), counted, relay);
            let hub = match kept {
                Some((file, image)) => hub.going_on_with(file, image),
                None => hub,
            };
            Box::pin(run(Rc::new(hub), listeners, inbox))
        }));
        if is_running { Ok(Self { commands, sessions, target, addresses }) } else { Err(ServerError::Stopped) }
    }

    /// Returns the port of the first address, even while the server is not listening on it.
    pub fn port(&self) -> u16 {
        self.addresses[0].1
    }

    /// Returns the number of clients that have a session.
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Sets the workers' store to which the server forwards the connections of workers.
    pub fn lead_workers(&self, target: Target) {
        self.target.send_replace(target);
    }

    /// Returns true if the server has stopped, because it was closed, its thread has exited, or one of its tasks has
    /// failed.
    pub fn has_ended(&self) -> bool {
        self.commands.is_closed()
    }

    /// Closes the listening sockets and blocks until they are closed. Open connections are not affected.
    pub fn stop_listening(&self) {
        // Ignore an error, which means that the server has already stopped and has closed these sockets.
        ask(&self.commands, Command::StopListening);
    }

    /// Closes the listening sockets and opens new ones on the same addresses.
    pub fn listen_again(&self) -> Result<(), ServerError> {
        // Close the old sockets first, because they still occupy the ports.
        self.stop_listening();
        let listeners = listen_at_all(&self.addresses)?;
        ask(&self.commands, |reply| Command::Listen(listeners, reply))
            .unwrap_or(Err(io::ErrorKind::NotConnected.into()))?;
        Ok(())
    }

    /// Closes the server and all its connections, and blocks until they are closed. Idempotent.
    pub fn close(&self) {
        ask(&self.commands, Command::Close);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let (reply, _) = sync_channel(1);
        // Close the server as `close` does, but do not wait.
        let _ = self.commands.send(Command::Close(reply));
    }
}

/// Runs the server until its handle is dropped or one of its essential tasks fails.
pub(super) async fn run(hub: Rc<Hub>, listeners: Vec<TcpListener>, mut inbox: UnboundedReceiver<Command>) {
    let mut keepers = JoinSet::new();
    keepers.spawn_local(Rc::clone(&hub).reap());
    keepers.spawn_local(Rc::clone(&hub).expire());
    keepers.spawn_local(Rc::clone(&hub).trim());
    let mut saving = JoinSet::new();
    saving.spawn_local(Rc::clone(&hub).save());
    let mut accepting = JoinSet::new();
    if let Err(error) = listen(&hub, &mut accepting, listeners) {
        hub.notices.say(format!("the store cannot listen: {error}"));
    }
    let closed = loop {
        let command = tokio::select! {
            biased;
            command = inbox.recv() => command,
            // These tasks finish only after a panic or a disk error. Stop the store in that case, because it could no
            // longer save changes, expire sessions or accept connections.
            Some(ended) = keepers.join_next() => break tell_end(&hub, &mut inbox, ended.err()),
            Some(ended) = accepting.join_next() => break tell_end(&hub, &mut inbox, ended.err()),
            Some(ended) = saving.join_next() => {
                let error = ended.map_or_else(|panic| panic.to_string(), |error| error.to_string());
                break tell_end(&hub, &mut inbox, Some(error));
            }
        };
        match command {
            Some(Command::StopListening(reply)) => {
                accepting.shutdown().await;
                // Sending fails only if the caller is no longer waiting for the reply.
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
    if closed.is_some() && hub.journal.is_none() {
        hub.say_farewell();
        // Yield once, so that each connection's task can send the message that the store was closed. A client that does
        // not receive the message waits until its lease expires.
        yield_now().await;
    }
    // Stop these tasks before the connections. Otherwise, these tasks would end the sessions of the closed
    // connections.
    keepers.shutdown().await;
    saving.shutdown().await;
    if closed.is_some() {
        hub.finish();
    }
    // Move the tasks out of the hub before dropping them, because dropping a connection accesses the hub.
    let mut tasks = std::mem::take(&mut *hub.tasks.borrow_mut());
    tasks.shutdown().await;
    if let Some(reply) = closed {
        let _ = reply.send(());
    }
}

/// Closes the command channel, so that [`Server::has_ended`] returns true. Also reports the error, if any, to the user.
fn tell_end(
    hub: &Hub,
    inbox: &mut UnboundedReceiver<Command>,
    error: Option<impl std::fmt::Display>,
) -> Option<SyncSender<()>> {
    inbox.close();
    if let Some(error) = error {
        hub.notices.say(format!("the store has ended, and all its connections: {error}"));
    }
    None
}

fn listen(hub: &Rc<Hub>, accepting: &mut JoinSet<()>, listeners: Vec<TcpListener>) -> io::Result<()> {
    for listener in listeners {
        accepting.spawn_local(accept(Rc::clone(hub), Door::new(listener, Purpose::Store)?));
    }
    Ok(())
}

async fn accept(hub: Rc<Hub>, mut door: Door) {
    loop {
        hub.make_room(share(Purpose::Store)).await;
        let (stream, peer) = door.accept(&hub.notices, "the store").await;
        admit(&hub, stream, peer);
    }
}

fn admit(hub: &Rc<Hub>, stream: TcpStream, peer: SocketAddr) {
    let mut tasks = hub.tasks.borrow_mut();
    while let Some(ended) = tasks.try_join_next() {
        // Do not report a cancelled task, because the server cancels connections to make room for others.
        if let Err(error) = ended
            && !error.is_cancelled()
        {
            hub.notices.say(format!("the store has lost a connection: {error}"));
        }
    }
    if hub.has_room() {
        // Create the outbox here instead of in the task, because its memory must be counted before the next connection
        // is accepted.
        let outbox = Rc::new(Outbox::new(&hub.held, peer));
        let number = hub.unproven.borrow_mut().number();
        let slot = Slot::new(hub, number);
        let task = tasks.spawn_local(connection::serve(Rc::clone(hub), stream, outbox, slot));
        hub.unproven.borrow_mut().add(number, task, peer.ip(), Instant::now());
        return;
    }
    let said = String::from("the store is full");
    hub.notices.say(format!("refused {peer}: {said}"));
    let outbox = Outbox::new(&hub.held, peer);
    outbox.refuse(LostKind::Limit, said);
    // The send buffer of a new socket is empty, so it has room for the short refusal message. If sending fails anyway,
    // close the socket without the message.
    if outbox.flush(&stream, u64::MAX).is_ok() {
        let _ = shutdown(stream.as_raw_fd(), Shutdown::Write);
    }
}
