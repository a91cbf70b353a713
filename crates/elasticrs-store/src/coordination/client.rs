//! The client: one session, one lease. After its end, make a new one.
//!
//! - **CLIENT-1** requests are sent in the order in which they were made, and nothing is sent after the end;
//! - **CLIENT-2** the session is given up one interval before the store would end it, counted on the boot clock from the
//!   sending of the last answered keep-alive; whatever arrives after that moment is not looked at;
//! - **CLIENT-3** the end is told once, and last;
//! - **CLIENT-4** a session that may be taken up again survives its connection until then ([`Options::resume`]).

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use elasticrs_runtime::runtime::Spawn;
use elasticrs_runtime::threads::ask;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub use super::connect::Options;
use super::connect::{Lost, Met, Opened, open};
use super::events::{Event, Events};
use super::guard::Guard;
use super::protocol::{Request, WatchFrom};
use super::session::{Command, Ended, Session};
use super::types::{LostKind, Txn, Watch};
use super::unanswered::Kind;
use super::wire::MAX_REQUEST;

/// The request cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unsendable {
    #[error("a request of {0} bytes; the store takes {MAX_REQUEST}")]
    TooLarge(usize),
    #[error("a session that may be taken up again has no watches from a revision of the past")]
    Past,
}

/// A session with a store. Dropping it closes it.
#[derive(Debug)]
pub struct Client {
    commands: UnboundedSender<Command>,
    events: Arc<Events>,
    resume: bool,
}

impl Client {
    /// Begins to connect. [`Event::Connected`] or [`Event::Lost`] follows.
    pub fn start(runtime: &dyn Spawn, options: Options, guard: Box<dyn Guard>) -> std::io::Result<Self> {
        let events = Arc::new(Events::new()?);
        let resume = options.resume;
        let (commands, inbox) = unbounded_channel();
        let told = Arc::clone(&events);
        let is_running = runtime.spawn(Box::new(move || {
            let ending = Ending(told);
            Box::pin(async move { run(&options, &ending.0, guard.as_ref(), inbox).await })
        }));
        if !is_running {
            drop(Ending(Arc::clone(&events)));
        }
        Ok(Self { commands, events, resume })
    }

    /// What happens.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Sends a transaction; its reply carries the tag.
    pub fn txn(&self, tag: u64, txn: Txn) -> Result<(), Unsendable> {
        self.send(Kind::Plain, &Request::Txn { tag, txn })
    }

    /// Begins a watch; its reply carries the tag.
    pub fn watch(&self, tag: u64, watch: Watch, snapshot: bool, from_revision: Option<u64>) -> Result<(), Unsendable> {
        if self.resume && from_revision.is_some() {
            return Err(Unsendable::Past);
        }
        let kind = Kind::Watch { watch: watch.clone(), wants_snapshot: snapshot };
        // Without it nobody would know what is missing after a break.
        let snapshot = snapshot || self.resume;
        self.send(kind, &Request::Watch { tag, watch: WatchFrom { watch, snapshot, from_revision } })
    }

    /// Ends a watch; what is on its way still comes.
    pub fn unwatch(&self, watch: Watch) -> Result<(), Unsendable> {
        self.send(Kind::Unwatch(watch.clone()), &Request::Unwatch(watch))
    }

    fn send(&self, kind: Kind, request: &Request) -> Result<(), Unsendable> {
        let frame = request.encode();
        if frame.len() - 4 > MAX_REQUEST {
            return Err(Unsendable::TooLarge(frame.len() - 4));
        }
        // A session that is over answers nothing; its end is among the events.
        let _ = self.commands.send(Command::Send(kind, frame));
        Ok(())
    }

    /// Ends the session, also where a duplicate of its socket is held; no event follows. Blocks until that is done.
    pub fn close(&self) {
        // One that has ended has nothing left to close.
        ask(&self.commands, Command::Close);
        self.events.finish();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let (reply, _) = sync_channel(1);
        // As in `close`, without waiting.
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

async fn run(options: &Options, events: &Events, guard: &dyn Guard, mut inbox: UnboundedReceiver<Command>) {
    let mut early = Vec::new();
    let opened = tokio::select! {
        opened = open(options) => opened,
        closed = until_close(&mut inbox, &mut early) => {
            events.finish();
            // Nobody waits when the client was dropped; nor below.
            let _ = closed.map(|reply| reply.send(()));
            return;
        }
    };
    let ended = match opened {
        Ok(opened) => {
            tell_connected(events, guard, &opened);
            Session::new(options, opened, events, guard).run(early, &mut inbox).await
        }
        Err(lost) => Ended::Lost(lost),
    };
    match ended {
        Ended::Lost(Lost { kind, message }) => events.push(Event::Lost { kind, message }, 0),
        Ended::Closed(reply) => {
            guard.closed();
            events.finish();
            let _ = reply.map(|reply| reply.send(()));
        }
    }
}

fn tell_connected(events: &Events, guard: &dyn Guard, opened: &Opened) {
    use std::os::fd::AsFd;

    guard.connected(opened.stream.as_fd());
    guard.deadline(opened.deadline());
    let Met { revision, session, pace, sent, store, .. } = opened.met;
    events.meet(store, revision);
    events.renewed(opened.deadline(), sent, sent, None);
    let connected = Event::Connected {
        revision,
        session,
        ttl: Duration::from_millis(u64::from(pace.ttl_ms)),
        interval: Duration::from_millis(u64::from(pace.interval_ms)),
        local_address: opened.local.ip().to_string(),
        peer_address: opened.peer.ip().to_string(),
    };
    events.push(connected, 0);
}

/// Keeps requests until they can be sent; returns when the user has closed the client.
async fn until_close(inbox: &mut UnboundedReceiver<Command>, early: &mut Vec<Command>) -> Option<SyncSender<()>> {
    loop {
        match inbox.recv().await {
            Some(Command::Close(reply)) => return Some(reply),
            Some(request) => early.push(request),
            None => return None,
        }
    }
}
