//! Opens a session: connects to one of the endpoints, requests a lease, and puts the session's marker key.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use elasticrs_sys::clock::boot_now;
use tokio::time::timeout;

use super::dial::{Link, Options, Stage, dial, too_late, unread};
use super::errors::EtcdError;
use super::grpc::{CallError, Channel};
use super::mapping::{Keys, unsigned};
use super::{messages as pb, tls};
use crate::session::error::{Failure, StoreError};
use crate::session::network::endpoint;
use crate::types::LostKind;

/// An open session.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) link: Link,
    /// Index of the connected endpoint.
    pub(super) member: usize,
    pub(super) cluster: u64,
    pub(super) keys: Keys,
    pub(super) ttl: Duration,
    /// Time at which the lease was requested, in nanoseconds of the boot clock.
    pub(super) sent: u64,
    /// Revision at which the session's marker key was written.
    pub(super) marker: i64,
}

/// Connection and lease ID, set once etcd has granted the lease. They are needed to revoke the lease if the user
/// cancels the opening of the session.
pub(super) type Granted = RefCell<Option<(Channel, i64)>>;

/// Kinds of failures, starting with those that the user has to fix. If every endpoint fails, the reported error
/// has the first kind in this list that occurred.
const PREFERENCE: [LostKind; 9] = [
    LostKind::Denied,
    LostKind::Tls,
    LostKind::NotOurs,
    LostKind::Limit,
    LostKind::Protocol,
    LostKind::Refused,
    LostKind::Timeout,
    LostKind::Closed,
    LostKind::Unreachable,
];

/// Opens a session with the first endpoint that accepts it. Starts with a random endpoint to spread the agents
/// over all endpoints.
pub(super) async fn open(options: &Options, granted: &Granted) -> Result<Opened, StoreError> {
    if let Some(files) = &options.tls {
        // Read the certificates before connecting, so that unusable files are reported once instead of for every
        // endpoint.
        match timeout(options.connect_timeout, tls::load(files)).await {
            Ok(read) => read.map_err(|why| StoreError::new(LostKind::Tls, why))?,
            Err(_) => return Err(unread(files, options.connect_timeout)),
        };
    }
    let count = options.endpoints.len();
    let share = options.connect_timeout / u32::try_from(count).unwrap_or(u32::MAX).max(1);
    let mut errors = Vec::new();
    // Start with a random endpoint to spread the load. Without random bytes, start with the first endpoint.
    let first = getrandom::u32().map_or(0, |random| random as usize) % count.max(1);
    for member in (first..count).chain(0..first) {
        match attempt(options, granted, member, share).await {
            Ok(opened) => return Ok(opened),
            Err(error) => errors.push(error),
        }
    }
    Err(most_specific(errors))
}

fn most_specific(mut errors: Vec<StoreError>) -> StoreError {
    errors.sort_by_key(|error| PREFERENCE.iter().position(|kind| *kind == error.kind).unwrap_or(PREFERENCE.len()));
    let kind = errors.first().map_or(LostKind::Resolve, |error| error.kind);
    let messages: Vec<_> = errors.into_iter().map(|error| error.message).collect();
    StoreError::new(kind, messages.join("; "))
}

async fn attempt(
    options: &Options,
    granted: &Granted,
    member: usize,
    patience: Duration,
) -> Result<Opened, StoreError> {
    let stage = Cell::new(Stage::Resolve);
    let opened = timeout(patience, async {
        let mut link = dial(options, member, patience, &stage).await?;
        let sent = boot_now();
        match begin(options, &link.channel, granted).await {
            Ok((granted, keys, marker)) => {
                let cluster = granted.header.map_or(0, |header| header.cluster_id);
                let ttl = Duration::from_secs(unsigned(granted.ttl));
                Ok(Opened { link, member, cluster, keys, ttl, sent, marker })
            }
            Err(error) => Err(link.judge(error).await),
        }
    });
    match opened.await {
        Ok(opened) => opened.map_err(Failure::into_error),
        Err(_) => Err(too_late(options, member, stage.get(), patience).await),
    }
}

/// Requests a lease from etcd and writes the session's marker key. Returns etcd's answer to the request for the lease,
/// the session's keys, and the revision of etcd at which the marker key was written.
async fn begin(
    options: &Options,
    channel: &Channel,
    known: &Granted,
) -> Result<(pb::LeaseGrantResponse, Keys, i64), CallError> {
    let seconds = i64::try_from(options.ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
    let asked = pb::LeaseGrantRequest { ttl: seconds, id: 0 };
    let granted: pb::LeaseGrantResponse = channel.call(GRANT, &asked).await?;
    *known.borrow_mut() = Some((channel.clone(), granted.id));
    let keys = Keys {
        prefix: options.prefix.clone(),
        lease: granted.id,
        job_lease: options.job_lease.map_or(0, |(id, _)| id),
    };
    let marked = mark(options, channel, &keys).await;
    if marked.is_err() {
        // Revoke the lease, because the session could not be opened. Ignore an error, because the lease expires anyway.
        let _ = revoke(channel, granted.id).await;
    }
    Ok((granted, keys, marked?))
}

async fn mark(options: &Options, channel: &Channel, keys: &Keys) -> Result<i64, CallError> {
    if let Some((id, ttl)) = options.job_lease {
        keep(channel, id, ttl).await?;
    }
    let answer: pb::TxnResponse = channel.call(TXN, &keys.begin()).await?;
    answer.header.map(|header| header.revision).ok_or_else(|| CallError::Foreign("an answer without a revision".into()))
}

/// Creates a lease that outlives the session. Returns false if the lease already exists.
pub(super) async fn keep(channel: &Channel, id: i64, ttl: Duration) -> Result<bool, CallError> {
    let seconds = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
    let asked = pb::LeaseGrantRequest { ttl: seconds, id };
    match channel.call::<pb::LeaseGrantResponse>(GRANT, &asked).await {
        Ok(_) => Ok(true),
        Err(error) if error.is(EtcdError::LeaseExists) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Revokes a lease, which also deletes its keys.
pub(super) async fn revoke(channel: &Channel, id: i64) -> Result<(), CallError> {
    let asked = pb::LeaseRevokeRequest { id };
    channel.call("/etcdserverpb.Lease/LeaseRevoke", &asked).await
}

/// Opens a new connection for an existing session, to the endpoint with the index `member`.
pub(super) async fn again(options: &Options, member: usize, patience: Duration) -> Result<Link, StoreError> {
    let (host, port) = &options.endpoints[member];
    let stage = Cell::new(Stage::Resolve);
    match timeout(patience, dial(options, member, patience, &stage)).await {
        Ok(dialled) => dialled.map_err(Failure::into_error),
        Err(_) if stage.get() == Stage::Files => Err(too_late(options, member, Stage::Files, patience).await),
        Err(_) => Err(StoreError::new(LostKind::Timeout, format!("no answer from {}", endpoint(host, *port)))),
    }
}

/// Checks that all other endpoints that respond belong to the same cluster.
pub(super) async fn compare(
    options: Rc<Options>,
    member: usize,
    cluster: u64,
    keys: Rc<Keys>,
) -> Result<(), StoreError> {
    for other in (0..options.endpoints.len()).filter(|other| *other != member) {
        let Ok(mut link) = again(&options, other, options.connect_timeout).await else { continue };
        let asked = keys.find_marker();
        let asked = link.channel.call::<pb::RangeResponse>(RANGE, &asked);
        let answer = timeout(options.connect_timeout, asked).await;
        let found = answer.ok().and_then(Result::ok).and_then(|answer| answer.header);
        if let Some(header) = found
            && header.cluster_id != cluster
        {
            let (host, port) = &options.endpoints[member];
            let known = endpoint(host, *port);
            let why = format!("the endpoints belong to different clusters of etcd: {known} and {}", link.at);
            return Err(StoreError::new(LostKind::NotOurs, why));
        }
        link.close().await;
    }
    Ok(())
}

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(super) const TXN: &str = "/etcdserverpb.KV/Txn";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
