//! Code shared by the clients of both stores: the user's handle for a session, and the handling of a session's end.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use elasticrs_runtime::runtime::Spawn;
use elasticrs_runtime::threads::ask_within;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::coordination::connect::Lost;
use crate::coordination::events::{Event, Events};
use crate::coordination::guard::Guard;
use crate::coordination::types::LostKind;

/// Time limit for [`Handle::close`]. A session takes at most 2 s to close. The rest allows for a runtime thread that is
/// late.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A command that a caller sends to the client's background task.
#[derive(Debug)]
pub(crate) enum Command<R> {
    Request(R),
    Close(SyncSender<()>),
}

pub(crate) type Inbox<R> = UnboundedReceiver<Command<R>>;

/// The user's handle for a session. Dropping it closes the session.
#[derive(Debug)]
pub(crate) struct Handle<R> {
    commands: UnboundedSender<Command<R>>,
    events: Arc<Events>,
}

impl<R: Send + 'static> Handle<R> {
    /// Starts the task of the session. When the task ends for any reason, this is reported as an event.
    pub(crate) fn start<F>(runtime: &dyn Spawn, session: F) -> std::io::Result<Self>
    where
        F: FnOnce(Ending, Inbox<R>) -> Pin<Box<dyn Future<Output = ()>>> + Send + 'static,
    {
        let events = Arc::new(Events::new()?);
        let (commands, inbox) = unbounded_channel();
        // If the runtime has stopped, `spawn` drops this value, and its destructor reports the end.
        let ending = Ending(Arc::clone(&events));
        runtime.spawn(Box::new(move || session(ending, inbox)));
        Ok(Self { commands, events })
    }

    /// Returns the events of the session.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Sends a request. A session that has ended does not answer. It has already reported its end as an event.
    pub(crate) fn send(&self, request: R) {
        let _ = self.commands.send(Command::Request(request));
    }

    /// Ends the session. No event follows. Blocks until the session has ended, or until [`CLOSE_LIMIT`] elapses.
    pub(crate) fn close(&self) {
        // Ignore a missing answer. Either the session has already ended, or it hangs and ends when its lease expires.
        ask_within(&self.commands, Command::Close, CLOSE_LIMIT);
        self.events.finish();
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        let (reply, _) = sync_channel(1);
        // Close the session as `close` does, but without waiting.
        let _ = self.commands.send(Command::Close(reply));
    }
}

/// Reports the end of the session when it is dropped, even if the runtime has stopped or the task has panicked.
pub(crate) struct Ending(pub(crate) Arc<Events>);

impl Drop for Ending {
    fn drop(&mut self) {
        let message = "the runtime of this client has ended".to_owned();
        self.0.push(Event::Lost { kind: LostKind::Closed, message }, 0);
    }
}

/// Reason for the end of a session.
pub(crate) enum Ended {
    Lost(Lost),
    /// The user closed the session. If a caller waits for this, the sender notifies it.
    Closed(Option<SyncSender<()>>),
}

impl Ended {
    pub(crate) fn tell(self, events: &Events, guard: &dyn Guard) {
        match self {
            Self::Lost(Lost { kind, message }) => events.push(Event::Lost { kind, message }, 0),
            Self::Closed(reply) => {
                guard.closed();
                finish(events, reply);
            }
        }
    }
}

/// Stops the events of a session that the user closed, and notifies the caller, if it is waiting.
pub(crate) fn finish(events: &Events, reply: Option<SyncSender<()>>) {
    events.finish();
    // Ignore the error, because no caller waits if the client was dropped.
    let _ = reply.map(|reply| reply.send(()));
}

/// Reason why the session stops using its connection.
pub(crate) enum Halt {
    /// The connection failed. The session may continue on another one.
    Broken(Lost),
    Ended(Ended),
}

impl From<Lost> for Halt {
    fn from(lost: Lost) -> Self {
        Self::Ended(Ended::Lost(lost))
    }
}

/// Collects early requests in `early` until the user closes the client, then returns.
pub(crate) async fn until_close<R>(inbox: &mut Inbox<R>, early: &mut Vec<R>) -> Option<SyncSender<()>> {
    loop {
        match inbox.recv().await {
            Some(Command::Close(reply)) => return Some(reply),
            Some(Command::Request(request)) => early.push(request),
            None => return None,
        }
    }
}
