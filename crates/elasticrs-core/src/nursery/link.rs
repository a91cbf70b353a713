//! One end of the socket between agent and nursery: frames, descriptors, and no blocking.
//!
//! Bytes are queued here, not in the kernel: neither end ever waits for the other one to read. The owner of the end
//! drives it: [`Link::receive`] when the socket is readable, [`Link::flush`] when it is writable and
//! [`Link::has_unsent`].
//!
//! How descriptors find their frame: a sender gives a frame's descriptors to the `sendmsg` that carries the frame's
//! first byte, and the kernel ends a `recvmsg` behind the segment that carries descriptors. So each frame with
//! descriptors makes exactly one batch (possibly cut off) on the receiver's side, in order.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::protocol::{MAX_FRAME, Message, Reply, Request};
use crate::sys::socket;

const HEADER: usize = size_of::<u32>();
const CHUNK: usize = 64 * 1024;

/// The agent's end.
pub type AgentLink = Link<Request, Reply>;
/// The nursery's end.
pub type NurseryLink = Link<Reply, Request>;

/// One end: sends `Out`, receives `In`.
#[derive(Debug)]
pub struct Link<Out, In> {
    socket: OwnedFd,
    unsent: VecDeque<Frame>,
    received: Received,
    kinds: PhantomData<fn(&Out) -> In>,
}

#[derive(Debug)]
struct Frame {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

impl<Out: Message + Serialize, In: Message + DeserializeOwned> Link<Out, In> {
    /// Takes over a connected Unix stream socket and makes it non-blocking.
    pub fn new(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        let socket = socket.into();
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self { socket, unsent: VecDeque::new(), received: Received::default(), kinds: PhantomData })
    }

    /// Queues a message, and sends what the socket takes.
    ///
    /// `fds` are closed here once they are sent. `InvalidInput` when there are not as many as the message announces,
    /// more than the kernel carries, or the frame is too large; other errors are those of the socket.
    pub fn send(&mut self, message: &Out, fds: Vec<OwnedFd>) -> io::Result<()> {
        if fds.len() != message.descriptors() || fds.len() > socket::MAX_DESCRIPTORS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.unsent.push_back(Frame { bytes: encode(message)?, sent: 0, fds });
        self.flush()
    }

    /// Sends what the socket takes.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.unsent.front_mut() {
            match frame.send(&self.socket) {
                Ok(()) if frame.sent == frame.bytes.len() => drop(self.unsent.pop_front()),
                Ok(()) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether [`Link::flush`] is due once the socket is writable.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// The next message and its descriptors; `None` when there is no whole one yet.
    ///
    /// There are fewer descriptors than [`Message::descriptors`] when this process may not open more.
    /// `UnexpectedEof` when the other end is closed, `InvalidData` for what is no message.
    pub fn receive(&mut self) -> io::Result<Option<(In, Vec<OwnedFd>)>> {
        loop {
            if let Some(message) = self.received.next()? {
                return Ok(Some(message));
            }
            match self.received.read(&self.socket) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

impl<Out, In> AsFd for Link<Out, In> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<Out, In> AsRawFd for Link<Out, In> {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Frame {
    fn send(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        let raw: Vec<RawFd> = self.fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        let bytes = [IoSlice::new(&self.bytes[self.sent..])];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        self.sent += sendmsg::<()>(socket.as_raw_fd(), &bytes, control, flags, None)?;
        // They went with the first byte.
        self.fds.clear();
        Ok(())
    }
}

fn encode<M: Serialize>(message: &M) -> io::Result<Vec<u8>> {
    let mut bytes = postcard::to_extend(message, vec![0; HEADER]).map_err(invalid)?;
    let length = bytes.len() - HEADER;
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too large"));
    }
    let header = u32::try_from(length).expect("below MAX_FRAME").to_le_bytes();
    bytes[..HEADER].copy_from_slice(&header);
    Ok(bytes)
}

fn invalid(error: postcard::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Bytes and descriptors that have come and are not yet a message.
#[derive(Debug, Default)]
struct Received {
    bytes: Vec<u8>,
    used: usize,
    batches: VecDeque<Vec<OwnedFd>>,
}

impl Received {
    fn read(&mut self, socket: &OwnedFd) -> io::Result<()> {
        self.bytes.drain(..self.used);
        self.used = 0;
        let filled = self.bytes.len();
        // A large frame is read in few calls, a small one leaves no large buffer behind.
        self.bytes.resize(filled + CHUNK.max(filled), 0);
        let chunk = socket::receive(socket, &mut self.bytes[filled..]);
        self.bytes.truncate(filled + chunk.as_ref().map_or(0, |chunk| chunk.bytes));
        self.bytes.shrink_to(CHUNK);
        let chunk = chunk?;
        if chunk.truncated || !chunk.fds.is_empty() {
            self.batches.push_back(chunk.fds);
        }
        if chunk.bytes == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    fn next<M: Message + DeserializeOwned>(&mut self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let unused = &self.bytes[self.used..];
        let Some((header, rest)) = unused.split_first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MAX_FRAME {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the frame is too large"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message: M = postcard::from_bytes(body).map_err(invalid)?;
        self.used += HEADER + length;
        let fds = if message.descriptors() > 0 { self.batches.pop_front().unwrap_or_default() } else { Vec::new() };
        Ok(Some((message, fds)))
    }
}
