//! One client connection of the workers' store: reads and executes requests, and sends replies.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, timeout};

use super::hub::{Closed, Hub, Peer};
use super::map::Id;
use super::wire::{Parser, Request};

/// Size in bytes of the read buffer that all connections share.
pub(super) const CHUNK: usize = 128 * 1024;
/// Maximum number of unsent reply bytes. If there are more, no further requests of the connection are executed.
const MAX_UNSENT: usize = 64 * 1024;
/// Duration after which a connection yields to the other connections. A request that was started earlier is completed.
const TURN: Duration = Duration::from_millis(2);
/// Maximum capacity that each buffer of an idle connection may keep, in bytes.
const MAX_IDLE: usize = 16 * 1024;

/// Condition at which to stop serving a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    Greeted,
    Left,
}

/// A connection, with its input and output state. Dropping it closes the socket.
pub(super) struct Connection {
    id: Id,
    stream: TcpStream,
    hub: Rc<RefCell<Hub>>,
    peer: Rc<Peer>,
    parser: Parser,
    /// Received bytes that have not been executed yet: the start of an incomplete request, or requests that wait
    /// until the peer has accepted earlier replies.
    unparsed: Vec<u8>,
    /// Number of bytes at the start of `peer.out` that have already been sent.
    sent: usize,
    /// Number of bytes of this connection's buffers that are counted in the store's memory budget.
    charged: usize,
    woken: Vec<Id>,
    stall: Option<Stall>,
}

/// Timeout for a peer that accepts no bytes. It consists of two timers that run one after the other.
///
/// A single pause of this process can use up only one timer, so the peer still has at least half of the timeout.
struct Stall {
    timer: Pin<Box<Sleep>>,
    is_second_half: bool,
}

impl Connection {
    pub(super) fn new(id: Id, stream: TcpStream, peer: Rc<Peer>, hub: Rc<RefCell<Hub>>) -> Self {
        // Ignore an error, because it means that the connection is closed. The next read reports this.
        let _ = stream.set_nodelay(true);
        Self {
            id,
            stream,
            hub,
            peer,
            parser: Parser::default(),
            unparsed: Vec::new(),
            sent: 0,
            charged: 0,
            woken: Vec::new(),
            stall: None,
        }
    }

    /// Serves the connection until it ends. It is not an error if the client disconnects between two requests.
    pub(super) async fn serve(&mut self) -> Result<(), Closed> {
        let limit = self.hub.borrow().limits.greeting;
        match self.serve_within(limit).await {
            // Ignore these errors, because they are normal when a worker is killed.
            Err(Closed::Socket(error)) if matches!(error.kind(), ConnectionReset | BrokenPipe) => Ok(()),
            result => result,
        }
    }

    async fn serve_within(&mut self, greeting: Duration) -> Result<(), Closed> {
        match timeout(greeting, poll_fn(|cx| self.poll(cx, Until::Greeted))).await {
            Err(_) => Err(Closed::Silent(greeting)),
            Ok(Err(reason)) => Err(reason),
            Ok(Ok(Until::Left)) => Ok(()),
            Ok(Ok(Until::Greeted)) => poll_fn(|cx| self.poll(cx, Until::Left)).await.map(drop),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>, until: Until) -> Poll<Result<Until, Closed>> {
        let mut waker = self.peer.waker.borrow_mut();
        match &*waker {
            Some(known) if known.will_wake(cx.waker()) => {}
            _ => *waker = Some(cx.waker().clone()),
        }
        drop(waker);
        let turn = Instant::now() + TURN;
        loop {
            let may_read = self.send(cx)?;
            if until == Until::Greeted && self.parser.is_validated() {
                return Poll::Ready(Ok(Until::Greeted));
            }
            if !may_read {
                return Poll::Pending;
            }
            if Instant::now() >= turn {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !self.unparsed.is_empty() && self.work_off_unparsed(turn)? {
                continue;
            }
            match ready!(self.receive(cx, turn))? {
                0 if self.unparsed.is_empty() => return Poll::Ready(Ok(Until::Left)),
                0 => return Poll::Ready(Err(Closed::Truncated)),
                CHUNK => {
                    // Let other tasks run before the next read, because this connection may have many more bytes to
                    // read.
                    self.send(cx)?;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                _ => {}
            }
        }
    }

    /// Reads once and executes the complete requests. Returns the number of bytes that were read.
    fn receive(&mut self, cx: &mut Context<'_>, turn: Instant) -> Poll<Result<usize, Closed>> {
        let mut scratch = std::mem::take(&mut self.hub.borrow_mut().scratch);
        // Restore the buffer's size, because the buffer is empty if another connection panicked while using it.
        scratch.resize(CHUNK, 0);
        let result = self.receive_into(&mut scratch, cx, turn);
        self.hub.borrow_mut().scratch = scratch;
        result
    }

    fn receive_into(&mut self, scratch: &mut [u8], cx: &mut Context<'_>, turn: Instant) -> Poll<Result<usize, Closed>> {
        let mut buffer = ReadBuf::new(scratch);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
        let bytes = buffer.filled();
        if self.unparsed.is_empty() {
            let used = self.work_off(bytes, turn)?;
            self.unparsed.extend_from_slice(&bytes[used..]);
            self.settle()?;
        } else {
            self.unparsed.extend_from_slice(bytes);
            self.work_off_unparsed(turn)?;
        }
        Poll::Ready(Ok(bytes.len()))
    }

    /// Executes the complete requests in `unparsed`. Returns true if there was at least one.
    fn work_off_unparsed(&mut self, turn: Instant) -> Result<bool, Closed> {
        let mut unparsed = std::mem::take(&mut self.unparsed);
        let used = self.work_off(&unparsed, turn)?;
        unparsed.drain(..used);
        if unparsed.is_empty() && unparsed.capacity() > MAX_IDLE {
            unparsed = Vec::new();
        }
        self.unparsed = unparsed;
        self.settle()?;
        Ok(used > 0)
    }

    /// Executes the requests at the start of `bytes`, which a client has sent. Stops early if too many bytes of replies
    /// are unsent, or when this connection's turn on the thread ends. Returns the length of the executed requests in
    /// bytes.
    fn work_off(&mut self, bytes: &[u8], turn: Instant) -> Result<usize, Closed> {
        let mut hub = self.hub.borrow_mut();
        let mut out = self.peer.out.borrow_mut();
        let mut used = 0;
        // Drop the replies that have already been sent. If a client pipelines requests and reads slowly, there may
        // always be unsent replies, so the sent replies cannot be kept until all replies are sent.
        if self.sent > 0 && out.len() - self.sent <= MAX_UNSENT {
            *out = out.split_off(self.sent);
            self.sent = 0;
        }
        while out.len() - self.sent <= MAX_UNSENT {
            let Some((request, length)) = self.parser.next(&bytes[used..])? else { break };
            if let Request::Ping(nonce) = request {
                self.peer.pid.set(self.peer.pid.get().or(Some(nonce)));
            }
            hub.map.apply(self.id, &request, &mut out, &mut self.woken)?;
            used += length;
            for id in self.woken.drain(..) {
                if id == self.id {
                    out.push(super::map::READY);
                } else if let Some(peer) = hub.peers.get(&id) {
                    peer.out.borrow_mut().push(super::map::READY);
                    if let Some(waker) = peer.waker.borrow_mut().take() {
                        waker.wake();
                    }
                }
            }
            if Instant::now() >= turn {
                break;
            }
        }
        Ok(used)
    }

    /// Updates this connection's share of the store's memory budget to the current size of its buffers.
    fn settle(&mut self) -> Result<(), Closed> {
        let taken = self.unparsed.capacity() + self.peer.out.borrow().capacity();
        let taken = if taken > MAX_IDLE { taken } else { 0 };
        if taken != self.charged {
            let mut hub = self.hub.borrow_mut();
            hub.map.budget().release(std::mem::take(&mut self.charged));
            hub.map.budget().charge(taken)?;
            self.charged = taken;
        }
        Ok(())
    }

    /// Sends as many bytes as the socket accepts. Returns false if many bytes are still unsent, so that the caller does
    /// not execute further requests.
    fn send(&mut self, cx: &mut Context<'_>) -> Result<bool, Closed> {
        let mut out = self.peer.out.borrow_mut();
        while self.sent < out.len() {
            match Pin::new(&mut self.stream).poll_write(cx, &out[self.sent..]) {
                Poll::Ready(Ok(bytes)) => {
                    self.sent += bytes;
                    self.stall = None;
                }
                Poll::Ready(Err(error)) => return Err(error.into()),
                Poll::Pending => {
                    let unsent = out.len() - self.sent;
                    drop(out);
                    self.check_stall(cx)?;
                    return Ok(unsent <= MAX_UNSENT);
                }
            }
        }
        if self.sent > 0 {
            self.sent = 0;
            out.clear();
            if out.capacity() > MAX_IDLE {
                *out = Vec::new();
                drop(out);
                self.settle()?;
            }
        }
        Ok(true)
    }

    fn check_stall(&mut self, cx: &mut Context<'_>) -> Result<(), Closed> {
        let limit = self.hub.borrow().limits.stall;
        let half = || Box::pin(sleep(limit / 2));
        let stall = self.stall.get_or_insert_with(|| Stall { timer: half(), is_second_half: false });
        while stall.timer.as_mut().poll(cx).is_ready() {
            if stall.is_second_half {
                return Err(Closed::Stalled(limit));
            }
            *stall = Stall { timer: half(), is_second_half: true };
        }
        Ok(())
    }
}

impl Drop for Connection {
    /// Releases this connection's share of the memory budget, even after a panic.
    fn drop(&mut self) {
        if let Ok(mut hub) = self.hub.try_borrow_mut() {
            hub.map.stop_waiting(self.id);
            hub.peers.remove(&self.id);
            hub.map.budget().release(self.charged);
        }
    }
}
