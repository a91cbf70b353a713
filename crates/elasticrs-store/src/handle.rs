//! Code shared by the clients of both stores: the handle of a session, and how a session ends.

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

/// Time limit for [`Handle::close`]. A session takes at most 2 s to close; the remaining time allows for a runtime
/// thread that is late.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A command that a caller sends to the client's background task.
#[derive(Debug)]
pub(crate) enum Command<R> {
    Request(R),
    Close(SyncSender<()>),
}

pub(crate) type Inbox<R> = UnboundedReceiver<Command<R>>;

/// The user's handle of a session. Dropping it closes the session.
#[derive(Debug)]
pub(crate) struct Handle<R> {
    commands: UnboundedSender<Command<R>>,
    events: Arc<Events>,
}

impl<R: Send + 'static> Handle<R> {
    /// Starts the session's task. Its completion is always reported, whatever the cause.
    pub(crate) fn start<F>(runtime: &dyn Spawn, session: F) -> std::io::Result<Self>
    where
        F: FnOnce(Ending, Inbox<R>) -> Pin<Box<dyn Future<Output = ()>>> + Send + 'static,
    {
        let events = Arc::new(Events::new()?);
        let (commands, inbox) = unbounded_channel();
        // Dropped where there is no runtime any more.
        let ending = Ending(Arc::clone(&events));
        runtime.spawn(Box::new(move || session(ending, inbox)));
        Ok(Self { commands, events })
    }

    /// Returns the events of the session.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Sends a request. A session that has ended does not answer; its end is reported as an event.
    pub(crate) fn send(&self, request: R) {
        let _ = self.commands.send(Command::Request(request));
    }

    /// Ends the session; no event follows. Blocks until the session has ended, or until [`CLOSE_LIMIT`] elapses.
    pub(crate) fn close(&self) {
        // Ignore a missing answer: either the session has already ended, or it hangs, and then it ends when its lease
        // expires.
        ask_within(&self.commands, Command::Close, CLOSE_LIMIT);
        self.events.finish();
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        let (reply, _) = sync_channel(1);
        // Do the same as `close`, but without waiting.
        let _ = self.commands.send(Command::Close(reply));
    }
}

/// Tells of the end even when the runtime ends, or the task panics.
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
    /// The user closed the session, and may wait for that to finish.
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

/// The user closed the session. Notify it of the end.
pub(crate) fn finish(events: &Events, reply: Option<SyncSender<()>>) {
    events.finish();
    // Nobody waits when the client was dropped.
    let _ = reply.map(|reply| reply.send(()));
}

/// Why a connection is not used on.
pub(crate) enum Halt {
    /// Another one may do.
    Broken(Lost),
    Ended(Ended),
}

impl From<Lost> for Halt {
    fn from(lost: Lost) -> Self {
        Self::Ended(Ended::Lost(lost))
    }
}

/// Keeps requests until they can be sent; returns when the user has closed the client.
pub(crate) async fn until_close<R>(inbox: &mut Inbox<R>, early: &mut Vec<R>) -> Option<SyncSender<()>> {
    loop {
        match inbox.recv().await {
            Some(Command::Close(reply)) => return Some(reply),
            Some(Command::Request(request)) => early.push(request),
            None => return None,
        }
    }
}
