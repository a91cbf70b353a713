//! The session of a client with a store: executes requests, keeps the lease alive, and moves to a new connection when
//! one breaks. `Backend` is the part that depends on the kind of store.
//!
//! [`client`] is the object that the user calls, and lets another process hold the session's connections open.
//! [`events`] is the queue of events for the user, and estimates the store's clock. The pure functions of `lease`,
//! `outage` and `watched` make the session's decisions, and `core` keeps the state for them. `network` opens
//! connections, and `error` defines the errors and outcomes of calls, connections and sessions.
//!
//! - **SESSION-1** the session checks the deadline of the lease before it handles a message, because this process or
//!   the machine may have been stopped in the meantime. Messages that arrive after the deadline do not count;
//! - **SESSION-2** the session ends once: with an error, or because the user closed it. A session that has ended is
//!   never resumed;
//! - **SESSION-3** a broken connection does not end the session. The session reconnects until its lease expires, unless
//!   the store refuses to resume it;
//! - **SESSION-4** the session keeps a broken connection until it has moved to another one. The backend may close the
//!   broken connection earlier, in `Backend::leave`.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod client;
pub(crate) mod core;
pub(crate) mod error;
pub mod events;
pub(crate) mod lease;
pub(crate) mod network;
pub(crate) mod outage;
pub(crate) mod watched;

use std::pin::Pin;
use std::time::Duration;

use elasticrs_sys::clock::boot_now;
use tokio::time::sleep;

use self::client::{Command, Inbox, Request};
use self::core::Core;
use self::error::{ConnectionEnd, Failure, Step, StoreError};
use self::outage::Outage;

/// Interval between checks whether the user has resumed fetching events.
const STALL_PAUSE: Duration = Duration::from_millis(250);

/// An attempt to open a connection.
pub(crate) type Dialing<'a, L> = Pin<Box<dyn Future<Output = Result<L, Failure>> + 'a>>;

/// Operations of a session that depend on the store's protocol. Each kind of store implements them.
pub(crate) trait Backend<'a> {
    /// An open connection on which the session has not started yet.
    type Link;
    /// A connection that the session uses.
    type Connection;
    /// An event on the connection.
    type Event;

    /// Takes a request, to be executed after all earlier ones. `frame` is its encoded form. It is empty for etcd, whose
    /// session encodes the request later.
    fn request(&mut self, request: Request, frame: Vec<u8>);

    /// Sends the requests and keep-alives that are due. Returns the time at which this method must be called again if
    /// no event arrives first.
    fn prepare(&mut self, core: &mut Core<'a>, connection: &mut Self::Connection, now: u64) -> Step<u64>;

    /// Waits for the next event. No event is lost if the future is dropped. If `is_full`, the user's event queue is
    /// full, so messages that would be added to the queue are not read.
    async fn next(&self, connection: &mut Self::Connection, is_full: bool) -> Self::Event;

    /// Handles an event.
    async fn handle(&mut self, core: &mut Core<'a>, connection: &mut Self::Connection, event: Self::Event) -> Step;

    /// Starts a new connection attempt.
    fn dial(&mut self, core: &Core<'a>) -> Dialing<'a, Self::Link>;

    /// Returns the reason to report if the session is lost during this outage. `answered` is the send time of the last
    /// answered keep-alive, and `error` is the last failure.
    fn outage_reason(outage: &Outage, answered: u64, error: &StoreError) -> StoreError;

    /// Starts or continues the session on a new connection.
    async fn enter(&mut self, core: &mut Core<'a>, link: Self::Link) -> Step<Self::Connection>;

    /// Stops using a connection. Returns the reason, which can be more specific than `end`.
    ///
    /// Must allow repeated calls for a connection, because the session repeats the call after a failed reconnect.
    async fn leave(
        &mut self,
        core: &mut Core<'a>,
        connection: &mut Self::Connection,
        end: ConnectionEnd,
    ) -> ConnectionEnd;
}

/// An event that one iteration of the session loop handles.
enum Turn<E> {
    Command(Option<Command>),
    Event(E),
    Time,
}

/// An open session.
pub(crate) struct Session<'a, B> {
    pub(crate) core: Core<'a>,
    pub(crate) backend: B,
}

impl<'a, B: Backend<'a>> Session<'a, B> {
    /// Runs the session until it ends. `early` contains the requests that were made while the session was being opened.
    pub(crate) async fn run(
        mut self,
        link: B::Link,
        early: Vec<(Request, Vec<u8>)>,
        inbox: &mut Inbox,
    ) -> ConnectionEnd {
        for (request, frame) in early {
            self.backend.request(request, frame);
        }
        let mut held = None;
        let mut next = Ok(link);
        loop {
            let mut end = match next {
                Ok(link) => match self.backend.enter(&mut self.core, link).await {
                    Ok(connection) => self.serve(held.insert(connection), inbox).await,
                    Err(end) => end,
                },
                Err(end) => end,
            };
            if let Some(connection) = &mut held {
                end = self.backend.leave(&mut self.core, connection, end).await;
            }
            match end {
                ConnectionEnd::Broken(error) => next = self.reconnect(error, inbox).await,
                end => return end,
            }
        }
    }

    /// Uses a connection until it breaks or the session ends.
    async fn serve(&mut self, connection: &mut B::Connection, inbox: &mut Inbox) -> ConnectionEnd {
        loop {
            if let Err(end) = self.turn(connection, inbox).await {
                return end;
            }
        }
    }

    async fn turn(&mut self, connection: &mut B::Connection, inbox: &mut Inbox) -> Step {
        let Self { core, backend } = self;
        let now = boot_now();
        core.check(now)?;
        let wake = backend.prepare(core, connection, now)?.min(core.wake());
        let turn = tokio::select! {
            command = inbox.recv(), if !core.is_closing() => Turn::Command(command),
            event = backend.next(connection, core.events.is_full()) => Turn::Event(event),
            () = sleep(Duration::from_nanos(wake.saturating_sub(now))) => Turn::Time,
            () = core.events.wake_task.notified() => Turn::Time,
        };
        core.check(boot_now())?;
        match turn {
            Turn::Time => Ok(()),
            Turn::Command(command) => {
                self.commands(command, inbox);
                Ok(())
            }
            Turn::Event(event) => backend.handle(core, connection, event).await,
        }
    }

    /// Opens another connection. Retries until the lease expires.
    async fn reconnect(&mut self, mut error: StoreError, inbox: &mut Inbox) -> Step<B::Link> {
        loop {
            let pause =
                self.core.disconnected(boot_now(), |outage, answered| B::outage_reason(outage, answered, &error));
            match self.attempt(pause, &error.message, inbox).await? {
                Ok(link) => return Ok(link),
                Err(Failure::Fatal(error)) => return Err(error.into()),
                Err(Failure::Retryable(next)) => error = next,
            }
        }
    }

    async fn attempt(&mut self, pause: Duration, why: &str, inbox: &mut Inbox) -> Step<Result<B::Link, Failure>> {
        let dialing = self.backend.dial(&self.core);
        let (events, limit) = (self.core.events, self.core.policy.stall_timeout);
        let waits_for_user = self.core.policy.renews_by_reconnect;
        let attempt = async move {
            sleep(pause).await;
            while waits_for_user && events.is_stalled(limit) {
                sleep(STALL_PAUSE).await;
            }
            dialing.await
        };
        tokio::pin!(attempt);
        loop {
            let now = boot_now();
            if waits_for_user {
                self.core.lease.is_stalled = events.is_stalled(limit);
            }
            self.core.check(now)?;
            self.core.report_outage(now, why);
            let wake = self.core.wake_in_outage().saturating_sub(now);
            tokio::select! {
                link = &mut attempt => {
                    self.core.check(boot_now())?;
                    return Ok(link);
                }
                command = inbox.recv(), if !self.core.is_closing() => self.commands(command, inbox),
                () = sleep(Duration::from_nanos(wake)) => {}
                () = events.wake_task.notified() => {}
            }
        }
    }

    /// Handles a command and all commands that are already queued behind it, so that their requests are sent
    /// together.
    fn commands(&mut self, first: Option<Command>, inbox: &mut Inbox) {
        self.command(first);
        while !self.core.is_closing()
            && let Ok(command) = inbox.try_recv()
        {
            self.command(Some(command));
        }
    }

    fn command(&mut self, command: Option<Command>) {
        match command {
            Some(Command::Request(request, frame)) => self.backend.request(request, frame),
            Some(Command::Close(reply)) => self.core.close(Some(reply)),
            None => self.core.close(None),
        }
    }
}
