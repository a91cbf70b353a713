//! The user's handle for a session with a store, and the code that ends a session.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use elasticrs_runtime::runtime::Spawn;
use elasticrs_runtime::threads::ask_within;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::error::{ConnectionEnd, StoreError};
use super::events::{Event, Events};
use crate::types::{LostKind, MAX_REQUEST, Txn, Watch};

/// Time limit for [`Client::close`]. Closing a session takes at most 2 s. The rest is a margin in case the
/// runtime thread is delayed.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Error for a request that cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unsendable {
    #[error("a request of {0} bytes; the store takes {MAX_REQUEST}")]
    TooLarge(usize),
}

/// A request of the user.
#[derive(Debug)]
pub(crate) enum Request {
    Txn { tag: u64, txn: Txn },
    Watch { tag: u64, watch: Watch, snapshot: bool },
    Unwatch(Watch),
}

/// A command that a user of the client sends to the session's task, which is the task that talks to the store.
#[derive(Debug)]
pub(crate) enum Command {
    /// A request, and its encoded form. The latter is empty for etcd, whose session encodes the request later.
    Request(Request, Vec<u8>),
    Close(SyncSender<()>),
}

pub(crate) type Inbox = UnboundedReceiver<Command>;

/// Function that returns the encoded form of a request. It also clears the parts of the request that the session does
/// not need any more once they are encoded. Fails if the request is too large.
type Encode = Box<dyn Fn(&mut Request) -> Result<Vec<u8>, Unsendable> + Send + Sync>;

/// A session with a store. Dropping the client closes the session.
pub struct Client {
    commands: UnboundedSender<Command>,
    encode: Encode,
    events: Arc<Events>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("events", &self.events).finish_non_exhaustive()
    }
}

impl Client {
    /// Starts the session's task. The end of the session is always reported as an event, whatever the cause. `encode`
    /// runs on the thread that makes the request.
    pub(crate) fn start(
        runtime: &dyn Spawn,
        encode: Encode,
        session: impl FnOnce(EndReporter, Inbox) -> Pin<Box<dyn Future<Output = ()>>> + Send + 'static,
    ) -> std::io::Result<Self> {
        let events = Arc::new(Events::new()?);
        let (commands, inbox) = unbounded_channel();
        // If the runtime has stopped, `spawn` drops this value. Its destructor then reports the end of the session.
        let reporter = EndReporter(Arc::clone(&events));
        runtime.spawn(Box::new(move || session(reporter, inbox)));
        Ok(Self { commands, encode, events })
    }

    /// Returns the client's event queue.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Encodes a request and passes it to the session's task. After the end of the session, a request is ignored,
    /// because an event notifies the user of the end.
    fn request(&self, mut request: Request) -> Result<(), Unsendable> {
        let frame = (self.encode)(&mut request)?;
        let _ = self.commands.send(Command::Request(request, frame));
        Ok(())
    }

    /// Sends a transaction. The reply carries the same `tag`.
    pub fn txn(&self, tag: u64, txn: Txn) -> Result<(), Unsendable> {
        self.request(Request::Txn { tag, txn })
    }

    /// Starts a watch. The reply carries the same `tag`.
    pub fn watch(&self, tag: u64, watch: Watch, snapshot: bool) -> Result<(), Unsendable> {
        self.request(Request::Watch { tag, watch, snapshot })
    }

    /// Stops a watch. Changes that the store has already sent are still reported.
    pub fn unwatch(&self, watch: Watch) -> Result<(), Unsendable> {
        self.request(Request::Unwatch(watch))
    }

    /// Ends the session, even if another process holds a duplicate of its socket. With etcd, first finishes the
    /// pending requests. Blocks until the session has ended, or until `CLOSE_LIMIT` elapses. Reports no events
    /// afterwards.
    pub fn close(&self) {
        // Ignore a missing answer. Either the session has already ended, or its task hangs. In the second case, the
        // session ends when its lease expires.
        ask_within(&self.commands, Command::Close, CLOSE_LIMIT);
        self.events.finish();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Close the session as `close` does, but do not wait for its end.
        let _ = self.commands.send(Command::Close(sync_channel(1).0));
    }
}

/// When dropped, reports that the session has ended. The end is reported even if the runtime has stopped or the
/// session's task has panicked.
pub(crate) struct EndReporter(pub(crate) Arc<Events>);

impl Drop for EndReporter {
    fn drop(&mut self) {
        let message = "the runtime of this client has ended".to_owned();
        self.0.push(Event::ConnectionLost { kind: LostKind::Closed, message }, 0);
    }
}

impl ConnectionEnd {
    /// Reports the end of the session: by an event if the session was lost, or to the caller of `close` if the user has
    /// closed it.
    pub(crate) fn report(self, events: &Events, guard: &dyn Guard) {
        match self {
            Self::Broken(StoreError { kind, message }) | Self::Lost(StoreError { kind, message }) => {
                events.push(Event::ConnectionLost { kind, message }, 0);
            }
            Self::Closed(reply) => {
                guard.closed();
                finish(events, reply);
            }
        }
    }
}

/// Finishes the event queue of a session that the user closed, and notifies the caller of `close` if it is waiting.
pub(crate) fn finish(events: &Events, reply: Option<SyncSender<()>>) {
    events.finish();
    // Ignore the error, which means that no caller is waiting because the client was dropped.
    let _ = reply.map(|reply| reply.send(()));
}

/// Waits until the user closes the client. Adds the requests made in the meantime to `early`.
pub(crate) async fn until_close(inbox: &mut Inbox, early: &mut Vec<(Request, Vec<u8>)>) -> Option<SyncSender<()>> {
    loop {
        match inbox.recv().await {
            Some(Command::Close(reply)) => return Some(reply),
            Some(Command::Request(request, frame)) => early.push((request, frame)),
            None => return None,
        }
    }
}

/// Is notified of the sockets and the deadline of a client's session, for example to keep the session alive after this
/// process has died. The methods are called on the runtime thread. By default, they do nothing.
pub trait Guard: Send {
    /// The session has started on this socket. If another process holds a duplicate of the socket, the session stays
    /// alive until that duplicate is closed, even if this process dies. [`super::client::Client::close`] always ends
    /// the session.
    fn connected(&self, _socket: BorrowedFd<'_>) {}
    /// The session is about to be resumed on this socket. The returned future must complete once another process holds
    /// duplicates of both this socket and the previous one. From then on, the store may use either socket for the
    /// session. Afterwards [`Self::resumed`] is called, unless the session is lost or closed first.
    fn resuming(&self, _socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::ready(()))
    }
    /// If `on_new` is true, the session was resumed on the new socket, and the previous socket is no longer used.
    /// Otherwise, the session was not resumed, and the new socket will not be used.
    fn resumed(&self, _on_new: bool) {}
    /// Another session has opened a link on this socket, to detect the end of this session. The guard passes a
    /// duplicate of the socket to a process that outlives this one. That process sends `word` on the duplicate once all
    /// processes that depend on this session have exited. If `is_first`, this link replaces the links of the previous
    /// session.
    fn linked(&self, _socket: BorrowedFd<'_>, _word: [u8; 32], _is_first: bool) {}
    /// Returns true if other sessions are notified of the end of this session through [`Self::linked`]. Otherwise, they
    /// notice the end only when the lease of this session expires.
    fn says_words(&self) -> bool {
        false
    }
    /// The session lasts at least until this time, in nanoseconds of the boot clock.
    fn deadline(&self, _boot_ns: u64) {}
    /// The owner has closed the session. The guard must release the socket and clear the deadline, because no process
    /// depends on the session anymore.
    ///
    /// Not called for a lost session, because the store should not see the connection close before the owner has
    /// handled the loss.
    fn closed(&self) {}
}

/// Guard that does nothing, for a session that no other process depends on.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoGuard;

impl Guard for NoGuard {}
