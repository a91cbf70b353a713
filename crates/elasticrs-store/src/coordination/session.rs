//! Client side of the coordination store's protocol: sends requests and keep-alives, receives answers, and
//! resumes the session on a new connection.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use elasticrs_sys::clock::boot_now;
use nix::sys::socket::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::task::yield_now;

use super::connect::{Met, Opened, Options, reopen};
use super::protocol::{Answer, Pace, Request, Secret};
use super::unanswered::{AnswerEffect, Unanswered};
use super::wire::{Broken, Frames};
use crate::session::client::{self, Guard};
use crate::session::core::{Core, Policy};
use crate::session::error::{ConnectionEnd, Failure, Step, StoreError};
use crate::session::events::{Event, Events};
use crate::session::lease::Terms;
use crate::session::network::plain;
use crate::session::outage::{Outage, Pauses};
use crate::session::watched::ChangeSet;
use crate::session::{Backend, Dialing, Session};
use crate::types::LostKind;

/// A connection of the session. It stays open until the session has moved to a new one, because closing it would end
/// the session.
pub(super) struct Connection {
    stream: TcpStream,
    frames: Frames,
}

pub(super) struct OwnStore<'a> {
    options: &'a Options,
    number: u64,
    secret: Secret,
    /// Bytes to send on the current connection.
    unsent: Vec<u8>,
    /// Unanswered requests and watch state, which are needed to resume the session. `None` if a lost connection ends
    /// the session.
    unanswered: Option<Unanswered>,
    chunk: Box<[u8]>,
}

/// Maximum number of bytes per read.
const CHUNK: usize = 16 * 1024;

/// Maximum time to wait for the answer to a keep-alive, in milliseconds. The client always waits for at least two
/// keep-alive intervals, even if they are longer than this maximum.
const MAX_PATIENCE_MS: u32 = 3_000;

/// Delays between reconnection attempts.
const PAUSES: Pauses =
    Pauses { first: Duration::ZERO, second: Duration::from_millis(20), last: Duration::from_millis(250) };

impl Pace {
    /// Returns the client's time limits. The client considers the session lost one keep-alive interval before the
    /// store ends it.
    fn terms(self) -> Terms {
        let Self { interval_ms, ttl_ms } = self;
        let milliseconds = |count: u32| Duration::from_millis(count.into());
        Terms {
            interval: milliseconds(interval_ms),
            lasts: milliseconds(ttl_ms.saturating_sub(interval_ms)),
            patience: milliseconds((ttl_ms / 5).min(MAX_PATIENCE_MS).max(interval_ms.saturating_mul(2))),
        }
    }

    /// Returns false if the keep-alive interval is 0, or if the session would expire before the next keep-alive.
    pub(super) fn is_valid(self) -> bool {
        self.interval_ms > 0 && self.ttl_ms > self.interval_ms
    }
}

/// Creates a session on a connection that is already open.
pub(super) fn session<'a>(
    options: &'a Options,
    met: &Met,
    events: &'a Events,
    guard: &'a dyn Guard,
) -> Session<'a, OwnStore<'a>> {
    let policy = Policy {
        store: format!("the store at {}", options.endpoint()),
        pauses: PAUSES,
        close_limit: Duration::ZERO,
        stall_timeout: options.stall_timeout,
        renews_by_reconnect: true,
    };
    let core = Core::new(policy, events, guard, met.sent, met.pace.terms());
    let backend = OwnStore {
        options,
        number: met.session,
        secret: met.secret,
        unsent: Vec::new(),
        unanswered: options.resume.then(Unanswered::default),
        chunk: vec![0; CHUNK].into(),
    };
    Session { core, backend }
}

impl<'a> Backend<'a> for OwnStore<'a> {
    type Link = Opened;
    type Connection = Connection;
    type Event = io::Result<()>;

    fn request(&mut self, request: client::Request, frame: Vec<u8>) {
        self.unsent.extend(frame);
        if let Some(unanswered) = &mut self.unanswered {
            unanswered.ask(request);
        }
    }

    fn prepare(&mut self, core: &mut Core<'a>, connection: &mut Connection, now: u64) -> Step<u64> {
        core.check_closed()?;
        self.take_frames(core, connection)?;
        if now >= self.overdue(core) {
            // If this process was stopped, answers may have arrived in the meantime. Read them, and then check the time
            // limit again.
            while self.read(connection)? {}
            self.take_frames(core, connection)?;
        }
        let overdue = self.overdue(core);
        if now >= overdue {
            let why = format!("no keep-alive was answered for {} s", core.lease.terms().patience.as_secs_f64());
            return Err(ConnectionEnd::broken(LostKind::Silent, why));
        }
        if core.beat(now) {
            self.unsent.extend(Request::KeepAlive { sent: now }.encode());
        }
        self.flush(connection);
        Ok(overdue)
    }

    async fn next(&self, connection: &mut Connection, is_full: bool) -> io::Result<()> {
        let interest = match (is_full, self.unsent.is_empty()) {
            (false, true) => Interest::READABLE,
            (false, false) => Interest::READABLE | Interest::WRITABLE,
            (true, false) => Interest::WRITABLE,
            (true, true) => return std::future::pending().await,
        };
        connection.stream.ready(interest).await.map(drop)
    }

    async fn handle(&mut self, _core: &mut Core<'a>, connection: &mut Connection, ready: io::Result<()>) -> Step {
        ready.map_err(|error| self.broken(&error))?;
        if self.read(connection)? {
            yield_now().await;
        }
        Ok(())
    }

    fn dial(&mut self, core: &Core<'a>) -> Dialing<'a, Opened> {
        let (session, met) = ((self.number, self.secret), core.events.met());
        let (options, guard) = (self.options, core.guard);
        let patience = core.dial_patience().min(options.connect_timeout);
        Box::pin(async move {
            reopen(options, guard, session, met, patience).await.map_err(|error| match error.kind {
                // The store has identified this client and rejects it, so a retry would not help.
                LostKind::Gone | LostKind::Other | LostKind::Run | LostKind::Token => Failure::Fatal(error),
                _ => Failure::Retryable(error),
            })
        })
    }

    fn outage_reason(outage: &Outage, answered: u64, error: &StoreError) -> StoreError {
        outage.reason(error.kind, &error.message, answered)
    }

    async fn enter(&mut self, core: &mut Core<'a>, link: Opened) -> Step<Connection> {
        let Opened { stream, frames, met, .. } = link;
        core.lease.begin_connection();
        if core.is_away() {
            core.guard.resumed(true);
            core.renew(met.sent, met.pace.terms());
            core.events.meet(met.store, met.revision);
            core.is_back(boot_now());
        }
        if let Some(unanswered) = &mut self.unanswered {
            self.unsent = unanswered.ask_again();
        }
        Ok(Connection { stream, frames })
    }

    async fn leave(&mut self, _core: &mut Core<'a>, connection: &mut Connection, end: ConnectionEnd) -> ConnectionEnd {
        match end {
            ConnectionEnd::Broken(error) if self.unanswered.is_none() => error.into(),
            ConnectionEnd::Closed(_) => {
                self.flush(connection);
                // Shut down the socket instead of only closing it: if another process holds a duplicate, closing would
                // not end the session. Ignore the error, which only means that the socket is no longer connected.
                let _ = shutdown(connection.stream.as_raw_fd(), Shutdown::Both);
                end
            }
            end => end,
        }
    }
}

impl OwnStore<'_> {
    /// Returns the time at which the client closes the connection if a keep-alive is still unanswered.
    ///
    /// Returns `u64::MAX` (never) if closing the connection would end the session. Also returns `u64::MAX` while the
    /// event queue is full, because the client then reads no answers.
    fn overdue(&self, core: &Core<'_>) -> u64 {
        if self.unanswered.is_some() && !core.events.is_full() { core.lease.overdue() } else { u64::MAX }
    }

    /// Writes as many bytes as the kernel accepts.
    fn flush(&mut self, connection: &Connection) {
        let unsent = &mut self.unsent;
        let mut sent = 0;
        while sent < unsent.len() {
            match connection.stream.try_write(&unsent[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // Drop the unsent bytes, because the connection is broken. The next read reports the error.
                    sent = unsent.len();
                }
            }
        }
        if sent == unsent.len() {
            unsent.clear();
            if unsent.capacity() > 4 * CHUNK {
                *unsent = Vec::new();
            }
        } else {
            unsent.drain(..sent);
        }
    }

    /// Reads bytes that have arrived. Returns true if more may be available.
    fn read(&mut self, connection: &mut Connection) -> Step<bool> {
        match connection.stream.try_read(&mut self.chunk) {
            Ok(0) => Err(ConnectionEnd::broken(
                LostKind::Closed,
                format!("the store at {} closed the connection", self.options.endpoint()),
            )),
            Ok(length) => {
                connection.frames.feed(&self.chunk[..length]);
                Ok(length == CHUNK)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.broken(&error)),
        }
    }

    fn broken(&self, error: &io::Error) -> ConnectionEnd {
        let message = format!("the connection to the store at {} broke: {}", self.options.endpoint(), plain(error));
        ConnectionEnd::broken(LostKind::Closed, message)
    }

    fn take_frames(&mut self, core: &mut Core<'_>, connection: &mut Connection) -> Result<(), StoreError> {
        loop {
            let (answer, length) = match connection.frames.cut() {
                Ok(Some(frame)) => (Answer::decode(frame)?, frame.len()),
                Ok(None) => break,
                Err(error @ (Broken::Foreign | Broken::Length(_))) => {
                    return Err(StoreError::new(LostKind::Protocol, format!("the store sent {error}")));
                }
            };
            self.answer(core, answer, length)?;
        }
        connection.frames.rest();
        Ok(())
    }

    fn answer(&mut self, core: &mut Core<'_>, answer: Answer, length: usize) -> Result<(), StoreError> {
        match answer {
            Answer::Reply { tag, ok, revision, results } => {
                let effect = match &mut self.unanswered {
                    Some(unanswered) => unanswered.reply(revision, results)?,
                    None => AnswerEffect::Reply(results),
                };
                match effect {
                    AnswerEffect::Nothing => {}
                    AnswerEffect::Reply(results) => {
                        core.events.push(Event::Reply { tag, ok, revision, results }, length);
                    }
                    AnswerEffect::Changes(ChangeSet { revision, changes }) => {
                        core.events.push(Event::Changes { revision, changes }, length);
                    }
                }
            }
            Answer::Changes { revision, changes } => {
                let set = ChangeSet { revision, changes };
                if let Some(unanswered) = &mut self.unanswered {
                    unanswered.note(&set);
                }
                core.events.push(Event::Changes { revision, changes: set.changes }, length);
            }
            Answer::Alive { pace, .. } if !pace.is_valid() => {
                return Err(StoreError::new(LostKind::Protocol, "the store granted no time to live"));
            }
            Answer::Alive { sent, wall_ns, pace } => core.answer(sent, pace.terms(), Some(wall_ns))?,
            Answer::Refused { kind, message } => {
                let at = self.options.endpoint();
                return Err(StoreError::new(kind, format!("the store at {at} ended the session: {message}")));
            }
            Answer::Welcome { .. } | Answer::Ready { .. } => {
                return Err(StoreError::new(LostKind::Protocol, "the store began a second handshake"));
            }
        }
        Ok(())
    }
}
