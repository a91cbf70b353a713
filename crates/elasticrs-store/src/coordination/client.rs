//! Client of the store. A client has one session with one lease. To open another session, create a new client.
//!
//! - **CLIENT-1** requests are sent in the order in which they were made, and nothing is sent after the session has
//!   ended;
//! - **CLIENT-2** the client gives up its session one interval before the store would end it. The client measures this
//!   deadline on the boot clock, from the time at which it sent the last answered keep-alive. It ignores messages that
//!   arrive after the deadline;
//! - **CLIENT-3** the end of the session is reported once, as the last event;
//! - **CLIENT-4** a session with [`Options::resume`] survives the loss of its connection until its lease expires.

use std::os::fd::AsFd;
use std::time::Duration;

use elasticrs_runtime::runtime::Spawn;

pub use super::connect::Options;
use super::connect::{Met, Opened, open};
use super::protocol::encode_request;
use super::session::session;
use super::wire::MAX_REQUEST;
use crate::session::client::{Client, Guard, Inbox, Request, Unsendable, finish, until_close};
use crate::session::events::{Event, Events};
use crate::types::Txn;

/// Starts connecting in the background. [`Event::Connected`] or [`Event::ConnectionLost`] follows.
pub fn connect(runtime: &dyn Spawn, options: Options, guard: Box<dyn Guard>) -> std::io::Result<Client> {
    let resume = options.resume;
    Client::start(runtime, Box::new(move |request| encode(request, resume)), move |reporter, inbox| {
        Box::pin(async move { run(&options, &reporter.0, guard.as_ref(), inbox).await })
    })
}

fn encode(request: &mut Request, resume: bool) -> Result<Vec<u8>, Unsendable> {
    let frame = encode_request(request, resume);
    if !resume && let Request::Txn { txn, .. } = request {
        // Free the transaction on the thread that makes the request, because that takes longer on the session's thread.
        *txn = Txn::default();
    }
    match frame.len() - 4 {
        length if length > MAX_REQUEST => Err(Unsendable::TooLarge(length)),
        _ => Ok(frame),
    }
}

async fn run(options: &Options, events: &Events, guard: &dyn Guard, mut inbox: Inbox) {
    let mut early = Vec::new();
    let opened = tokio::select! {
        opened = open(options) => opened,
        closed = until_close(&mut inbox, &mut early) => {
            return finish(events, closed);
        }
    };
    let end = match opened {
        Ok(opened) => {
            guard.connected(opened.stream.as_fd());
            events.meet(opened.met.store, opened.met.revision);
            let session = session(options, &opened.met, events, guard);
            report_connected(events, &opened);
            session.run(opened, early, &mut inbox).await
        }
        Err(error) => error.into(),
    };
    end.report(events, guard);
}

fn report_connected(events: &Events, opened: &Opened) {
    let Met { revision, session, pace, .. } = opened.met;
    let connected = Event::Connected {
        revision,
        session,
        ttl: Duration::from_millis(u64::from(pace.ttl_ms)),
        interval: Duration::from_millis(u64::from(pace.interval_ms)),
        local_address: opened.local.ip().to_string(),
    };
    events.push(connected, 0);
}
