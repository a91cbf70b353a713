//! What all connections of a server share: the state, who is to hear of what, and who is still there.
//!
//! - **HUB-1** everything that a revision tells a client is queued before the reply of that revision is;
//! - **HUB-2** all sessions that end in one wake-up end in one revision.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::{JoinSet, yield_now};

use super::clock::{boot_ns, wall_ns};
use super::leases::Leases;
use super::outbox::Outbox;
use super::protocol::{Answer, Pace, Request, encode_changes};
use super::server::Config;
use super::state::{Revision, SessionId, State};
use super::types::{LostKind, OpResult, Txn, Watch};
use super::watches::{Watches, covered};
use crate::notices::Notices;

/// The most watches of one client.
const MAX_WATCHES: usize = 1024;

#[derive(Debug)]
struct Shared {
    state: State,
    watches: Watches,
    leases: Leases,
    open: HashMap<SessionId, Rc<Outbox>>,
    /// Sessions that are over, but whose keys are still there.
    ended: Vec<SessionId>,
    next_session: SessionId,
}

/// One per server; lives on its thread.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) config: Config,
    pub(super) notices: Notices,
    pub(super) sessions: Arc<AtomicUsize>,
    pub(super) tasks: RefCell<JoinSet<()>>,
    /// Where bytes are read to, whosever they are.
    pub(super) scratch: RefCell<Vec<u8>>,
    shared: RefCell<Shared>,
    reap: Notify,
    replan: Notify,
}

/// Why a request ends its connection.
pub(super) type Refusal = (LostKind, String);

impl Hub {
    pub(super) fn new(config: Config, notices: Notices, sessions: Arc<AtomicUsize>) -> Self {
        let shared = Shared {
            state: State::new(config.max_bytes),
            watches: Watches::default(),
            leases: Leases::new(),
            open: HashMap::new(),
            ended: Vec::new(),
            next_session: 1,
        };
        Self {
            config,
            notices,
            sessions,
            tasks: RefCell::default(),
            scratch: RefCell::new(vec![0; 64 * 1024]),
            shared: RefCell::new(shared),
            reap: Notify::new(),
            replan: Notify::new(),
        }
    }

    /// Begins a session: its number, the revision, and its pace.
    pub(super) fn begin(&self, outbox: &Rc<Outbox>, interval_ms: u32, attempts: u16) -> (SessionId, u64, Pace) {
        let mut shared = self.shared.borrow_mut();
        let session = shared.next_session;
        shared.next_session += 1;
        shared.state.begin_session(session);
        shared.open.insert(session, Rc::clone(outbox));
        self.sessions.store(shared.open.len(), Ordering::Relaxed);
        let pace = shared.leases.begin(session, interval_ms, attempts, boot_ns());
        self.replan.notify_one();
        (session, shared.state.revision(), pace)
    }

    /// The session is over; its keys go with all that end in this wake-up.
    pub(super) fn end(&self, session: SessionId) {
        self.end_in(&mut self.shared.borrow_mut(), session);
    }

    fn end_in(&self, shared: &mut Shared, session: SessionId) {
        if shared.open.remove(&session).is_some() {
            shared.watches.remove_client(session);
            shared.leases.end(session);
            shared.ended.push(session);
            self.sessions.store(shared.open.len(), Ordering::Relaxed);
            self.reap.notify_one();
        }
    }

    /// Carries out a request of an open session.
    pub(super) fn request(&self, session: SessionId, request: Request, outbox: &Outbox) -> Result<(), Refusal> {
        let mut shared = self.shared.borrow_mut();
        let answer = match request {
            Request::Txn { tag, txn } => self.txn(&mut shared, session, tag, &txn)?,
            Request::Watch { tag, watch, snapshot, from_revision } => {
                return Self::watch(&mut shared, session, tag, watch, snapshot, from_revision, outbox);
            }
            Request::Unwatch(watch) => {
                shared.watches.remove(session, &watch);
                return Ok(());
            }
            Request::KeepAlive { sent } => match shared.leases.renew(session, boot_ns()) {
                Some(pace) => Answer::Alive { sent, wall_ns: wall_ns(), pace },
                None => return Ok(()),
            },
            Request::Hello(_) | Request::Prove(_) => {
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
        from_revision: Option<u64>,
        outbox: &Outbox,
    ) -> Result<(), Refusal> {
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
            if !changes.is_empty() && !outbox.push(Rc::new(encode_changes(past.number, changes.into_iter()))) {
                return Err(too_slow());
            }
        }
        shared.watches.add(session, watch);
        Ok(())
    }

    fn publish(&self, shared: &mut Shared, revision: &Revision) {
        for delivery in shared.watches.deliveries(revision) {
            let changes = delivery.changes.iter().map(|position| &revision.changes[*position]);
            let message = Rc::new(encode_changes(revision.number, changes));
            for client in delivery.clients {
                let slow = shared.open.get(&client).filter(|outbox| !outbox.push(Rc::clone(&message)));
                if let Some(outbox) = slow.cloned() {
                    let (kind, message) = too_slow();
                    outbox.refuse(kind, message);
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
            if let Some(revision) = shared.state.end_sessions(&ended) {
                self.publish(&mut shared, &revision);
            }
        }
    }

    /// Ends sessions that have been silent for too long. Never ends by itself.
    pub(super) async fn expire(self: Rc<Self>) {
        loop {
            let now = boot_ns();
            let planned = self.shared.borrow_mut().leases.plan(now);
            tokio::select! {
                () = self.replan.notified() => {}
                () = sleep_ns(planned.map(|planned| planned.saturating_sub(now))) => {}
            }
            self.shared.borrow_mut().leases.look(boot_ns());
            // What has arrived is read before anybody is called silent.
            yield_now().await;
            yield_now().await;
            let mut shared = self.shared.borrow_mut();
            for session in shared.leases.expired() {
                if let Some(outbox) = shared.open.get(&session) {
                    outbox.refuse(LostKind::Silent, "the store did not hear from this client in time".into());
                }
                self.end_in(&mut shared, session);
            }
        }
    }
}

async fn sleep_ns(duration: Option<u64>) {
    match duration {
        Some(duration) => tokio::time::sleep(Duration::from_nanos(duration)).await,
        None => std::future::pending().await,
    }
}

fn answer_to(outbox: &Outbox, answer: &Answer) -> Result<(), Refusal> {
    if outbox.push(Rc::new(answer.encode())) { Ok(()) } else { Err(too_slow()) }
}

fn too_slow() -> Refusal {
    (LostKind::Slow, "this client reads too slowly: more than 8 MiB were waiting for it".into())
}
