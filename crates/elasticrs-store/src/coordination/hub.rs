//! What all connections of a server share: the state, who is to hear of what, and who is still there.
//!
//! - **HUB-1** everything that a revision tells a client is queued before the reply of that revision is;
//! - **HUB-2** all sessions that end in one wake-up end in one revision;
//! - **HUB-3** what clients make the server hold stays below its limit: whoever holds the most is ended;
//! - **HUB-4** a session is its lease, not its connection. The end of the connection that it uses ends it, for a process that
//!   is gone is the one thing that closes it; a connection that broke leaves it absent until it is taken up again, or its
//!   time to live is over.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::pending;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use elasticrs_core::sys::heap;
use elasticrs_runtime::clock::{boot_now, wall_now};
use elasticrs_runtime::notices::Notices;
use tokio::sync::Notify;
use tokio::task::{JoinSet, yield_now};

use super::auth;
use super::durable::{Granted, Image, StateError, StateFile};
use super::journal::Journal;
use super::leases::Leases;
use super::memory::{CONNECTION_COST, Held, Message};
use super::outbox::Outbox;
use super::protocol::{Answer, Hello, Pace, Request, Secret, StoreId, WatchFrom, encode_changes};
use super::state::{Revision, SessionId, State};
use super::types::{LostKind, OpResult, Txn};
use super::watches::{Watches, covered};

/// The most watches of one client.
const MAX_WATCHES: usize = 1024;

/// What an absent session takes beside its keys.
const ABSENT_COST: usize = 512;

/// How long freed memory is left to the allocator, which may need it again at once.
const TRIM_AFTER: Duration = Duration::from_millis(100);

/// How a server works.
#[derive(Debug, Clone)]
pub struct Config {
    /// The run it serves; `None`: any, and all of them see the same keys.
    pub run_id: Option<String>,
    pub token: Option<Vec<u8>>,
    pub max_connections: usize,
    /// Bytes of all that clients make it hold: keys, values and history, watches, what has come of requests and what was
    /// not read of answers.
    pub max_bytes: usize,
    /// How long a request may take from its first byte to its last.
    pub request_timeout: Duration,
    pub state: Option<Durable>,
}

/// What a store keeps that others go on from.
#[derive(Debug, Clone)]
pub struct Durable {
    /// Where it is kept.
    pub file: PathBuf,
    /// The shortest time to live of a session: so long may the store be away.
    pub grace: Duration,
}

impl Durable {
    /// How many attempts of this interval make up the grace.
    fn attempts_at(&self, interval_ms: u32) -> u16 {
        let attempts = self.grace.as_millis().div_ceil(u128::from(interval_ms));
        u16::try_from(attempts).unwrap_or(u16::MAX)
    }
}

/// Connections that a server takes when nobody says how many.
pub const MAX_CONNECTIONS: usize = 16_384;
/// What a server holds when nobody says how much.
pub const MAX_BYTES: usize = 256 << 20;
/// [`Config::request_timeout`] when nobody says how long: the largest request at a fifth of a slow line's megabit.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A session that has not ended.
#[derive(Debug)]
struct Session {
    secret: Secret,
    /// Of its connection; `None`: it is absent.
    outbox: Option<Rc<Outbox>>,
}

/// What a session has at its beginning, and when it is taken up again.
pub(super) struct Entered {
    pub(super) session: SessionId,
    pub(super) secret: Secret,
    pub(super) revision: u64,
    pub(super) pace: Pace,
}

#[derive(Debug)]
struct Shared {
    state: State,
    watches: Watches,
    leases: Leases,
    sessions: HashMap<SessionId, Session>,
    /// How many of them have no connection.
    absent: usize,
    /// Sessions that are over, but whose keys are still there.
    ended: Vec<SessionId>,
    next_session: SessionId,
    /// The most that was in use since the kernel was last given memory back.
    peak: usize,
}

/// One per server; lives on its thread.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) config: Config,
    /// Our name, then those of the stores whose state this one goes on with, the newest first.
    pub(super) ids: Vec<StoreId>,
    pub(super) notices: Notices,
    pub(super) sessions: Arc<AtomicUsize>,
    pub(super) tasks: RefCell<JoinSet<()>>,
    /// Where bytes are read to, whosever they are.
    pub(super) scratch: RefCell<Vec<u8>>,
    pub(super) held: Rc<Held>,
    /// Of a store that keeps its state.
    pub(super) journal: Option<Journal>,
    shared: RefCell<Shared>,
    reap: Notify,
    replan: Notify,
    trim: Notify,
}

/// Why a request ends its connection.
pub(super) type Refusal = (LostKind, String);

impl Hub {
    pub(super) fn new(config: Config, ids: Vec<StoreId>, notices: Notices, sessions: Arc<AtomicUsize>) -> Self {
        let shared = Shared {
            state: State::new(config.max_bytes),
            watches: Watches::default(),
            leases: Leases::default(),
            sessions: HashMap::new(),
            absent: 0,
            ended: Vec::new(),
            next_session: 1,
            peak: 0,
        };
        Self {
            config,
            ids,
            notices,
            sessions,
            tasks: RefCell::default(),
            scratch: RefCell::new(vec![0; 64 * 1024]),
            held: Rc::default(),
            journal: None,
            shared: RefCell::new(shared),
            reap: Notify::new(),
            replan: Notify::new(),
            trim: Notify::new(),
        }
    }

    /// Restores the state of a previous store. Its sessions are not connected, and each has its full time to live from
    /// now on to reconnect.
    pub(super) fn going_on_with(mut self, file: StateFile, mut image: Image) -> Self {
        self.shared.get_mut().next_session = image.next_session;
        // Use the same start time for all sessions, so that all sessions that do not reconnect expire together, in one
        // revision.
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

    /// Opens a new session or resumes an existing one.
    pub(super) fn enter(&self, outbox: &Rc<Outbox>, hello: &Hello) -> Result<Entered, Refusal> {
        if hello.confirmed.is_some_and(|id| !self.ids.contains(&id)) {
            let said = "this is not the store that this node has met before: it was started empty, or goes on with \
                        another copy of that store's state";
            return Err((LostKind::Other, said.into()));
        }
        match &hello.resume {
            Some((session, secret)) => self.resume(outbox, *session, secret),
            None => self.begin(outbox, hello.interval_ms, hello.attempts),
        }
    }

    fn begin(&self, outbox: &Rc<Outbox>, interval_ms: u32, attempts: u16) -> Result<Entered, Refusal> {
        let least = self.config.state.as_ref().map_or(0, |state| state.attempts_at(interval_ms));
        let attempts = attempts.max(least);
        let secret = auth::random()
            .map_err(|error| (LostKind::Limit, format!("the store has no secret for a session: {error}")))?;
        let mut shared = self.shared.borrow_mut();
        let session = shared.next_session;
        shared.next_session += 1;
        shared.state.begin_session(session);
        shared.sessions.insert(session, Session { secret, outbox: Some(Rc::clone(outbox)) });
        self.sessions.store(shared.sessions.len(), Ordering::Relaxed);
        let pace = shared.leases.begin(session, interval_ms, attempts, boot_now());
        self.replan.notify_one();
        if let Some(journal) = &self.journal {
            journal.begin(session, Granted { secret, interval_ms, attempts, ttl_ms: pace.ttl_ms });
        }
        Ok(Entered { session, secret, revision: shared.state.revision(), pace })
    }

    /// Whoever has the secret has the session, also where its last connection still seems to live: that one is dropped.
    fn resume(&self, outbox: &Rc<Outbox>, session: SessionId, secret: &Secret) -> Result<Entered, Refusal> {
        let mut shared = self.shared.borrow_mut();
        let shared = &mut *shared;
        let known = shared.sessions.get_mut(&session).filter(|known| auth::is_same(&known.secret, secret));
        let pace = known.as_ref().and_then(|_| self.renew(&mut shared.leases, session));
        let (Some(known), Some(pace)) = (known, pace) else {
            return Err((LostKind::Gone, "the session of this node has ended here".into()));
        };
        match known.outbox.replace(Rc::clone(outbox)) {
            Some(last) => last.discard(),
            None => shared.absent -= 1,
        }
        shared.watches.remove_client(session);
        self.replan.notify_one();
        Ok(Entered { session, secret: *secret, revision: shared.state.revision(), pace })
    }

    fn restore(&self, session: SessionId, granted: &Granted, now: u64) {
        let Granted { secret, interval_ms, attempts, ttl_ms } = *granted;
        let mut shared = self.shared.borrow_mut();
        shared.next_session = shared.next_session.max(session + 1);
        shared.state.begin_session(session);
        shared.sessions.insert(session, Session { secret, outbox: None });
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

    /// A connection has ended. If the session still uses it, it is over, and its keys go with all that end in this wake-up;
    /// after a break, it is absent.
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

    /// Whether there is room for one more absent session: clients that only connect and break off end nobody.
    fn may_wait(&self, shared: &Shared) -> bool {
        shared.absent < self.config.max_connections && self.has_room_in(shared)
    }

    /// Tells all clients that the store ends and will not be there again.
    pub(super) fn say_farewell(&self) {
        for outbox in self.shared.borrow().sessions.values().filter_map(|session| session.outbox.as_ref()) {
            outbox.refuse(LostKind::Closed, "the store was closed".into());
        }
    }

    /// Whether there is room for one more connection. An eighth is left for what is said on those that there are: strangers
    /// who only connect end nobody.
    pub(super) fn has_room(&self) -> bool {
        self.has_room_in(&self.shared.borrow())
    }

    fn has_room_in(&self, shared: &Shared) -> bool {
        self.used(shared) + CONNECTION_COST <= shared.state.shared_limit() / 8 * 7
    }

    /// A client has begun a request, of which so much has come.
    pub(super) fn hold(&self, outbox: &Outbox, unparsed: usize) {
        outbox.set_unparsed(unparsed);
        self.keep_within_limit(&mut self.shared.borrow_mut());
    }

    fn used(&self, shared: &Shared) -> usize {
        self.held.get() + shared.watches.bytes() + shared.state.entry_bytes() + shared.absent * ABSENT_COST
    }

    /// HUB-3. Keys are limited by themselves, so it always ends.
    fn keep_within_limit(&self, shared: &mut Shared) {
        let limit = shared.state.shared_limit();
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

    /// Carries out a request of an open session.
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
            Request::Watch { tag, watch } => return Self::watch(shared, session, tag, watch, outbox),
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
        watch: WatchFrom,
        outbox: &Outbox,
    ) -> Result<(), Refusal> {
        let WatchFrom { watch, snapshot, from_revision } = watch;
        let revision = shared.state.revision();
        let first = from_revision.unwrap_or(revision + 1);
        let Some(history) = shared.state.history_from(first) else {
            // The reply names the oldest revision that can still be told.
            let results = vec![OpResult::Count(shared.state.oldest())];
            return answer_to(outbox, &Answer::Reply { tag, ok: false, revision, results });
        };
        if shared.watches.count(session) >= MAX_WATCHES {
            return Err((LostKind::Limit, format!("more than {MAX_WATCHES} watches")));
        }
        let results = if snapshot {
            let entries = shared.state.snapshot(&watch).map_err(|error| (LostKind::Limit, error.to_string()))?;
            entries.into_iter().map(|entry| OpResult::Entry(Some(entry))).collect()
        } else {
            Vec::new()
        };
        answer_to(outbox, &Answer::Reply { tag, ok: true, revision, results })?;
        for past in history {
            let changes = covered(past, &watch);
            if !changes.is_empty() && !outbox.push(outbox.message(encode_changes(past.number, changes.into_iter()))) {
                return Err(too_slow());
            }
        }
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

    /// Deletes the keys of ended sessions, batch after batch. Never ends by itself.
    pub(super) async fn reap(self: Rc<Self>) {
        loop {
            self.reap.notified().await;
            // Those that end in the same wake-up have been woken before this task was, and are read first.
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

    /// Waits until the queued messages may be sent. Because of JOURNAL-1, this is when the changes made before them are
    /// on disk.
    pub(super) async fn settled(&self) {
        if let Some(journal) = &self.journal {
            journal.settled().await;
        }
    }

    /// Saves changes to disk, one batch after another, until a save fails. After that the store has to stop.
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

    /// Nothing changes any more.
    pub(super) fn finish(&self) {
        let shared = self.shared.borrow();
        if let Some(journal) = &self.journal
            && let Err(error) = journal.finish(&shared.state, shared.next_session)
        {
            self.notices.say(error.to_string());
        }
    }

    /// Gives the kernel back what many clients, or one with much, have left behind. Never ends by itself.
    pub(super) async fn trim(self: Rc<Self>) {
        loop {
            self.trim.notified().await;
            tokio::time::sleep(TRIM_AFTER).await;
            heap::trim();
        }
    }

    /// Ends sessions that have been silent for too long. Never ends by itself.
    pub(super) async fn expire(self: Rc<Self>) {
        loop {
            let now = boot_now();
            let planned = self.shared.borrow_mut().leases.plan(now);
            tokio::select! {
                () = self.replan.notified() => {}
                () = tokio::time::sleep(Duration::from_nanos(planned.map_or(0, |at| at.saturating_sub(now)))), if planned.is_some() => {}
            }
            self.shared.borrow_mut().leases.look(boot_now());
            // What has arrived is read before anybody is called silent.
            yield_now().await;
            yield_now().await;
            let mut shared = self.shared.borrow_mut();
            for session in shared.leases.expired() {
                if let Some(outbox) = shared.sessions.get(&session).and_then(|known| known.outbox.as_ref()) {
                    outbox.refuse(LostKind::Silent, "the store did not hear from this client in time".into());
                }
                self.end_in(&mut shared, session);
            }
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
