//! Client for etcd. A client has one session with one lease, but the session may use several connections over
//! time. Once the session has ended, the client cannot be used again.

use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use elasticrs_runtime::runtime::Spawn;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;

pub use super::dial::{Options, Site};
use super::grpc::Channel;
use super::lease::interval;
use super::links::Links;
use super::mapping::unsigned;
use super::open::{Granted, Opened, open, revoke};
use super::session::session;
use crate::session::client::{Client, Guard, Inbox, Request, Unsendable, finish, until_close};
use crate::session::events::{Event, Events};
use crate::types::{Compare, MAX_REQUEST, Op, Txn};

/// Starts connecting in the background. [`Event::Connected`] or [`Event::ConnectionLost`] follows.
pub fn connect(runtime: &dyn Spawn, options: Options, guard: Box<dyn Guard>) -> std::io::Result<Client> {
    Client::start(runtime, Box::new(|request| check_size(request)), move |reporter, inbox| {
        Box::pin(async move {
            let guard: Rc<dyn Guard> = Rc::from(guard);
            run(&Rc::new(options), &reporter.0, &guard, inbox).await;
        })
    })
}

/// Fails if a request is too large for etcd. Otherwise returns an empty encoded form, because a session of etcd encodes
/// a request only when it executes it.
fn check_size(request: &Request) -> Result<Vec<u8>, Unsendable> {
    match request {
        Request::Txn { txn, .. } if size(txn) > MAX_REQUEST => Err(Unsendable::TooLarge(size(txn))),
        // A watch request contains only one key or prefix, so it never exceeds the size limit.
        _ => Ok(Vec::new()),
    }
}

/// Returns the number of bytes of user data in a transaction. They are limited to `MAX_REQUEST`, which is two
/// thirds of etcd's default limit for a whole request.
fn size(txn: &Txn) -> usize {
    let compares = txn.compares.iter().map(|compare| match compare {
        Compare::Exists(key) | Compare::Missing(key) | Compare::Create(key, _) | Compare::Mod(key, _) => key.len(),
        Compare::Value(key, value) => key.len() + value.len(),
    });
    let ops = txn.then.iter().chain(&txn.otherwise).map(|op| match op {
        // A put without a lease is encoded twice, because etcd needs one encoding for an existing key and another for a
        // missing key.
        Op::Put { key, value, leased } => (key.len() + value.len()) * if *leased { 1 } else { 2 },
        Op::Delete(key)
        | Op::DeletePrefix(key)
        | Op::Get(key)
        | Op::Range { prefix: key, .. }
        | Op::Predecessor { key, .. } => key.len(),
    });
    compares.chain(ops).sum()
}

/// Time limit for revoking the lease when the client is closed while the session is being opened.
const REVOKE_LIMIT: Duration = Duration::from_secs(1);

async fn run(options: &Rc<Options>, events: &Events, guard: &Rc<dyn Guard>, mut inbox: Inbox) {
    let (mut early, granted) = (Vec::new(), Granted::default());
    let opening = open(options, &granted);
    tokio::pin!(opening);
    let opened = tokio::select! {
        opened = &mut opening => opened,
        closed = until_close(&mut inbox, &mut early) => {
            let lease = granted.take();
            if let Some((channel, id)) = lease {
                // Ignore an error, because a lease that is not revoked expires by itself.
                let _ = timeout(REVOKE_LIMIT, revoke(&channel, id)).await;
            }
            return finish(events, closed);
        }
    };
    let end = match opened {
        Ok(opened) => {
            let (channels, channel) = watch::channel(None);
            let links = open_links(options, &opened, channel, guard);
            report_connected(events, &opened);
            let (session, link) = session(options, opened, events, guard.as_ref(), channels);
            tokio::select! {
                end = session.run(link, early, &mut inbox) => end,
                never = run_links(links) => match never {},
            }
        }
        Err(error) => error.into(),
    };
    end.report(events, guard.as_ref());
}

/// Opens the connections over which other sessions learn that this session's agent has died.
///
/// Returns `None` if these connections are disabled, or if no nursery (the process that outlives the agent) could
/// announce the death.
///
/// Also returns `None` after an error, because other sessions still notice the death when the lease expires.
fn open_links(
    options: &Options,
    opened: &Opened,
    channel: watch::Receiver<Option<Channel>>,
    guard: &Rc<dyn Guard>,
) -> Option<(Links, TcpListener)> {
    let site = options.links.as_ref().filter(|_| guard.says_words())?;
    let keys = Rc::new(opened.keys.clone());
    Links::open(site, keys, &opened.link, channel, Rc::clone(guard)).ok()
}

async fn run_links(links: Option<(Links, TcpListener)>) -> Infallible {
    match links {
        Some((links, listener)) => links.run(listener).await,
        None => std::future::pending().await,
    }
}

fn report_connected(events: &Events, opened: &Opened) {
    let connected = Event::Connected {
        revision: unsigned(opened.marker),
        session: unsigned(opened.keys.lease),
        ttl: opened.ttl,
        interval: interval(opened.ttl),
        local_address: opened.link.local.ip().to_string(),
    };
    events.push(connected, 0);
}
