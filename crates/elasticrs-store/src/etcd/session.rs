//! An open session: executes requests in order, sends keep-alives, and resumes watches after a reconnect.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use elasticrs_sys::clock::{boot_now, nanoseconds};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::dial::{Credentials, Link, Trouble};
use super::errors::{EtcdError, cancel_error};
use super::grpc::{CallError, Channel, Duplex};
use super::jobs::{Desk, Done, Job, not_behind};
use super::lease::Lease;
use super::mapping::{Keys, Write, unsigned};
use super::messages as pb;
use super::open::{Opened, again, compare, revoke};
use super::options::Options;
use super::retries::{Outage, Retries};
use super::tasks::{Task, Tasks, What};
use super::watching::{Heard, Watches};
use crate::coordination::away::{Away, half_by_chance};
use crate::coordination::connect::Lost;
use crate::coordination::events::{Event, Events};
use crate::coordination::guard::Guard;
use crate::coordination::protocol::WatchFrom;
use crate::coordination::types::{LostKind, Txn, Watch};
use crate::handle::{Command, Ended, Halt, Inbox};
use crate::watched::Told;

/// A request from the user.
#[derive(Debug)]
pub(super) enum Request {
    Txn { tag: u64, txn: Txn },
    Watch { tag: u64, watch: WatchFrom },
    Unwatch(Watch),
}

impl From<Trouble> for Halt {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Again(lost) => Self::Broken(lost),
            Trouble::Fatal(lost) => Self::Ended(Ended::Lost(lost)),
        }
    }
}

type Boxed<T> = Pin<Box<dyn Future<Output = T>>>;
/// Result of a job. If the job put the marker, also the marker's revision.
type Carried = Result<(Done, Option<i64>), Trouble>;

/// The connection in use and the calls that run on it.
struct Live {
    link: Link,
    beats: Duplex<pb::KeepAliveRequest, pb::KeepAliveResponse>,
    watching: Option<Duplex<pb::WatchRequest, pb::WatchResponse>>,
    running: Option<Boxed<Carried>>,
    /// Check that the other endpoints belong to the same cluster.
    comparing: Option<Boxed<Result<(), Lost>>>,
}

/// An event that one iteration of the session loop handles.
enum Turn {
    Command(Option<Command<Request>>),
    Beat(Result<pb::KeepAliveResponse, CallError>),
    Watch(Result<pb::WatchResponse, CallError>),
    Done(Carried),
    Broken(Lost),
    Compared(Result<(), Lost>),
    Time,
}

/// The user's request to close the session.
struct Closing {
    reply: Option<SyncSender<()>>,
    /// Time on the boot clock at which the session ends even if requests are unfinished.
    until: u64,
}

/// Time limit for `close`, in nanoseconds, for executing earlier requests and revoking the lease.
const CLOSE_LIMIT: u64 = 2_000_000_000;
/// Nanoseconds without a broken connection after which earlier breaks no longer count.
const CALM: u64 = 10_000_000_000;

pub(super) struct Session<'a> {
    options: &'a Rc<Options>,
    credentials: &'a Rc<Credentials>,
    events: &'a Events,
    cluster: u64,
    is_compared: bool,
    keys: Rc<Keys>,
    lease: Lease<'a>,
    tasks: Tasks,
    /// Recent failures of watches. `None` if there were none.
    watch_retries: Option<Retries>,
    write: Write,
    watches: Watches,
    closing: Option<Closing>,
    member: usize,
    /// The current outage. It starts when a connection breaks and ends when a keep-alive is answered.
    away: Option<Away>,
    /// Pause before the first reconnect of the current outage (`away`), in nanoseconds.
    first_pause: u64,
    /// Time of the last outage notice to the user, on the boot clock.
    told_away: Option<u64>,
    /// Number of connections that broke in quick succession, and the time at which the last of them broke.
    breaks: (u32, u64),
    /// Highest revision in any answer.
    seen: i64,
    /// Highest revision that a watch has reported. It may be higher than `seen`, which covers only answers.
    told: u64,
    /// Tells the links which connection to use. `None` while there is no connection.
    channels: watch::Sender<Option<Channel>>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        options: &'a Rc<Options>,
        credentials: &'a Rc<Credentials>,
        opened: Opened,
        events: &'a Events,
        guard: &'a dyn Guard,
        channels: watch::Sender<Option<Channel>>,
    ) -> (Self, Link) {
        let lease = Lease::new(options, &opened, events, guard);
        let Opened { link, member, cluster, keys, marker, .. } = opened;
        let session = Self {
            options,
            credentials,
            events,
            cluster,
            is_compared: false,
            keys: Rc::new(keys),
            lease,
            tasks: Tasks::default(),
            watch_retries: None,
            write: Write { number: 1, marker },
            watches: Watches::default(),
            closing: None,
            member,
            away: None,
            first_pause: 0,
            told_away: None,
            breaks: (0, 0),
            seen: marker,
            told: 0,
            channels,
        };
        (session, link)
    }

    pub(super) async fn run(mut self, link: Link, early: Vec<Request>, inbox: &mut Inbox<Request>) -> Ended {
        for request in early {
            self.ask(request);
        }
        let mut next = Ok(link);
        loop {
            let halt = match next {
                Ok(link) => self.serve(link, inbox).await,
                Err(halt) => halt,
            };
            match halt {
                Halt::Ended(ended) => return ended,
                Halt::Broken(lost) => next = self.reconnect(lost, inbox).await,
            }
        }
    }

    /// Uses a connection until it breaks or the session ends.
    async fn serve(&mut self, link: Link, inbox: &mut Inbox<Request>) -> Halt {
        let mut live = match self.enter(link).await {
            Ok(live) => live,
            Err(halt) => return halt,
        };
        loop {
            if let Err(halt) = self.turn(&mut live, inbox).await {
                let halt = self.leave(live, halt).await;
                if let Halt::Broken(lost) = &halt {
                    self.note_failure(&lost.message);
                }
                return halt;
            }
        }
    }

    async fn enter(&mut self, mut link: Link) -> Result<Live, Halt> {
        self.channels.send_replace(Some(link.channel.clone()));
        let beats = match link.channel.stream("/etcdserverpb.Lease/LeaseKeepAlive").await {
            Ok(beats) => beats,
            Err(error) => {
                let trouble = Trouble::of(error, &link.at);
                return Err(last_words(&mut link, trouble.into()).await);
            }
        };
        self.lease.begin_connection();
        let comparing = (!self.is_compared).then(|| self.compare());
        let mut live = Live { link, beats, watching: None, running: None, comparing };
        for number in self.watches.numbers() {
            if let Err(halt) = self.create(&mut live, number).await {
                return Err(last_words(&mut live.link, halt).await);
            }
        }
        Ok(live)
    }

    fn compare(&self) -> Boxed<Result<(), Lost>> {
        let (options, credentials) = (Rc::clone(self.options), Rc::clone(self.credentials));
        Box::pin(compare(options, credentials, self.member, self.cluster, Rc::clone(&self.keys)))
    }

    /// Closes a connection. Revokes the session's lease first if the user closed the session.
    async fn leave(&mut self, live: Live, halt: Halt) -> Halt {
        self.channels.send_replace(None);
        let Live { mut link, beats, watching, running, comparing } = live;
        drop((running, comparing, beats, watching));
        let halt = last_words(&mut link, halt).await;
        if let (Halt::Ended(Ended::Closed(_)), Some(closing)) = (&halt, &self.closing) {
            let left = Duration::from_nanos(closing.until.saturating_sub(boot_now()));
            // Ignore an error, because a lease that is not revoked expires by itself.
            let _ = timeout(left, revoke(&link.channel, self.keys.lease)).await;
        }
        link.close().await;
        halt
    }

    async fn turn(&mut self, live: &mut Live, inbox: &mut Inbox<Request>) -> Result<(), Halt> {
        // Check the deadline first, because this process or the machine may have been stopped, and messages that arrive
        // after the deadline do not count.
        let now = boot_now();
        self.check(now)?;
        if live.running.is_none() && self.tasks.is_empty() {
            self.check_closing(u64::MAX)?;
        }
        self.lease.check_answers(now, &live.link.at).map_err(Halt::Broken)?;
        self.lease.beat(now, &mut live.beats).map_err(|error| Trouble::of(error, &live.link.at))?;
        self.begin(live, now)?;
        let turn = self.next(live, inbox, now).await;
        self.check(boot_now())?;
        let trouble = |error| Trouble::of(error, &live.link.at);
        match turn {
            Turn::Time => Ok(()),
            Turn::Command(command) => {
                self.command(command);
                Ok(())
            }
            Turn::Broken(lost) => Err(Halt::Broken(lost)),
            Turn::Compared(compared) => {
                live.comparing = None;
                self.is_compared = true;
                Ok(compared?)
            }
            Turn::Beat(answer) => {
                if self.lease.take(&answer.map_err(trouble)?, &live.link.at)? {
                    self.is_back(boot_now());
                }
                Ok(())
            }
            Turn::Watch(message) => {
                // Count only errors that etcd itself sent as failures of the watch, because the watch does not cause a
                // broken connection.
                let is_answer = !matches!(message, Err(CallError::Broken(_)));
                match message.map_err(trouble) {
                    Ok(message) => self.hear(message),
                    Err(Trouble::Again(lost)) if is_answer => Err(self.watch_failed(lost)),
                    Err(trouble) => Err(trouble.into()),
                }
            }
            Turn::Done(done) => {
                live.running = None;
                let (done, marker) = done?;
                self.tasks.pop_front();
                if let Some(marker) = marker {
                    self.write = Write { number: self.write.number + 1, marker };
                }
                self.done(live, done).await
            }
        }
    }

    async fn next(&self, live: &mut Live, inbox: &mut Inbox<Request>, now: u64) -> Turn {
        let Live { link, beats, watching, running, comparing } = live;
        let closing = self.closing.as_ref().map_or(u64::MAX, |closing| closing.until);
        let wake = self.lease.wake().min(closing).min(self.overdue()).saturating_sub(now);
        let is_full = self.events.is_full();
        let watched = async {
            match watching {
                // Do not read more watch events while the user's event queue is full.
                Some(watching) if !is_full => watching.next().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            command = inbox.recv(), if self.closing.is_none() => Turn::Command(command),
            answer = beats.next() => Turn::Beat(answer),
            message = watched => Turn::Watch(message),
            done = until(running) => Turn::Done(done),
            compared = until(comparing) => Turn::Compared(compared),
            lost = link.ended() => Turn::Broken(lost),
            () = sleep(Duration::from_nanos(wake)) => Turn::Time,
            () = self.events.wake_task.notified() => Turn::Time,
        }
    }

    /// Starts the first task, unless a task is already running.
    fn begin(&mut self, live: &mut Live, now: u64) -> Result<(), Halt> {
        while live.running.is_none() {
            let job = match self.tasks.front_mut() {
                Some(Task { what: What::Job(job), retries }) if self.closing.is_some() || !self.events.is_full() => {
                    retries.get_or_insert_with(|| Retries::begin(now, self.options.read_timeout));
                    job.clone()
                }
                Some(Task { what: What::Unwatch(watch), .. }) => {
                    let ended = self.watches.remove(watch);
                    self.tasks.pop_front();
                    cancel(live, &ended)?;
                    continue;
                }
                _ => return Ok(()),
            };
            let desk = Desk {
                channel: live.link.channel.clone(),
                at: live.link.at.clone(),
                keys: Rc::clone(&self.keys),
                job_lease: self.options.job_lease,
                write: self.write,
                known: unsigned(self.seen).max(self.told),
            };
            live.running = Some(Box::pin(desk.carry_out(job)));
        }
        Ok(())
    }

    async fn done(&mut self, live: &mut Live, done: Done) -> Result<(), Halt> {
        match done {
            // Do not record the revision of the check. The next answer may be for a write that was executed before the
            // connection broke, and therefore have an older revision.
            Done::Looked => Ok(()),
            Done::Replied { tag, ok, revision, results } => {
                self.advance(revision)?;
                self.events.push(Event::Reply { tag, ok, revision: unsigned(revision), results }, 0);
                Ok(())
            }
            Done::Watching { tag, watched, revision, results } => {
                self.advance(revision)?;
                self.events.push(Event::Reply { tag, ok: true, revision: unsigned(revision), results }, 0);
                let number = self.watches.add(watched);
                self.create(live, number).await
            }
            Done::CaughtUp { number, revision, there } => {
                self.advance(revision)?;
                let Some((number, told)) = self.watches.catch_up(number, revision, there) else { return Ok(()) };
                self.tell(told);
                self.create(live, number).await
            }
        }
    }

    /// Requests all events that a watch has not reported yet.
    async fn create(&mut self, live: &mut Live, number: i64) -> Result<(), Halt> {
        let Some(request) = self.watches.create(number, &self.keys) else { return Ok(()) };
        let trouble = |error| Trouble::of(error, &live.link.at);
        let watching = match &mut live.watching {
            Some(watching) => watching,
            None => live.watching.insert(live.link.channel.stream("/etcdserverpb.Watch/Watch").await.map_err(trouble)?),
        };
        Ok(watching.send(&request).map_err(trouble)?)
    }

    fn hear(&mut self, message: pb::WatchResponse) -> Result<(), Halt> {
        match self.watches.hear(&self.keys, message) {
            Heard::Told(told) => self.tell(told),
            Heard::Forgotten(number) => {
                if let Some(watch) = self.watches.watch(number).cloned() {
                    self.tasks.insert_behind_attempted(Job::CatchUp { number, watch });
                }
            }
            // Reconnect after the first denial, because the connection's token may have expired. A denial with a new
            // token is final.
            Heard::Ended(why) => {
                let is_denied = cancel_error(&why) == Some(EtcdError::PermissionDenied);
                let kind = if is_denied { LostKind::Denied } else { LostKind::Closed };
                let lost = Lost::new(kind, format!("etcd has ended a watch: {why}"));
                return Err(if is_denied && self.is_denied_again() { lost.into() } else { self.watch_failed(lost) });
            }
        }
        Ok(())
    }

    fn is_denied_again(&self) -> bool {
        self.credentials.user.is_none() || (self.breaks.0 > 0 && boot_now().saturating_sub(self.breaks.1) < CALM)
    }

    fn tell(&mut self, told: impl IntoIterator<Item = Told>) {
        for told in told {
            let bytes = told.bytes();
            let Told { revision, changes } = told;
            self.told = self.told.max(revision);
            self.events.push(Event::Changes { revision, changes }, bytes);
        }
    }

    fn advance(&mut self, revision: i64) -> Result<(), Lost> {
        not_behind(unsigned(self.seen), revision)?;
        self.seen = revision;
        Ok(())
    }

    fn command(&mut self, command: Option<Command<Request>>) {
        let close = |reply| Closing { reply, until: boot_now() + CLOSE_LIMIT };
        match command {
            Some(Command::Request(request)) => self.ask(request),
            Some(Command::Close(reply)) => self.closing = Some(close(Some(reply))),
            None => self.closing = Some(close(None)),
        }
    }

    fn ask(&mut self, request: Request) {
        let what = match request {
            Request::Txn { tag, txn } => What::Job(Job::Txn { tag, txn: Rc::new(txn) }),
            Request::Watch { tag, watch } => What::Job(Job::Watch { tag, watch }),
            Request::Unwatch(watch) => What::Unwatch(watch),
        };
        self.tasks.push_back(what);
    }

    /// Returns an error if a time limit was exceeded: that of the session, of closing it, or of a task that has been
    /// attempted.
    fn check(&mut self, now: u64) -> Result<(), Halt> {
        if self.lease.is_over(now) || self.events.is_over() {
            return Err(self.lease.lost().into());
        }
        self.check_closing(now)?;
        if now >= self.overdue() {
            let given_up = self.tasks.attempted().min_by_key(|retries| retries.deadline());
            return Err(Lost::new(LostKind::Timeout, given_up.map(Retries::why).unwrap_or_default()).into());
        }
        Ok(())
    }

    /// Ends the current outage, if there is one, because a keep-alive was answered.
    fn is_back(&mut self, now: u64) {
        let Some(away) = self.away.take() else { return };
        self.told_away = away.told();
        let outage = Outage { begun: away.silent(), ended: now, pause: self.first_pause };
        self.tasks.attempted_mut().chain(&mut self.watch_retries).for_each(|retries| retries.skip(outage));
        if let Some(message) = away.over(now) {
            self.events.push(Event::Notice { message }, 0);
        }
    }

    /// Returns the time at which the first of the attempted tasks is abandoned. `u64::MAX` during an outage, because
    /// the lease limits the wait.
    fn overdue(&self) -> u64 {
        if self.away.is_some() {
            return u64::MAX;
        }
        self.tasks.attempted().map(Retries::deadline).min().unwrap_or(u64::MAX)
    }

    /// Records that an attempt at the first task failed because the connection broke. Records nothing during an outage,
    /// because the task is then not the cause.
    fn note_failure(&mut self, why: &str) {
        if self.away.is_some() {
            return;
        }
        let retries = self.tasks.front_mut().and_then(|task| task.retries.as_mut());
        if let Some(message) = retries.and_then(|retries| retries.fail(boot_now(), why)) {
            self.events.push(Event::Notice { message }, 0);
        }
    }

    /// Records that etcd answered a watch with an error. Returns `Halt::Broken` for a retry on a new connection or, if
    /// the watches have failed for too long, the loss of the session.
    fn watch_failed(&mut self, lost: Lost) -> Halt {
        let now = boot_now();
        if self.watch_retries.as_ref().is_some_and(|retries| retries.is_over(now)) {
            self.watch_retries = None;
        }
        let retries = self.watch_retries.get_or_insert_with(|| Retries::begin(now, self.options.read_timeout));
        if let Some(message) = retries.fail(now, &lost.message) {
            self.events.push(Event::Notice { message }, 0);
        }
        if now >= retries.deadline() { Lost::new(LostKind::Timeout, retries.why()).into() } else { Halt::Broken(lost) }
    }

    fn check_closing(&mut self, now: u64) -> Result<(), Halt> {
        match &mut self.closing {
            Some(closing) if now >= closing.until => Err(Halt::Ended(Ended::Closed(closing.reply.take()))),
            _ => Ok(()),
        }
    }

    /// Reconnects to the next endpoint. The caller retries for as long as the lease lasts.
    async fn reconnect(&mut self, lost: Lost, inbox: &mut Inbox<Request>) -> Result<Link, Halt> {
        let now = boot_now();
        let count = if now.saturating_sub(self.breaks.1) > CALM { 1 } else { self.breaks.0 + 1 };
        self.breaks = (count, now);
        self.member = (self.member + 1) % self.options.endpoints.len().max(1);
        self.lease.set_trouble(&lost.message);
        let pause = delay(count);
        if self.away.is_none() {
            self.away = Some(self.lease.away(self.told_away));
            self.first_pause = nanoseconds(pause);
        }
        self.tasks.check_connection();
        let (options, credentials, member) = (self.options, self.credentials, self.member);
        let patience = self.lease.dial_patience();
        let dialled = async move {
            sleep(pause).await;
            again(options, credentials, member, patience).await
        };
        tokio::pin!(dialled);
        loop {
            let now = boot_now();
            self.check(now)?;
            if let Some(message) = self.away.as_mut().and_then(|away| away.news(now, &lost.message)) {
                self.events.push(Event::Notice { message }, 0);
            }
            let news = self.away.as_ref().map_or(u64::MAX, Away::next_news);
            let closing = self.closing.as_ref().map_or(u64::MAX, |closing| closing.until);
            let left = self.lease.deadline().min(closing).min(news).saturating_sub(now);
            tokio::select! {
                link = &mut dialled => return link.map_err(Halt::Broken),
                command = inbox.recv(), if self.closing.is_none() => self.command(command),
                () = sleep(Duration::from_nanos(left)) => {}
                () = self.events.wake_task.notified() => {}
            }
        }
    }
}

async fn last_words(link: &mut Link, halt: Halt) -> Halt {
    match halt {
        Halt::Broken(lost) => Halt::Broken(link.last_words(lost).await),
        ended @ Halt::Ended(_) => ended,
    }
}

/// Waits for the future's result. Waits forever if there is no future.
async fn until<T>(future: &mut Option<Boxed<T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

fn cancel(live: &mut Live, numbers: &[i64]) -> Result<(), Halt> {
    let Some(watching) = &mut live.watching else { return Ok(()) };
    for number in numbers {
        let request = pb::WatchCommand::Cancel(pb::WatchCancel { watch_id: *number }).into();
        watching.send(&request).map_err(|error| Trouble::of(error, &live.link.at))?;
    }
    Ok(())
}

/// Returns the pause before the next reconnect, after this number of connections broke in quick succession. The pause
/// doubles each time, up to one second. Half of it is random, so that many agents do not reconnect at the same time.
fn delay(breaks: u32) -> Duration {
    let most = 25_u64 << breaks.min(6);
    let most = if breaks <= 1 { 10 } else { most.min(1000) };
    half_by_chance(Duration::from_millis(most))
}
