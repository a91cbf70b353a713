//! An open session of a client. Sends requests and keep-alives, receives answers, and moves to a new connection when
//! the current one breaks.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use elasticrs_sys::clock::{boot_now, nanoseconds};
use nix::sys::socket::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::task::yield_now;

use super::away::{Away, LAST_PAUSE};
use super::connect::{Lost, Opened, Options, Wanted, deadline, plain, reopen};
use super::events::{Event, Events, SILENT};
use super::guard::Guard;
use super::protocol::{Answer, Pace, Request, Secret};
use super::types::{LostKind, OpResult};
use super::unanswered::{Heard, Kind, Unanswered};
use super::wire::{Broken, Frames};
use crate::handle::{Command, Ended, Halt, Inbox};
use crate::watched::Told;

/// A request of the user, encoded as a frame.
pub(super) type Asked = (Kind, Vec<u8>);

/// An event that one iteration of the session loop handles.
enum Turn {
    Command(Option<Command<Asked>>),
    Socket(io::Result<()>),
    Time,
}

/// The current connection or, after it broke, the last one. It stays open until the session has moved to a new one,
/// because closing it would end the session.
struct Connection {
    stream: TcpStream,
    frames: Frames,
    unsent: Vec<u8>,
    /// Send times of the unanswered keep-alives, in nanoseconds of the boot clock.
    beats: VecDeque<u64>,
}

impl Connection {
    fn new(stream: TcpStream, frames: Frames, unsent: Vec<u8>) -> Self {
        Self { stream, frames, unsent, beats: VecDeque::new() }
    }
}

pub(super) struct Session<'a> {
    options: &'a Options,
    events: &'a Events,
    guard: &'a dyn Guard,
    number: u64,
    secret: Secret,
    connection: Connection,
    /// Unanswered requests and the state of the watches. `None` if the session cannot outlive its connection.
    unanswered: Option<Unanswered>,
    pace: Pace,
    /// Time at which this side gives up the session, in nanoseconds of the boot clock.
    deadline: u64,
    next_beat: u64,
    /// Send time of the last answered keep-alive, or of the hello if no keep-alive was answered, in nanoseconds of the
    /// boot clock.
    answered: u64,
    is_stalled: bool,
    /// Time of the last outage notice to the user, in nanoseconds of the boot clock.
    told_away: Option<u64>,
    chunk: Box<[u8]>,
}

/// Maximum number of bytes per read.
const CHUNK: usize = 16 * 1024;

/// Upper bound on the time limit for answering a keep-alive, in milliseconds. The time limit is at least two keep-alive
/// intervals, even if that exceeds this bound.
const MAX_PATIENCE_MS: u32 = 3_000;

impl<'a> Session<'a> {
    pub(super) fn new(options: &'a Options, opened: Opened, events: &'a Events, guard: &'a dyn Guard) -> Self {
        Self {
            options,
            events,
            guard,
            number: opened.met.session,
            secret: opened.met.secret,
            deadline: opened.deadline(),
            connection: Connection::new(opened.stream, opened.frames, Vec::new()),
            unanswered: options.resume.then(Unanswered::default),
            pace: opened.met.pace,
            next_beat: boot_now(),
            answered: opened.met.sent,
            is_stalled: false,
            told_away: None,
            chunk: vec![0; CHUNK].into(),
        }
    }

    pub(super) async fn run(mut self, early: Vec<Asked>, inbox: &mut Inbox<Asked>) -> Ended {
        for asked in early {
            self.ask(asked);
        }
        loop {
            let mut halt = self.turn(inbox).await;
            if let Err(Halt::Broken(lost)) = halt {
                halt = if self.unanswered.is_some() { self.move_on(lost, inbox).await } else { Err(lost.into()) };
            }
            if let Err(Halt::Ended(ended)) = halt {
                return ended;
            }
        }
    }

    async fn turn(&mut self, inbox: &mut Inbox<Asked>) -> Result<(), Halt> {
        // Check the deadline first, because this process or the machine may have been stopped, and messages that arrive
        // after the deadline do not count.
        let now = boot_now();
        self.check_deadline(now)?;
        self.take_frames()?;
        self.check_answers(now)?;
        self.beat(now);
        let is_sent = self.flush();
        match self.next(inbox, is_sent, now).await {
            Turn::Time => Ok(()),
            Turn::Command(command) => self.commands(command, inbox),
            Turn::Socket(ready) => {
                self.check_deadline(boot_now())?;
                ready.map_err(|error| self.broken(&error))?;
                if self.read()? {
                    yield_now().await;
                }
                Ok(())
            }
        }
    }

    async fn next(&self, inbox: &mut Inbox<Asked>, is_sent: bool, now: u64) -> Turn {
        let wake = self.next_beat.min(self.deadline).min(self.overdue()).saturating_sub(now);
        // Stop reading while the user does not take events.
        let interest = match (self.events.is_full(), is_sent) {
            (false, true) => Some(Interest::READABLE),
            (false, false) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::WRITABLE),
            (true, true) => None,
        };
        let socket = async {
            match interest {
                Some(interest) => self.connection.stream.ready(interest).await.map(drop),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = inbox.recv() => Turn::Command(command),
            ready = socket => Turn::Socket(ready),
            () = tokio::time::sleep(Duration::from_nanos(wake)) => Turn::Time,
            () = self.events.wake_task.notified() => Turn::Time,
        }
    }

    fn check_deadline(&self, now: u64) -> Result<(), Lost> {
        if now < self.deadline && !self.events.is_over() {
            return Ok(());
        }
        Err(if self.is_stalled {
            let seconds = self.options.stall_timeout.unwrap_or_default().as_secs_f64();
            Lost::new(
                LostKind::Silent,
                format!("this program has not asked for events for {seconds} s, so its keep-alives were stopped"),
            )
        } else if self.events.is_full() {
            Lost::new(LostKind::Slow, "this program does not read its events")
        } else if let Some((kind, message)) = self.events.trouble() {
            Lost::new(kind, message)
        } else {
            Lost::new(LostKind::Silent, format!("{SILENT} ({})", self.options.endpoint()))
        })
    }

    /// Returns the time limit for answering a keep-alive. If it is exceeded, the client reconnects.
    fn patience(&self) -> Duration {
        let Pace { interval_ms, ttl_ms } = self.pace;
        Duration::from_millis((ttl_ms / 5).min(MAX_PATIENCE_MS).max(interval_ms.saturating_mul(2)).into())
    }

    /// Returns the time at which the client leaves the connection because a keep-alive was not answered. `u64::MAX`
    /// while the event queue is full, because then the client reads no answers.
    fn overdue(&self) -> u64 {
        match self.connection.beats.front() {
            Some(sent) if self.unanswered.is_some() && !self.events.is_full() => sent + nanoseconds(self.patience()),
            _ => u64::MAX,
        }
    }

    fn check_answers(&mut self, now: u64) -> Result<(), Halt> {
        if now < self.overdue() {
            return Ok(());
        }
        // Read the answers that arrived while this process was stopped.
        while self.read()? {}
        self.take_frames()?;
        if now < self.overdue() {
            return Ok(());
        }
        let why = format!("no keep-alive was answered for {} s", self.patience().as_secs_f64());
        Err(Halt::Broken(Lost::new(LostKind::Silent, why)))
    }

    fn beat(&mut self, now: u64) {
        if now < self.next_beat {
            return;
        }
        self.next_beat = now + u64::from(self.pace.interval_ms) * 1_000_000;
        self.is_stalled = self.events.is_stalled(self.options.stall_timeout);
        if !self.is_stalled {
            self.connection.unsent.extend(Request::KeepAlive { sent: now }.encode());
            self.connection.beats.push_back(now);
        }
    }

    fn commands(&mut self, command: Option<Command<Asked>>, inbox: &mut Inbox<Asked>) -> Result<(), Halt> {
        self.command(command)?;
        // Collect all requests that are already queued, so that they are sent in one write.
        while let Ok(command) = inbox.try_recv() {
            self.command(Some(command))?;
        }
        Ok(())
    }

    fn command(&mut self, command: Option<Command<Asked>>) -> Result<(), Halt> {
        match command {
            Some(Command::Request(asked)) => {
                self.ask(asked);
                Ok(())
            }
            Some(Command::Close(reply)) => Err(self.close(Some(reply))),
            None => Err(self.close(None)),
        }
    }

    fn ask(&mut self, (kind, frame): Asked) {
        self.connection.unsent.extend(&frame);
        if let Some(unanswered) = &mut self.unanswered {
            unanswered.ask(kind, frame);
        }
    }

    /// Ends the session, even if another process holds a duplicate of the socket.
    fn close(&mut self, reply: Option<SyncSender<()>>) -> Halt {
        self.flush();
        // Ignore the error, because it means that the socket is no longer connected.
        let _ = shutdown(self.connection.stream.as_raw_fd(), Shutdown::Both);
        Halt::Ended(Ended::Closed(reply))
    }

    /// Writes as many bytes as the kernel accepts. Returns true if none remain.
    fn flush(&mut self) -> bool {
        let Connection { stream, unsent, .. } = &mut self.connection;
        let mut sent = 0;
        while sent < unsent.len() {
            match stream.try_write(&unsent[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // Drop the unsent bytes. Reading from the connection will show why it broke.
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
        unsent.is_empty()
    }

    /// Reads the bytes that have arrived. Returns true if there may be more.
    fn read(&mut self) -> Result<bool, Halt> {
        match self.connection.stream.try_read(&mut self.chunk) {
            Ok(0) => Err(Halt::Broken(Lost::new(
                LostKind::Closed,
                format!("the store at {} closed the connection", self.options.endpoint()),
            ))),
            Ok(length) => {
                self.connection.frames.feed(&self.chunk[..length]);
                Ok(length == CHUNK)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.broken(&error)),
        }
    }

    fn broken(&self, error: &io::Error) -> Halt {
        let message = format!("the connection to the store at {} broke: {}", self.options.endpoint(), plain(error));
        Halt::Broken(Lost::new(LostKind::Closed, message))
    }

    fn take_frames(&mut self) -> Result<(), Lost> {
        loop {
            let (answer, length) = match self.connection.frames.cut() {
                Ok(Some(frame)) => (Answer::decode(frame)?, frame.len()),
                Ok(None) => break,
                Err(error @ (Broken::Foreign | Broken::Length(_))) => {
                    return Err(Lost::new(LostKind::Protocol, format!("the store sent {error}")));
                }
            };
            self.answer(answer, length)?;
        }
        self.connection.frames.rest();
        Ok(())
    }

    fn answer(&mut self, answer: Answer, length: usize) -> Result<(), Lost> {
        match answer {
            Answer::Reply { tag, ok, revision, results } => self.reply(tag, ok, revision, results, length)?,
            Answer::Changes { revision, changes } => {
                let told = Told { revision, changes };
                let heard = match &mut self.unanswered {
                    Some(unanswered) => unanswered.changes(told),
                    None => Heard::Changes(told),
                };
                self.tell(heard, length);
            }
            Answer::Alive { sent, wall_ns, pace } => self.alive(sent, wall_ns, pace)?,
            Answer::Refused { kind, message } => {
                let at = self.options.endpoint();
                return Err(Lost::new(kind, format!("the store at {at} ended the session: {message}")));
            }
            Answer::Welcome { .. } | Answer::Ready { .. } => {
                return Err(Lost::new(LostKind::Protocol, "the store began a second handshake"));
            }
        }
        Ok(())
    }

    fn reply(&mut self, tag: u64, ok: bool, revision: u64, results: Vec<OpResult>, length: usize) -> Result<(), Lost> {
        let heard = match &mut self.unanswered {
            Some(unanswered) => unanswered.reply(ok, revision, results)?,
            None => Heard::Reply(results),
        };
        match heard {
            Heard::Reply(results) => self.events.push(Event::Reply { tag, ok, revision, results }, length),
            heard => self.tell(heard, length),
        }
        Ok(())
    }

    fn tell(&self, heard: Heard, length: usize) {
        if let Heard::Changes(Told { revision, changes }) = heard {
            self.events.push(Event::Changes { revision, changes }, length);
        }
    }

    fn alive(&mut self, sent: u64, wall_ns: u64, pace: Pace) -> Result<(), Lost> {
        let now = boot_now();
        if sent <= self.answered || sent > now || pace.interval_ms == 0 || pace.ttl_ms <= pace.interval_ms {
            return Err(Lost::new(LostKind::Protocol, "the store answered a keep-alive that was never sent"));
        }
        while self.connection.beats.front().is_some_and(|beat| *beat <= sent) {
            self.connection.beats.pop_front();
        }
        self.renew(sent, pace);
        self.next_beat = self.next_beat.min(now + u64::from(pace.interval_ms) * 1_000_000);
        self.events.renewed(self.deadline, sent, now, Some(wall_ns));
        Ok(())
    }

    /// Extends the deadline. It cannot be too late, because the store starts counting only after `sent`.
    fn renew(&mut self, sent: u64, pace: Pace) {
        self.answered = sent;
        self.pace = pace;
        self.deadline = deadline(sent, pace);
        self.guard.deadline(self.deadline);
    }

    /// Resumes the session on another connection. Retries until the lease expires. The old connection stays open until
    /// the session has moved.
    async fn move_on(&mut self, lost: Lost, inbox: &mut Inbox<Asked>) -> Result<(), Halt> {
        let what = format!("the store at {}", self.options.endpoint());
        let unanswered = self.connection.beats.front().copied();
        let mut away = Away::new(what, boot_now(), unanswered, self.deadline, self.told_away);
        let mut why = lost;
        loop {
            self.events.set_trouble(Some(away.trouble(why.kind, &why.message, self.answered)));
            let opened = self.attempt(&mut away, &why.message, inbox).await?;
            match opened {
                Ok(opened) => {
                    self.resume(opened, &away);
                    return Ok(());
                }
                // A retry would not help, because the store has identified this client and refuses it.
                Err(lost @ Lost { kind: LostKind::Gone | LostKind::Other | LostKind::Run | LostKind::Token, .. }) => {
                    return Err(lost.into());
                }
                Err(lost) => why = lost,
            }
        }
    }

    async fn attempt(
        &mut self,
        away: &mut Away,
        why: &str,
        inbox: &mut Inbox<Asked>,
    ) -> Result<Result<Opened, Lost>, Halt> {
        let (options, guard, pause) = (self.options, self.guard, away.pause());
        let wanted = Wanted { resume: Some((self.number, self.secret)), met: self.events.met() };
        let patience = self.patience().max(Duration::from_secs(1)).min(options.connect_timeout);
        let events = self.events;
        let attempt = async move {
            tokio::time::sleep(pause).await;
            // Do not reconnect while the user fetches no events, because reconnecting would renew the lease.
            while events.is_stalled(options.stall_timeout) {
                tokio::time::sleep(LAST_PAUSE).await;
            }
            reopen(options, guard, wanted, patience).await
        };
        tokio::pin!(attempt);
        loop {
            let now = boot_now();
            self.is_stalled = self.events.is_stalled(self.options.stall_timeout);
            self.check_deadline(now)?;
            if let Some(message) = away.news(now, why) {
                self.events.push(Event::Notice { message }, 0);
            }
            let wake = self.deadline.min(away.next_news()).saturating_sub(now);
            tokio::select! {
                opened = &mut attempt => {
                    self.check_deadline(boot_now())?;
                    return Ok(opened);
                }
                command = inbox.recv() => self.commands(command, inbox)?,
                () = tokio::time::sleep(Duration::from_nanos(wake)) => {}
                () = self.events.wake_task.notified() => {}
            }
        }
    }

    fn resume(&mut self, opened: Opened, away: &Away) {
        self.guard.resumed();
        let again = self.unanswered.as_mut().map(Unanswered::ask_again).unwrap_or_default();
        self.connection = Connection::new(opened.stream, opened.frames, again);
        self.renew(opened.met.sent, opened.met.pace);
        self.next_beat = boot_now();
        self.events.meet(opened.met.store, opened.met.revision);
        self.events.renewed(self.deadline, opened.met.sent, opened.met.sent, None);
        self.events.set_trouble(None);
        self.told_away = away.told();
        if let Some(message) = away.over(boot_now()) {
            self.events.push(Event::Notice { message }, 0);
        }
    }
}
