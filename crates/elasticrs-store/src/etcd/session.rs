//! The etcd backend of a session: executes requests in order, and resumes watches after a reconnect.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use elasticrs_sys::clock::boot_now;
use tokio::sync::watch;
use tokio::time::timeout;

use super::dial::{Link, Options};
use super::errors::{EtcdError, cancel_error};
use super::grpc::{CallError, Channel, Duplex};
use super::jobs::{Desk, Done, Job, not_behind};
use super::lease::{Beats, Leases, terms};
use super::mapping::{Keys, Write, unsigned};
use super::messages as pb;
use super::open::{Opened, again, compare, revoke};
use super::tasks::{Retries, Task, Tasks, What};
use super::watching::{WatchUpdate, Watches};
use crate::session::client::{Guard, Request};
use crate::session::core::{Core, PastOutage, Policy};
use crate::session::error::{ConnectionEnd, Failure, Step, StoreError};
use crate::session::events::{Event, Events, SILENT};
use crate::session::network::endpoint;
use crate::session::outage::{Outage, Pauses};
use crate::session::watched::ChangeSet;
use crate::session::{Backend, Dialing, Session};
use crate::types::LostKind;

type Boxed<T> = Pin<Box<dyn Future<Output = T>>>;
/// Result of a job (work that sends requests to etcd): what it has done, or why it failed.
type JobResult = Result<Done, Failure>;

/// A connection of the session, and the calls in progress on it.
pub(super) struct Connection {
    link: Link,
    beats: Beats,
    watching: Option<Duplex<pb::WatchResponse>>,
    running: Option<Boxed<JobResult>>,
    /// Future that checks whether all endpoints belong to the same cluster. `None` once the check has finished.
    comparing: Option<Boxed<Result<(), StoreError>>>,
}

/// An event on a connection.
pub(super) enum CallEvent {
    Beat(Result<pb::KeepAliveResponse, CallError>),
    Watch(Result<pb::WatchResponse, CallError>),
    Done(JobResult),
    Broken(StoreError),
    Compared(Result<(), StoreError>),
}

/// Time limit for executing the pending requests and revoking the lease after `close` was called.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Delays between reconnection attempts.
const PAUSES: Pauses =
    Pauses { first: Duration::from_millis(10), second: Duration::from_millis(100), last: Duration::from_secs(1) };

pub(super) struct Etcd<'a> {
    options: &'a Rc<Options>,
    events: &'a Events,
    cluster: u64,
    is_compared: bool,
    keys: Rc<Keys>,
    leases: Leases,
    tasks: Tasks,
    /// State for retrying watches that failed recently. `None` if none failed.
    watch_retries: Option<Retries>,
    write: Write,
    watches: Watches,
    member: usize,
    /// Highest revision in any answer from etcd so far.
    seen: i64,
    /// Highest revision that a watch has reported. It can exceed `seen`, because watches do not update `seen`.
    reported: u64,
    /// Passes the current connection to the code that detects dead sessions. `None` while there is no connection to
    /// etcd.
    channels: watch::Sender<Option<Channel>>,
}

/// Creates a session on a connection that is already open.
pub(super) fn session<'a>(
    options: &'a Rc<Options>,
    opened: Opened,
    events: &'a Events,
    guard: &'a dyn Guard,
    channels: watch::Sender<Option<Channel>>,
) -> (Session<'a, Etcd<'a>>, Link) {
    let Opened { link, member, cluster, keys, ttl, sent, marker } = opened;
    let members: Vec<_> = options.endpoints.iter().map(|(host, port)| endpoint(host, *port)).collect();
    let policy = Policy {
        store: format!("etcd at {}", members.join(", ")),
        pauses: PAUSES,
        close_limit: CLOSE_LIMIT,
        stall_timeout: options.stall_timeout,
        renews_by_reconnect: false,
    };
    let core = Core::new(policy, events, guard, sent, terms(ttl));
    let backend = Etcd {
        options,
        events,
        cluster,
        is_compared: false,
        leases: Leases::new(keys.lease, cluster, options.job_lease),
        keys: Rc::new(keys),
        tasks: Tasks::default(),
        watch_retries: None,
        write: Write { number: 1, marker },
        watches: Watches::default(),
        member,
        seen: marker,
        reported: 0,
        channels,
    };
    (Session { core, backend }, link)
}

impl<'a> Backend<'a> for Etcd<'a> {
    type Link = Link;
    type Connection = Connection;
    type Event = CallEvent;

    fn request(&mut self, request: Request, _frame: Vec<u8>) {
        let what = match request {
            Request::Txn { tag, txn } => What::Job(Job::Txn { tag, txn: Rc::new(txn) }),
            Request::Watch { tag, watch, snapshot } => What::Job(Job::Watch { tag, watch, snapshot }),
            Request::Unwatch(watch) => What::Unwatch(watch),
        };
        self.tasks.queue.push_back(what.into());
    }

    fn prepare(&mut self, core: &mut Core<'a>, connection: &mut Connection, now: u64) -> Step<u64> {
        // Ignore the time limits of requests during an outage, because the lease already limits the wait.
        let limit = if core.is_away() { None } else { self.tasks.attempted().min_by_key(|retries| retries.deadline()) };
        if let Some(retries) = limit.filter(|retries| now >= retries.deadline()) {
            return Err(StoreError::new(LostKind::Timeout, retries.why()).into());
        }
        let limit = limit.map_or(u64::MAX, Retries::deadline);
        if connection.running.is_none() && self.tasks.queue.is_empty() {
            core.check_closed()?;
        }
        let at = &connection.link.at;
        if now >= core.lease.overdue() {
            let seconds = core.lease.terms().patience.as_secs_f64();
            let why = format!("etcd at {at} did not answer a keep-alive within {seconds} s");
            return Err(ConnectionEnd::broken(LostKind::Timeout, why));
        }
        self.leases.beat(core, now, &mut connection.beats).map_err(|error| Failure::of(error, at))?;
        self.begin(core, connection, now)?;
        Ok(limit.min(core.lease.overdue()))
    }

    async fn next(&self, connection: &mut Connection, is_full: bool) -> CallEvent {
        let Connection { link, beats, watching, running, comparing } = connection;
        let watched = async {
            match watching {
                Some(watching) if !is_full => watching.next().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            answer = beats.next() => CallEvent::Beat(answer),
            message = watched => CallEvent::Watch(message),
            done = until(running) => CallEvent::Done(done),
            compared = until(comparing) => CallEvent::Compared(compared),
            error = link.ended() => CallEvent::Broken(error),
        }
    }

    async fn handle(&mut self, core: &mut Core<'a>, connection: &mut Connection, event: CallEvent) -> Step {
        let at = &connection.link.at;
        match event {
            CallEvent::Broken(error) => Err(ConnectionEnd::Broken(error)),
            CallEvent::Compared(compared) => {
                connection.comparing = None;
                self.is_compared = true;
                Ok(compared?)
            }
            CallEvent::Beat(answer) => {
                let answer = answer.map_err(|error| Failure::of(error, at))?;
                if self.leases.answer(core, &answer, at)?
                    && let Some(outage) = core.is_back(boot_now())
                {
                    self.skip(outage);
                }
                Ok(())
            }
            CallEvent::Watch(message) => {
                // Count an error as a failure of the watch only if etcd itself sent the error. A broken connection can
                // have other causes.
                let is_answer = !matches!(message, Err(CallError::Broken(_)));
                match message.map_err(|error| Failure::of(error, at)) {
                    Ok(message) => self.update(core, message),
                    Err(Failure::Retryable(error)) if is_answer => Err(self.watch_failed(error)),
                    Err(failure) => Err(failure.into()),
                }
            }
            CallEvent::Done(done) => {
                connection.running = None;
                let done = done?;
                self.tasks.queue.pop_front();
                self.done(connection, done).await
            }
        }
    }

    fn dial(&mut self, core: &Core<'a>) -> Dialing<'a, Link> {
        self.member = (self.member + 1) % self.options.endpoints.len().max(1);
        self.tasks.check_connection();
        let (options, member) = (self.options, self.member);
        let patience = core.dial_patience();
        Box::pin(async move { again(options, member, patience).await.map_err(Failure::Retryable) })
    }

    fn outage_reason(_outage: &Outage, _answered: u64, error: &StoreError) -> StoreError {
        StoreError::new(LostKind::Silent, format!("{SILENT} ({})", error.message))
    }

    async fn enter(&mut self, core: &mut Core<'a>, mut link: Link) -> Step<Connection> {
        self.channels.send_replace(Some(link.channel.clone()));
        let beats = match link.channel.stream("/etcdserverpb.Lease/LeaseKeepAlive").await {
            Ok(beats) => beats,
            Err(error) => {
                let failure = Failure::of(error, &link.at);
                return Err(explained(&mut link, failure.into()).await);
            }
        };
        core.lease.begin_connection();
        self.leases.begin_connection();
        let comparing = (!self.is_compared).then(|| self.compare());
        let mut connection = Connection { link, beats, watching: None, running: None, comparing };
        for number in self.watches.numbers() {
            if let Err(end) = self.create(&mut connection, number).await {
                return Err(explained(&mut connection.link, end).await);
            }
        }
        Ok(connection)
    }

    /// Closes a connection. If the user closed the session, revokes its lease first.
    async fn leave(&mut self, core: &mut Core<'a>, connection: &mut Connection, end: ConnectionEnd) -> ConnectionEnd {
        self.channels.send_replace(None);
        let Connection { link, watching, running, comparing, .. } = connection;
        (*running, *comparing, *watching) = (None, None, None);
        let end = explained(link, end).await;
        match &end {
            ConnectionEnd::Closed(_) => {
                // Ignore an error, because a lease that is not revoked expires by itself.
                let _ = timeout(core.time_to_close(), revoke(&link.channel, self.keys.lease)).await;
            }
            ConnectionEnd::Broken(error) => self.note_failure(core, &error.message),
            ConnectionEnd::Lost(_) => {}
        }
        link.close().await;
        end
    }
}

impl Etcd<'_> {
    fn compare(&self) -> Boxed<Result<(), StoreError>> {
        Box::pin(compare(Rc::clone(self.options), self.member, self.cluster, Rc::clone(&self.keys)))
    }

    /// Starts the first task, unless a task is already running.
    fn begin(&mut self, core: &Core<'_>, connection: &mut Connection, now: u64) -> Step {
        while connection.running.is_none() {
            let job = match self.tasks.queue.front_mut() {
                Some(Task { what: What::Job(job), retries }) if core.is_closing() || !self.events.is_full() => {
                    retries.get_or_insert_with(|| Retries::begin(now, self.options.read_timeout));
                    job.clone()
                }
                Some(Task { what: What::Unwatch(watch), .. }) => {
                    let ended = self.watches.remove(watch);
                    self.tasks.queue.pop_front();
                    cancel(connection, &ended)?;
                    continue;
                }
                _ => return Ok(()),
            };
            let desk = Desk {
                channel: connection.link.channel.clone(),
                at: connection.link.at.clone(),
                keys: Rc::clone(&self.keys),
                job_lease: self.options.job_lease,
                write: self.write,
                known: unsigned(self.seen).max(self.reported),
            };
            connection.running = Some(Box::pin(desk.carry_out(job)));
        }
        Ok(())
    }

    async fn done(&mut self, connection: &mut Connection, done: Done) -> Step {
        match done {
            // Do not record the revision that the connection check returned, because later answers with a lower
            // revision would then be rejected. A repeated write, for example, returns the revision of its first
            // execution.
            Done::Looked => Ok(()),
            Done::Replied { tag, ok, revision, results, has_written } => {
                if has_written {
                    self.write = Write { number: self.write.number + 1, marker: revision };
                }
                self.advance(revision)?;
                self.events.push(Event::Reply { tag, ok, revision: unsigned(revision), results }, 0);
                Ok(())
            }
            Done::Watching { tag, watched, revision, results } => {
                self.advance(revision)?;
                self.events.push(Event::Reply { tag, ok: true, revision: unsigned(revision), results }, 0);
                let number = self.watches.add(watched);
                self.create(connection, number).await
            }
            Done::CaughtUp { number, revision, there } => {
                self.advance(revision)?;
                let Some((number, changes)) = self.watches.catch_up(number, revision, there) else { return Ok(()) };
                self.report(changes);
                self.create(connection, number).await
            }
        }
    }

    /// Creates the watch `number` on this connection. etcd then sends all events that earlier connections have not
    /// delivered.
    async fn create(&mut self, connection: &mut Connection, number: i64) -> Step {
        let Some(request) = self.watches.create(number, &self.keys) else { return Ok(()) };
        let failure = |error| Failure::of(error, &connection.link.at);
        let watching = match &mut connection.watching {
            Some(watching) => watching,
            None => connection
                .watching
                .insert(connection.link.channel.stream("/etcdserverpb.Watch/Watch").await.map_err(failure)?),
        };
        Ok(watching.send(&request).map_err(failure)?)
    }

    fn update(&mut self, core: &Core<'_>, message: pb::WatchResponse) -> Step {
        match self.watches.update(&self.keys, message) {
            WatchUpdate::Changes(changes) => self.report(changes),
            WatchUpdate::Compacted(number) => {
                if let Some(watch) = self.watches.watch(number).cloned() {
                    self.tasks.insert_behind_attempted(Job::CatchUp { number, watch });
                }
            }
            // After the first denial, reconnect, because the connection's token may have expired. A denial on the new
            // connection is final.
            WatchUpdate::Canceled(why) => {
                let is_denied = cancel_error(&why) == Some(EtcdError::PermissionDenied);
                let kind = if is_denied { LostKind::Denied } else { LostKind::Closed };
                let error = StoreError::new(kind, format!("etcd has ended a watch: {why}"));
                return Err(if is_denied && self.is_denied_again(core) {
                    error.into()
                } else {
                    self.watch_failed(error)
                });
            }
        }
        Ok(())
    }

    fn is_denied_again(&self, core: &Core<'_>) -> bool {
        self.options.user.is_none() || core.backoff.is_repeated(boot_now())
    }

    fn report(&mut self, sets: impl IntoIterator<Item = ChangeSet>) {
        for set in sets {
            let bytes = set.bytes();
            let ChangeSet { revision, changes } = set;
            self.reported = self.reported.max(revision);
            self.events.push(Event::Changes { revision, changes }, bytes);
        }
    }

    fn advance(&mut self, revision: i64) -> Result<(), StoreError> {
        not_behind(unsigned(self.seen), revision)?;
        self.seen = revision;
        Ok(())
    }

    /// Extends the deadlines of the watches and of all started tasks by the duration of an outage.
    fn skip(&mut self, outage: PastOutage) {
        self.tasks.attempted_mut().chain(&mut self.watch_retries).for_each(|retries| retries.skip(outage));
    }

    /// Counts a broken connection as a failure of the first task in the queue. Does nothing during an outage, because
    /// the outage, not the task, has broken the connection.
    fn note_failure(&mut self, core: &Core<'_>, why: &str) {
        if core.is_away() {
            return;
        }
        let retries = self.tasks.queue.front_mut().and_then(|task| task.retries.as_mut());
        if let Some(message) = retries.and_then(|retries| retries.fail(boot_now(), why)) {
            self.events.push(Event::Notice { message }, 0);
        }
    }

    /// Records that etcd answered a watch with an error. Returns `ConnectionEnd::Broken` to retry on a new connection,
    /// or the end of the session if the watches have failed for too long.
    fn watch_failed(&mut self, error: StoreError) -> ConnectionEnd {
        let now = boot_now();
        if self.watch_retries.as_ref().is_some_and(|retries| retries.is_over(now)) {
            self.watch_retries = None;
        }
        let retries = self.watch_retries.get_or_insert_with(|| Retries::begin(now, self.options.read_timeout));
        if let Some(message) = retries.fail(now, &error.message) {
            self.events.push(Event::Notice { message }, 0);
        }
        if now >= retries.deadline() {
            StoreError::new(LostKind::Timeout, retries.why()).into()
        } else {
            ConnectionEnd::Broken(error)
        }
    }
}

/// Replaces the error of a call with the TLS error of the connection, if there is one.
async fn explained(link: &mut Link, end: ConnectionEnd) -> ConnectionEnd {
    match end {
        ConnectionEnd::Broken(error) => ConnectionEnd::Broken(link.explain(error).await),
        end => end,
    }
}

/// Waits for the future's result, or forever if there is no future.
async fn until<T>(future: &mut Option<Boxed<T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

fn cancel(connection: &mut Connection, numbers: &[i64]) -> Step {
    let Some(watching) = &mut connection.watching else { return Ok(()) };
    for number in numbers {
        let request: pb::WatchRequest = pb::WatchCommand::Cancel(pb::WatchCancel { watch_id: *number }).into();
        watching.send(&request).map_err(|error| Failure::of(error, &connection.link.at))?;
    }
    Ok(())
}
