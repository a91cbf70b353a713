//! Client of the store. A client has one session with one lease. To open another session, create a new client.
//!
//! - **CLIENT-1** requests are sent in the order in which they were made, and nothing is sent after the session has
//!   ended;
//! - **CLIENT-2** the client gives up its session one interval before the store would end it. This deadline is on the
//!   boot clock and is computed from the time at which the last answered keep-alive was sent. Messages that arrive
//!   after the deadline are ignored;
//! - **CLIENT-3** the end of the session is reported once, as the last event;
//! - **CLIENT-4** a session with [`Options::resume`] survives the loss of its connection until its lease expires.

use std::time::Duration;

use elasticrs_runtime::runtime::Spawn;

pub use super::connect::Options;
use super::connect::{Met, Opened, open};
use super::events::{Event, Events};
use super::guard::Guard;
use super::protocol::{Request, WatchFrom};
use super::session::{Asked, Session};
use super::types::{Txn, Watch};
use super::unanswered::Kind;
use super::wire::MAX_REQUEST;
use crate::handle::{Ended, Handle, Inbox, finish, until_close};

/// Error for a request that cannot be sent.
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
    handle: Handle<Asked>,
    resume: bool,
}

impl Client {
    /// Starts connecting in the background. [`Event::Connected`] or [`Event::Lost`] follows.
    pub fn start(runtime: &dyn Spawn, options: Options, guard: Box<dyn Guard>) -> std::io::Result<Self> {
        let resume = options.resume;
        let handle = Handle::start(runtime, move |ending, inbox| {
            Box::pin(async move { run(&options, &ending.0, guard.as_ref(), inbox).await })
        })?;
        Ok(Self { handle, resume })
    }

    /// Returns the queue of events from this client.
    pub fn events(&self) -> &Events {
        self.handle.events()
    }

    /// Sends a transaction. Its reply has the same tag.
    pub fn txn(&self, tag: u64, txn: Txn) -> Result<(), Unsendable> {
        self.send(Kind::Plain, &Request::Txn { tag, txn })
    }

    /// Starts a watch. Its reply has the same tag.
    pub fn watch(&self, tag: u64, watch: Watch, snapshot: bool, from_revision: Option<u64>) -> Result<(), Unsendable> {
        if self.resume && from_revision.is_some() {
            return Err(Unsendable::Past);
        }
        let kind = Kind::Watch { watch: watch.clone(), wants_snapshot: snapshot };
        // Always request the snapshot if the session can be resumed, because the client needs it to compute which
        // changes it missed while the connection was broken.
        let snapshot = snapshot || self.resume;
        self.send(kind, &Request::Watch { tag, watch: WatchFrom { watch, snapshot, from_revision } })
    }

    /// Stops a watch. Changes that the store has already sent are still delivered.
    pub fn unwatch(&self, watch: Watch) -> Result<(), Unsendable> {
        self.send(Kind::Unwatch(watch.clone()), &Request::Unwatch(watch))
    }

    fn send(&self, kind: Kind, request: &Request) -> Result<(), Unsendable> {
        let frame = request.encode();
        if frame.len() - 4 > MAX_REQUEST {
            return Err(Unsendable::TooLarge(frame.len() - 4));
        }
        self.handle.send((kind, frame));
        Ok(())
    }

    /// Ends the session and blocks until it has ended. Also works if another process holds a duplicate of the socket.
    /// No event follows.
    pub fn close(&self) {
        self.handle.close();
    }
}

async fn run(options: &Options, events: &Events, guard: &dyn Guard, mut inbox: Inbox<Asked>) {
    let mut early = Vec::new();
    let opened = tokio::select! {
        opened = open(options) => opened,
        closed = until_close(&mut inbox, &mut early) => {
            return finish(events, closed);
        }
    };
    let ended = match opened {
        Ok(opened) => {
            tell_connected(events, guard, &opened);
            Session::new(options, opened, events, guard).run(early, &mut inbox).await
        }
        Err(lost) => Ended::Lost(lost),
    };
    ended.tell(events, guard);
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
