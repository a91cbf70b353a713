//! An open session of a client: requests out, answers in, keep-alives in time.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use elasticrs_runtime::clock::boot_now;
use nix::sys::socket::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::yield_now;

use super::connect::{Lost, Opened, Options, deadline, plain};
use super::events::{Event, Events, SILENT};
use super::guard::Guard;
use super::protocol::{Answer, Pace, Request};
use super::types::LostKind;
use super::wire::{Broken, Frames};

/// What the user of a client asks of its task.
pub(super) enum Command {
    Send(Vec<u8>),
    Close(SyncSender<()>),
}

/// How a session came to its end.
pub(super) enum Ended {
    Lost(Lost),
    /// By its user, who may wait for it.
    Closed(Option<SyncSender<()>>),
}

impl From<Lost> for Ended {
    fn from(lost: Lost) -> Self {
        Self::Lost(lost)
    }
}

/// What one turn of the loop found to do.
enum Turn {
    Command(Option<Command>),
    Socket(io::Result<()>),
    Time,
}

pub(super) struct Session<'a> {
    options: &'a Options,
    events: &'a Events,
    guard: &'a dyn Guard,
    stream: TcpStream,
    frames: Frames,
    unsent: Vec<u8>,
    pace: Pace,
    /// Boot clock: when this side gives up.
    deadline: u64,
    next_beat: u64,
    /// The keep-alive that was answered last.
    answered: u64,
    is_stalled: bool,
    chunk: Box<[u8]>,
}

/// Bytes that are read at a time.
const CHUNK: usize = 16 * 1024;

impl<'a> Session<'a> {
    pub(super) fn new(
        options: &'a Options,
        opened: Opened,
        events: &'a Events,
        guard: &'a dyn Guard,
        unsent: Vec<u8>,
    ) -> Self {
        Self {
            options,
            events,
            guard,
            deadline: opened.deadline(),
            stream: opened.stream,
            frames: opened.frames,
            unsent,
            pace: opened.met.pace,
            next_beat: boot_now(),
            answered: 0,
            is_stalled: false,
            chunk: vec![0; CHUNK].into(),
        }
    }

    pub(super) async fn run(mut self, inbox: &mut UnboundedReceiver<Command>) -> Ended {
        loop {
            if let Err(ended) = self.turn(inbox).await {
                return ended;
            }
        }
    }

    async fn turn(&mut self, inbox: &mut UnboundedReceiver<Command>) -> Result<(), Ended> {
        // First of all: after a stop of this process or of the machine nothing counts that came too late.
        let now = boot_now();
        self.check_deadline(now)?;
        self.take_frames()?;
        self.beat(now);
        let is_sent = self.flush();
        match self.next(inbox, is_sent, now).await {
            Turn::Time => Ok(()),
            Turn::Command(command) => self.command(command, inbox),
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

    async fn next(&self, inbox: &mut UnboundedReceiver<Command>, is_sent: bool, now: u64) -> Turn {
        let wake = self.next_beat.min(self.deadline).saturating_sub(now);
        // A user who does not take events gets no more of them.
        let interest = match (self.events.is_full(), is_sent) {
            (false, true) => Some(Interest::READABLE),
            (false, false) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::WRITABLE),
            (true, true) => None,
        };
        let socket = async {
            match interest {
                Some(interest) => self.stream.ready(interest).await.map(drop),
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

    fn check_deadline(&self, now: u64) -> Result<(), Ended> {
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
        } else {
            Lost::new(LostKind::Silent, format!("{SILENT} ({})", self.options.endpoint()))
        }
        .into())
    }

    fn beat(&mut self, now: u64) {
        if now < self.next_beat {
            return;
        }
        self.next_beat = now + u64::from(self.pace.interval_ms) * 1_000_000;
        self.is_stalled = self.events.is_stalled(self.options.stall_timeout);
        if !self.is_stalled {
            self.unsent.extend(Request::KeepAlive { sent: now }.encode());
        }
    }

    fn command(&mut self, command: Option<Command>, inbox: &mut UnboundedReceiver<Command>) -> Result<(), Ended> {
        let mut next = command;
        loop {
            match next {
                Some(Command::Send(frame)) => self.unsent.extend(frame),
                Some(Command::Close(reply)) => return Err(self.close(Some(reply))),
                None => return Err(self.close(None)),
            }
            // Requests that were made together go out together.
            match inbox.try_recv() {
                Ok(command) => next = Some(command),
                Err(_) => return Ok(()),
            }
        }
    }

    /// Ends the session for good: a duplicate of the socket, held elsewhere, does not keep it.
    fn close(&mut self, reply: Option<SyncSender<()>>) -> Ended {
        self.flush();
        // An error: it is not connected any more.
        let _ = shutdown(self.stream.as_raw_fd(), Shutdown::Both);
        Ended::Closed(reply)
    }

    /// Hands the kernel what it takes; true when nothing is left.
    fn flush(&mut self) -> bool {
        let mut sent = 0;
        while sent < self.unsent.len() {
            match self.stream.try_write(&self.unsent[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // Why the connection has ended is still to be read from it.
                    sent = self.unsent.len();
                }
            }
        }
        if sent == self.unsent.len() {
            self.unsent.clear();
            if self.unsent.capacity() > 4 * CHUNK {
                self.unsent = Vec::new();
            }
        } else {
            self.unsent.drain(..sent);
        }
        self.unsent.is_empty()
    }

    /// Reads what has arrived; whether there may be more of it.
    fn read(&mut self) -> Result<bool, Ended> {
        match self.stream.try_read(&mut self.chunk) {
            Ok(0) => Err(Lost::new(
                LostKind::Closed,
                format!("the store at {} closed the connection", self.options.endpoint()),
            )
            .into()),
            Ok(length) => {
                self.frames.feed(&self.chunk[..length]);
                Ok(length == CHUNK)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.broken(&error)),
        }
    }

    fn broken(&self, error: &io::Error) -> Ended {
        let message = format!("the connection to the store at {} broke: {}", self.options.endpoint(), plain(error));
        Lost::new(LostKind::Closed, message).into()
    }

    fn take_frames(&mut self) -> Result<(), Ended> {
        loop {
            let (answer, length) = match self.frames.cut() {
                Ok(Some(frame)) => (Answer::decode(frame).map_err(Lost::from)?, frame.len()),
                Ok(None) => break,
                Err(error @ (Broken::Foreign | Broken::Length(_))) => {
                    return Err(Lost::new(LostKind::Protocol, format!("the store sent {error}")).into());
                }
            };
            self.answer(answer, length)?;
        }
        self.frames.rest();
        Ok(())
    }

    fn answer(&mut self, answer: Answer, length: usize) -> Result<(), Ended> {
        match answer {
            Answer::Reply { tag, ok, revision, results } => {
                self.events.push(Event::Reply { tag, ok, revision, results }, length);
            }
            Answer::Changes { revision, changes } => self.events.push(Event::Changes { revision, changes }, length),
            Answer::Alive { sent, wall_ns, pace } => self.alive(sent, wall_ns, pace)?,
            Answer::Refused { kind, message } => {
                let at = self.options.endpoint();
                return Err(Lost::new(kind, format!("the store at {at} ended the session: {message}")).into());
            }
            Answer::Welcome { .. } | Answer::Ready { .. } => {
                return Err(Lost::new(LostKind::Protocol, "the store began a second handshake").into());
            }
        }
        Ok(())
    }

    fn alive(&mut self, sent: u64, wall_ns: u64, pace: Pace) -> Result<(), Ended> {
        let now = boot_now();
        if sent <= self.answered || sent > now || pace.interval_ms == 0 || pace.ttl_ms <= pace.interval_ms {
            return Err(Lost::new(LostKind::Protocol, "the store answered a keep-alive that was never sent").into());
        }
        self.answered = sent;
        self.pace = pace;
        self.deadline = deadline(sent, pace);
        self.next_beat = self.next_beat.min(now + u64::from(pace.interval_ms) * 1_000_000);
        self.guard.deadline(self.deadline);
        self.events.renewed(self.deadline, sent, now, Some(wall_ns));
        Ok(())
    }
}
