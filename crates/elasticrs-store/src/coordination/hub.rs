//! State that all connections of a server share: keys, watches, sessions and leases.
//!
//! - **HUB-1** the changes of a revision are queued for all watching clients before the reply to the transaction that
//!   made the changes;
//! - **HUB-2** if several sessions end in the same wake-up of the server's thread, their keys are deleted in one
//!   revision;
//! - **HUB-3** the memory that the server holds for clients stays within its limit. When the limit is exceeded, the
//!   server ends the session that holds the most memory;
//! - **HUB-4** a session lasts as long as its lease, not as long as its connection. If the client closes the current
//!   connection, the session ends, because a client does so only when its process exits. If the connection breaks, the
//!   session is absent (without a connection) until it is resumed or its time to live expires.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::future::pending;
use std::net::IpAddr;
use std::ops::Bound;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use elasticrs_runtime::notices::{Notices, Rate, WINDOW};
use elasticrs_sys::clock::{boot_now, wall_now};
use elasticrs_sys::resources::trim_heap;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::timeout;

use super::durable::{Granted, Image, StateError, StateFile};
use super::journal::Journal;
use super::leases::Leases;
use super::outbox::{BytesInUse, CONNECTION_COST, Message, Outbox};
use super::protocol::{Answer, Digest, Hello, Pace, Request, Secret, encode_changes};
use super::relay::Relay;
use super::state::{Revision, SessionId, State};
use super::turns::REQUEST;
use super::unproven::{Room, Unproven, limit};
use super::watches::Watches;
use crate::secrets;
use crate::types::{LostKind, OpResult, StoreId, Txn, Watch};

/// Maximum number of watches of a client.
const MAX_WATCHES: usize = 1024;

/// Memory that an absent session (one without a connection) takes in addition to its keys, in bytes.
const ABSENT_COST: usize = 512;

/// Delay before freed memory is returned to the kernel, because it may be needed again soon.
const TRIM_AFTER: Duration = Duration::from_millis(100);

/// Configuration of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// ID of the only run that the server serves. `None` to serve any run, in which case all runs share the same
    /// keys.
    pub run_id: Option<String>,
    pub token: Option<Vec<u8>>,
    pub max_connections: usize,
    /// Maximum number of bytes that the server holds for clients: keys, values, watches, incomplete requests
    /// and unread answers.
    pub max_bytes: usize,
    /// Time limit for receiving a request, from its first to its last byte.
    pub request_timeout: Duration,
    pub state: Option<Durable>,
}

/// Configuration of the state file, from which a restarted store restores its state.
#[derive(Debug, Clone)]
pub struct Durable {
    /// Path of the state file.
    pub file: PathBuf,
    /// Minimum time to live of a session. Sessions therefore survive shorter outages of the store.
    pub grace: Duration,
}

impl Durable {
    /// Returns the number of keep-alive intervals that together last at least as long as `grace`.
    fn attempts_at(&self, interval_ms: u32) -> u16 {
        let attempts = self.grace.as_millis().div_ceil(u128::from(interval_ms));
        u16::try_from(attempts).unwrap_or(u16::MAX)
    }
}

/// Default of [`Config::max_connections`].
pub const MAX_CONNECTIONS: usize = 16_384;
/// Default of [`Config::max_bytes`].
pub const MAX_BYTES: usize = 256 << 20;
/// Default of [`Config::request_timeout`]. It is long enough for the largest request at 0.2 Mbit/s.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A session that has not ended.
#[derive(Debug)]
struct Session {
    secret: Secret,
    /// ID of the client's run. Empty until the client of a restored session has reconnected.
    run_id: String,
    /// Outbox of the session's connection. `None` while the session has no connection.
    outbox: Option<Rc<Outbox>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: State,
    watches: Watches,
    leases: Leases,
    sessions: HashMap<SessionId, Session>,
    /// Number of sessions without a connection.
    absent: usize,
    /// Sessions that have ended but whose keys have not been deleted yet.
    ended: Vec<SessionId>,
    next_session: SessionId,
    /// Highest memory use, in bytes, since the task [`Hub::trim`] was last woken to release free memory.
    peak: usize,
}

/// Shared state of a server. Only the server's thread uses it.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) config: Config,
    /// ID of this store, followed by the IDs of the stores whose state it restored, newest first.
    pub(super) ids: Vec<StoreId>,
    pub(super) notices: Notices,
    pub(super) sessions: Arc<AtomicUsize>,
    pub(super) tasks: RefCell<JoinSet<()>>,
    /// Semaphore that gives one connection at a time a long turn (a longer time on the server's thread).
    pub(super) turns: Semaphore,
    /// Connections that have not completed the handshake.
    pub(super) unproven: RefCell<Unproven<AbortHandle>>,
    /// Number of connections that have completed the handshake.
    pub(super) proven: Cell<usize>,
    /// Notified when a connection is removed from `unproven`.
    pub(super) left: Notify,
    closed: RefCell<Rate>,
    pub(super) relay: Relay,
    /// True if the user was notified that this endpoint refuses a connection of a worker.
    pub(super) has_told_of_worker: Cell<bool>,
    /// Buffer into which all connections read, one at a time.
    pub(super) scratch: RefCell<Vec<u8>>,
    pub(super) held: Rc<BytesInUse>,
    /// Journal of a store that keeps its state in a file. `None` for other stores.
    pub(super) journal: Option<Journal>,
    shared: RefCell<Shared>,
    reap: Notify,
    replan: Notify,
    trim: Notify,
}

/// Prefix of the keys that announce the address of a round's workers' store.
const WORKERS_STORES: &str = "%workers/";

/// Decodes the host and the port in the value of a key that announces a workers' store.
fn address_of(value: &[u8]) -> Option<(String, u16)> {
    let (host, port) = str::from_utf8(value).ok()?.rsplit_once(' ')?;
    Some((host.to_owned(), port.parse().ok()?))
}

/// Reason why the server refuses a request and closes its connection.
pub(super) type Refusal = (LostKind, String);

impl Hub {
    pub(super) fn new(
        config: Config,
        ids: Vec<StoreId>,
        notices: Notices,
        sessions: Arc<AtomicUsize>,
        relay: Relay,
    ) -> Self {
        let shared = Shared { state: State::new(config.max_bytes), next_session: 1, ..Shared::default() };
        Self {
            config,
            ids,
            notices,
            sessions,
            tasks: RefCell::default(),
            turns: Semaphore::new(1),
            unproven: RefCell::default(),
            proven: Cell::default(),
            left: Notify::new(),
            closed: RefCell::new(Rate::new(1, WINDOW)),
            relay,
            has_told_of_worker: Cell::default(),
            scratch: RefCell::new(vec![0; 64 * 1024]),
            held: Rc::default(),
            journal: None,
            shared: RefCell::new(shared),
            reap: Notify::new(),
            replan: Notify::new(),
            trim: Notify::new(),
        }
    }

    /// Restores the state of a previous store. The restored sessions have no connections. Each client has to reconnect
    /// within its session's time to live, which starts again now.
    pub(super) fn going_on_with(mut self, file: StateFile, mut image: Image) -> Self {
        self.shared.get_mut().next_session = image.next_session;
        // Use the same start time for all sessions. Sessions with the same time to live that are not resumed then
        // expire together, and their keys are deleted in one revision.
        let now = boot_now();
        self.shared.get_mut().leases.look(now);
        for (session, granted) in &image.sessions {
            self.restore(*session, granted, now);
        }
        self.shared.get_mut().state.restore(image.revision, std::mem::take(&mut image.entries));
        self.ids.clone_from(&image.ids);
        if file.dropped > 0 {
            self.notices.say(format!(
                "the last {} bytes of the state were not written whole and are left out: normal if the store or its machine was killed during a write, whose client was not answered; otherwise the disk has lost a write",
                file.dropped
            ));
        }
        self.journal = Some(Journal::new(file, image));
        self
    }

    /// Opens a new session for a client, or resumes an existing one. Returns the ID of the session and the answer to
    /// the client. `proof` goes into this answer, and shows the client that the store knows the token.
    pub(super) fn enter(
        &self,
        outbox: &Rc<Outbox>,
        hello: &Hello,
        proof: Option<Digest>,
    ) -> Result<(SessionId, Answer), Refusal> {
        if hello.confirmed.is_some_and(|id| !self.ids.contains(&id)) {
            let said = "this is not the store that this node has met before: it was started empty, or goes on with \
                        another copy of that store's state";
            return Err((LostKind::Other, said.into()));
        }
        let (session, secret, pace) = match &hello.resume {
            Some((session, secret)) => (*session, *secret, self.resume(outbox, *session, secret, &hello.run_id)?),
            None => self.begin(outbox, hello)?,
        };
        let (revision, ids) = (self.shared.borrow().state.revision(), self.ids.clone());
        Ok((session, Answer::Ready { session, revision, pace, proof, secret, ids }))
    }

    fn begin(&self, outbox: &Rc<Outbox>, hello: &Hello) -> Result<(SessionId, Secret, Pace), Refusal> {
        let Hello { interval_ms, attempts, ref run_id, .. } = *hello;
        let least = self.config.state.as_ref().map_or(0, |state| state.attempts_at(interval_ms));
        let attempts = attempts.max(least);
        let secret = secrets::random()
            .map_err(|error| (LostKind::Limit, format!("the store has no secret for a session: {error}")))?;
        let mut shared = self.shared.borrow_mut();
        let session = shared.next_session;
        shared.next_session += 1;
        shared.state.begin_session(session);
        let opened = Session { secret, run_id: run_id.clone(), outbox: Some(Rc::clone(outbox)) };
        shared.sessions.insert(session, opened);
        self.sessions.store(shared.sessions.len(), Ordering::Relaxed);
        let pace = shared.leases.begin(session, interval_ms, attempts, boot_now());
        self.replan.notify_one();
        if let Some(journal) = &self.journal {
            journal.begin(session, Granted { secret, interval_ms, attempts, ttl_ms: pace.ttl_ms });
        }
        Ok((session, secret, pace))
    }

    /// Resumes a session for a client that knows its secret. If the session still has a connection, that connection is
    /// dropped.
    fn resume(&self, outbox: &Rc<Outbox>, session: SessionId, secret: &Secret, run_id: &str) -> Result<Pace, Refusal> {
        let mut shared = self.shared.borrow_mut();
        let shared = &mut *shared;
        let known = shared.sessions.get_mut(&session).filter(|known| secrets::is_same(&known.secret, secret));
        let pace = known.as_ref().and_then(|_| self.renew(&mut shared.leases, session));
        let (Some(known), Some(pace)) = (known, pace) else {
            return Err((LostKind::Gone, "the session of this node has ended here".into()));
        };
        run_id.clone_into(&mut known.run_id);
        match known.outbox.replace(Rc::clone(outbox)) {
            Some(last) => last.discard(),
            None => shared.absent -= 1,
        }
        shared.watches.remove_client(session);
        self.replan.notify_one();
        Ok(pace)
    }

    fn restore(&self, session: SessionId, granted: &Granted, now: u64) {
        let Granted { secret, interval_ms, attempts, ttl_ms } = *granted;
        let mut shared = self.shared.borrow_mut();
        shared.next_session = shared.next_session.max(session + 1);
        shared.state.begin_session(session);
        shared.sessions.insert(session, Session { secret, run_id: String::new(), outbox: None });
        shared.absent += 1;
        self.sessions.store(shared.sessions.len(), Ordering::Relaxed);
        shared.leases.restore(session, interval_ms, attempts, ttl_ms, now);
        self.replan.notify_one();
    }

    fn renew(&self, leases: &mut Leases, session: SessionId) -> Option<Pace> {
        let pace = leases.renew(session, boot_now())?;
        if let Some(journal) = &self.journal {
            journal.extend(session, pace.ttl_ms);
        }
        Some(pace)
    }

    /// Handles the end of a session's connection. Does nothing if the session already uses another connection. Keeps
    /// the session for a reconnect if the connection broke and the limits allow another session without a connection.
    /// In all other cases, ends the session. A separate task then deletes the session's keys.
    pub(super) fn leave(&self, session: SessionId, outbox: &Rc<Outbox>, is_broken: bool) {
        let mut shared = self.shared.borrow_mut();
        let uses = |known: &Session| known.outbox.as_ref().is_some_and(|current| Rc::ptr_eq(current, outbox));
        let may_wait = is_broken && self.may_wait(&shared);
        match shared.sessions.get_mut(&session).filter(|known| uses(known)) {
            Some(known) if may_wait => {
                known.outbox = None;
                shared.absent += 1;
                shared.watches.remove_client(session);
            }
            Some(_) => self.end_in(&mut shared, session),
            None => {}
        }
        self.keep_within_limit(&mut shared);
    }

    /// Returns true if one more session may remain without a connection.
    ///
    /// The number of such sessions is limited, because clients could otherwise fill the memory by reconnecting
    /// repeatedly. The server would then end the sessions of other clients.
    fn may_wait(&self, shared: &Shared) -> bool {
        shared.absent < self.config.max_connections && self.has_room_in(shared)
    }

    /// Returns true if a client with a session is connected from this address.
    pub(super) fn has_client_at(&self, address: IpAddr) -> bool {
        let shared = self.shared.borrow();
        shared.sessions.values().any(|known| known.outbox.as_ref().is_some_and(|outbox| outbox.peer.ip() == address))
    }

    /// Returns the host and the port of each announced workers' store whose run has a client nearby. A client is nearby
    /// if `is_near` returns true for its address.
    ///
    /// A store that serves all jobs has no agent that notifies it of the workers' stores. Instead, the agent with group
    /// rank 0 of each job writes the address of the round's workers' store to a leased key. The key starts with
    /// [`WORKERS_STORES`].
    pub(super) fn announced(&self, is_near: impl Fn(IpAddr) -> bool) -> Vec<(String, u16)> {
        let shared = self.shared.borrow();
        let near = |known: &Session| known.outbox.as_ref().is_some_and(|outbox| is_near(outbox.peer.ip()));
        let runs: HashSet<&str> =
            shared.sessions.values().filter(|known| near(known)).map(|known| known.run_id.as_str()).collect();
        // Use only the latest key of each run, because another agent may have had group rank 0 in an earlier round.
        let mut latest = HashMap::new();
        let entries = shared.state.entries().range::<str, _>((Bound::Included(WORKERS_STORES), Bound::Unbounded));
        for (_, stored) in entries.take_while(|(key, _)| key.starts_with(WORKERS_STORES)) {
            let owner = stored.lease.and_then(|session| shared.sessions.get(&session));
            if let Some(run) = owner.map(|owner| owner.run_id.as_str()).filter(|run| runs.contains(run)) {
                let known = latest.entry(run).or_insert(stored);
                if known.mod_revision < stored.mod_revision {
                    *known = stored;
                }
            }
        }
        latest.values().filter_map(|stored| address_of(&stored.value)).collect()
    }

    /// Notifies all clients that the store was closed.
    pub(super) fn say_farewell(&self) {
        for outbox in self.shared.borrow().sessions.values().filter_map(|session| session.outbox.as_ref()) {
            outbox.refuse(LostKind::Closed, "the store was closed".into());
        }
    }

    /// Returns true if the memory limit leaves room for one more connection. An eighth of the memory is kept free for
    /// requests on open connections, because the server ends sessions when the limit is exceeded.
    pub(super) fn has_room(&self) -> bool {
        self.has_room_in(&self.shared.borrow())
    }

    fn has_room_in(&self, shared: &Shared) -> bool {
        self.used(shared) + CONNECTION_COST <= self.config.max_bytes / 8 * 7
    }

    /// Records how many bytes of an incomplete request a client has sent. Ends sessions if the memory limit is then
    /// exceeded.
    pub(super) fn hold(&self, outbox: &Outbox, unparsed: usize) {
        outbox.set_unparsed(unparsed);
        self.keep_within_limit(&mut self.shared.borrow_mut());
    }

    fn used(&self, shared: &Shared) -> usize {
        self.held.get() + shared.watches.bytes() + shared.state.entry_bytes() + shared.absent * ABSENT_COST
    }

    /// Ends sessions until the memory use is within its limit (HUB-3). Ending sessions is sufficient, because the
    /// stored keys have a smaller limit of their own.
    fn keep_within_limit(&self, shared: &mut Shared) {
        let limit = self.config.max_bytes;
        while self.used(shared) > limit {
            let present = shared.sessions.iter().filter_map(|(id, known)| Some((id, known.outbox.as_ref()?)));
            let held = present.map(|(id, outbox)| (outbox.holds() + shared.watches.bytes_of(*id), *id, outbox));
            let Some((bytes, session, outbox)) = held.max_by_key(|(bytes, id, _)| (*bytes, *id)) else { break };
            let said = format!(
                "the store is full: of what its clients have begun to send, not read or watch, this one has the most, \
                 {bytes} bytes"
            );
            self.notices.say(format!("refused {}: {said}", outbox.peer));
            outbox.abandon(LostKind::Limit, said);
            self.end_in(shared, session);
        }
        let used = self.used(shared);
        shared.peak = shared.peak.max(used);
        if shared.peak > 2 * used && shared.peak - used > limit / 16 {
            shared.peak = used;
            self.trim.notify_one();
        }
    }

    fn end_in(&self, shared: &mut Shared, session: SessionId) {
        if let Some(over) = shared.sessions.remove(&session) {
            shared.absent -= usize::from(over.outbox.is_none());
            shared.watches.remove_client(session);
            shared.leases.end(session);
            shared.ended.push(session);
            self.sessions.store(shared.sessions.len(), Ordering::Relaxed);
            self.reap.notify_one();
        }
    }

    /// Returns the maximum number of steps that a request takes. [`super::turns`] defines a step.
    pub(super) fn steps(&self, request: &Request) -> usize {
        let state = &self.shared.borrow().state;
        let more = match request {
            Request::Txn { txn, .. } => state.steps(txn),
            Request::Watch { watch, snapshot: true, .. } => state.steps_of_snapshot(watch),
            Request::Watch { .. }
            | Request::Unwatch(_)
            | Request::KeepAlive { .. }
            | Request::Hello(_)
            | Request::Prove { .. } => 0,
        };
        more.saturating_add(REQUEST)
    }

    /// Waits until another connection may be accepted. If too many connections have not completed the handshake, closes
    /// one of those connections.
    pub(super) async fn make_room(&self, descriptors: usize) {
        loop {
            let most = limit(self.config.max_connections, descriptors);
            let room = self.unproven.borrow_mut().make_room(most, Instant::now());
            match room {
                Room::Free => return,
                Room::Close(connection, address) => {
                    connection.abort();
                    if let Some(left_out) = self.closed.borrow_mut().admit(Instant::now()) {
                        let more = if left_out > 0 {
                            format!(" ({left_out} more since the last message)")
                        } else {
                            String::new()
                        };
                        self.notices.say(format!(
                            "closed a connection from {address}: it has not completed the handshake, and {most} such connections are the limit{more}"
                        ));
                    }
                    return;
                }
                Room::After(rest) => {
                    // Ignore the result, because the next iteration checks the limit again.
                    let _ = timeout(rest, self.left.notified()).await;
                }
            }
        }
    }

    /// Executes a request in an open session.
    pub(super) fn request(&self, session: SessionId, request: Request, outbox: &Outbox) -> Result<(), Refusal> {
        let mut shared = self.shared.borrow_mut();
        self.carry_out(&mut shared, session, request, outbox)?;
        self.keep_within_limit(&mut shared);
        Ok(())
    }

    fn carry_out(
        &self,
        shared: &mut Shared,
        session: SessionId,
        request: Request,
        outbox: &Outbox,
    ) -> Result<(), Refusal> {
        let answer = match request {
            Request::Txn { tag, txn } => self.txn(shared, session, tag, &txn)?,
            Request::Watch { tag, watch, snapshot } => {
                return Self::watch(shared, session, tag, watch, snapshot, outbox);
            }
            Request::Unwatch(watch) => {
                shared.watches.remove(session, &watch);
                return Ok(());
            }
            Request::KeepAlive { sent } => match self.renew(&mut shared.leases, session) {
                Some(pace) => Answer::Alive { sent, wall_ns: wall_now(), pace },
                None => return Ok(()),
            },
            Request::Hello(_) | Request::Prove { .. } => {
                return Err((LostKind::Protocol, "a second handshake".into()));
            }
        };
        answer_to(outbox, &answer)
    }

    fn txn(&self, shared: &mut Shared, session: SessionId, tag: u64, txn: &Txn) -> Result<Answer, Refusal> {
        let done = shared.state.txn(session, txn).map_err(|error| (LostKind::Limit, error.to_string()))?;
        if let Some(revision) = &done.revision {
            self.publish(shared, revision);
        }
        let results = done.results.map_err(|error| (LostKind::Limit, error.to_string()))?;
        Ok(Answer::Reply { tag, ok: done.ok, revision: shared.state.revision(), results })
    }

    fn watch(
        shared: &mut Shared,
        session: SessionId,
        tag: u64,
        watch: Watch,
        snapshot: bool,
        outbox: &Outbox,
    ) -> Result<(), Refusal> {
        if shared.watches.count(session) >= MAX_WATCHES {
            return Err((LostKind::Limit, format!("more than {MAX_WATCHES} watches")));
        }
        let results = if snapshot {
            let entries = shared.state.snapshot(&watch).map_err(|error| (LostKind::Limit, error.to_string()))?;
            entries.into_iter().map(|entry| OpResult::Entry(Some(entry))).collect()
        } else {
            Vec::new()
        };
        let revision = shared.state.revision();
        answer_to(outbox, &Answer::Reply { tag, ok: true, revision, results })?;
        shared.watches.add(session, watch);
        Ok(())
    }

    fn publish(&self, shared: &mut Shared, revision: &Revision) {
        if let Some(journal) = &self.journal {
            journal.revise(revision);
        }
        for (positions, clients) in shared.watches.deliveries(revision) {
            let changes = positions.iter().map(|position| &revision.changes[*position]);
            let message = Message::new(&self.held, encode_changes(revision.number, changes));
            for client in clients {
                let outbox = shared.sessions.get(&client).and_then(|known| known.outbox.as_ref());
                if let Some(slow) = outbox.filter(|outbox| !outbox.push(Rc::clone(&message))) {
                    let (kind, message) = too_slow();
                    slow.refuse(kind, message);
                    self.end_in(shared, client);
                }
            }
        }
    }

    /// Deletes the keys of ended sessions. Sessions that end in the same iteration of the event loop are handled
    /// together. Never returns.
    pub(super) async fn reap(self: Rc<Self>) {
        loop {
            self.reap.notified().await;
            // Yield first, so that all connections that closed in this iteration of the event loop are handled before
            // any keys are deleted.
            yield_now().await;
            let mut shared = self.shared.borrow_mut();
            let ended = std::mem::take(&mut shared.ended);
            if let Some(journal) = &self.journal {
                journal.end(&ended);
            }
            if let Some(revision) = shared.state.end_sessions(&ended) {
                self.publish(&mut shared, &revision);
            }
            self.keep_within_limit(&mut shared);
        }
    }

    /// Waits until all earlier changes are on disk. The queued messages may be sent only after that (JOURNAL-1).
    pub(super) async fn settled(&self) {
        if let Some(journal) = &self.journal {
            journal.settled().await;
        }
    }

    /// Saves changes to disk, one batch at a time. Returns only if a save fails. The store then has to stop.
    pub(super) async fn save(self: Rc<Self>) -> StateError {
        let Some(journal) = &self.journal else { return pending().await };
        loop {
            journal.changed().await;
            let shared = self.shared.borrow();
            match journal.save(&shared.state, shared.next_session) {
                Ok(None) => {}
                Ok(Some(line)) => self.notices.say(line),
                Err(error) => return error,
            }
        }
    }

    /// Saves the last changes and marks the state file as complete. The caller must not change the state after this
    /// call.
    pub(super) fn finish(&self) {
        let shared = self.shared.borrow();
        if let Some(journal) = &self.journal
            && let Err(error) = journal.finish(&shared.state, shared.next_session)
        {
            self.notices.say(error.to_string());
        }
    }

    /// Returns freed memory to the kernel after the memory use has dropped. Never returns.
    pub(super) async fn trim(self: Rc<Self>) {
        loop {
            self.trim.notified().await;
            tokio::time::sleep(TRIM_AFTER).await;
            trim_heap();
        }
    }

    /// Ends sessions whose keep-alive deadline has passed. Never returns.
    pub(super) async fn expire(self: Rc<Self>) {
        loop {
            let now = boot_now();
            let planned = self.shared.borrow_mut().leases.plan(now);
            tokio::select! {
                () = self.replan.notified() => {}
                () = tokio::time::sleep(Duration::from_nanos(planned.map_or(0, |at| at.saturating_sub(now)))), if planned.is_some() => {}
            }
            self.shared.borrow_mut().leases.look(boot_now());
            // Yield before expiring sessions, so that the tasks of the connections can read keep-alives that have
            // already arrived.
            yield_now().await;
            yield_now().await;
            self.end_silent();
        }
    }

    fn end_silent(&self) {
        let shared = &mut *self.shared.borrow_mut();
        for session in shared.leases.expired() {
            match shared.sessions.get(&session).and_then(|known| known.outbox.as_ref()) {
                // Keep a session whose requests are waiting for a turn, because one of them may be a keep-alive.
                Some(outbox) if outbox.waits.get() => {
                    self.renew(&mut shared.leases, session);
                    continue;
                }
                Some(outbox) => {
                    outbox.refuse(LostKind::Silent, "the store did not hear from this client in time".into());
                }
                None => {}
            }
            self.end_in(shared, session);
        }
    }
}

/// Counts a connection until this value is dropped.
pub(super) struct Slot {
    hub: Rc<Hub>,
    /// Number of the connection in [`Hub::unproven`]. `None` once the handshake is complete.
    unproven: Option<u64>,
}

impl Slot {
    /// Counts a connection that has not completed the handshake. `number` is its number in [`Hub::unproven`].
    pub(super) fn new(hub: &Rc<Hub>, number: u64) -> Self {
        Self { hub: Rc::clone(hub), unproven: Some(number) }
    }

    /// Records that the connection has completed the handshake.
    pub(super) fn prove(&mut self) {
        if let Some(number) = self.unproven.take() {
            self.hub.unproven.borrow_mut().remove(number);
            self.hub.proven.update(|count| count + 1);
            self.hub.left.notify_one();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(number) = self.unproven {
            self.hub.unproven.borrow_mut().remove(number);
            self.hub.left.notify_one();
        } else {
            self.hub.proven.update(|count| count - 1);
        }
    }
}

fn answer_to(outbox: &Outbox, answer: &Answer) -> Result<(), Refusal> {
    if outbox.push(outbox.message(answer.encode())) { Ok(()) } else { Err(too_slow()) }
}

fn too_slow() -> Refusal {
    (LostKind::Slow, "this client reads too slowly: more than 8 MiB were waiting for it".into())
}

#[cfg(test)]
mod tests;
