//! Queue of the unsent messages to a client, and accounting for the memory that a server holds for clients in addition
//! to the keys.
//!
//! - **MEM-1** Each charge (a number of bytes that its owner added to the total) is released exactly once, when
//!   its owner is dropped. Memory that several clients share is counted once.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Deref;
use std::rc::Rc;

use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::protocol::Answer;
use super::wire::MAGIC;
use crate::types::LostKind;

/// Bytes of memory that a connection uses without its messages: for its task, its socket, and its entries in the tables
/// of the server.
pub(super) const CONNECTION_COST: usize = 2048;
/// Bytes of memory that a message uses in addition to its contents.
const MESSAGE_COST: usize = 96;

/// Counts the bytes of memory that a server uses for all its connections and their messages.
pub(super) type BytesInUse = Cell<usize>;

/// Number of bytes that one owner has added to a [`BytesInUse`] counter. Dropping this value subtracts the bytes.
#[derive(Debug)]
pub(super) struct Charge {
    all: Rc<BytesInUse>,
    bytes: Cell<usize>,
}

impl Charge {
    pub(super) fn new(all: &Rc<BytesInUse>, bytes: usize) -> Self {
        let charge = Self { all: Rc::clone(all), bytes: Cell::new(0) };
        charge.set(bytes);
        charge
    }

    pub(super) fn set(&self, bytes: usize) {
        let others = self.all.get() - self.bytes.replace(bytes);
        self.all.set(others + bytes);
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.get()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// A message for one or more clients.
#[derive(Debug)]
pub(super) struct Message {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl Message {
    pub(super) fn new(all: &Rc<BytesInUse>, bytes: Vec<u8>) -> Rc<Self> {
        let charge = Charge::new(all, MESSAGE_COST + bytes.capacity());
        Rc::new(Self { bytes, _charge: charge })
    }

    /// Creates a message that tells the client why the store closes the connection.
    ///
    /// The message does not count toward the memory limit, because a connection may be closed to free memory.
    pub(super) fn last(all: &Rc<BytesInUse>, bytes: Vec<u8>) -> Rc<Self> {
        Rc::new(Self { bytes, _charge: Charge::new(all, 0) })
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Limit on the number of bytes that a client has not read yet. The store drops a client above the limit instead of
/// queueing another message.
///
/// The queue may contain one message that is longer than the limit. The bytes of this message are not counted.
const MAX_UNREAD: usize = 8 << 20;

/// Maximum number of messages to send in one system call.
const BATCH: usize = 64;

/// The queued messages of one client, in order. Several clients may share a message.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) peer: SocketAddr,
    /// Queued messages in sending order, each with its sequence number.
    queue: RefCell<VecDeque<(u64, Rc<Message>)>>,
    /// Number to assign to the next message.
    next: Cell<u64>,
    /// Number of bytes of the first message that were already sent.
    sent: Cell<usize>,
    unread: Cell<usize>,
    /// Number of unread bytes of the queued message that is longer than [`MAX_UNREAD`]. At most one such message is
    /// queued.
    unread_of_long: Cell<usize>,
    /// True if at least one byte was sent on this connection.
    has_begun: Cell<bool>,
    is_closing: Cell<bool>,
    /// True while requests that were read from the client are waiting to be executed.
    pub(super) waits: Cell<bool>,
    pub(super) wake: Notify,
    all: Rc<BytesInUse>,
    /// Memory that is counted for the connection, including the received part of an incomplete request.
    connection: Charge,
}

impl Outbox {
    pub(super) fn new(all: &Rc<BytesInUse>, peer: SocketAddr) -> Self {
        Self {
            peer,
            queue: RefCell::default(),
            next: Cell::default(),
            sent: Cell::default(),
            unread: Cell::default(),
            unread_of_long: Cell::default(),
            has_begun: Cell::default(),
            is_closing: Cell::default(),
            waits: Cell::default(),
            wake: Notify::new(),
            all: Rc::clone(all),
            connection: Charge::new(all, CONNECTION_COST),
        }
    }

    /// Creates a message that can be queued for one or more clients.
    pub(super) fn message(&self, bytes: Vec<u8>) -> Rc<Message> {
        Message::new(&self.all, bytes)
    }

    /// Queues a message. If the client has too many unread bytes, returns false and does not queue the message.
    pub(super) fn push(&self, message: Rc<Message>) -> bool {
        if self.is_closing.get() {
            return true;
        }
        let (of_long, is_long) = (self.unread_of_long.get(), message.len() > MAX_UNREAD);
        if self.unread.get() - of_long > MAX_UNREAD || is_long && of_long > 0 {
            return false;
        }
        if is_long {
            self.unread_of_long.set(message.len());
        }
        self.unread.set(self.unread.get() + message.len());
        self.append(message);
        true
    }

    fn append(&self, message: Rc<Message>) {
        let number = self.next.get();
        self.next.set(number + 1);
        self.queue.borrow_mut().push_back((number, message));
        self.wake.notify_one();
    }

    /// Returns the number of messages queued so far. Pass it to [`Self::flush`] to send only these messages.
    pub(super) fn pushed(&self) -> u64 {
        self.next.get()
    }

    /// Sets the number of received bytes that belong to an incomplete request.
    pub(super) fn set_unparsed(&self, bytes: usize) {
        self.connection.set(CONNECTION_COST + bytes);
    }

    /// Returns the approximate number of bytes that the store holds for this client. Messages shared with other
    /// clients are counted in full.
    pub(super) fn holds(&self) -> usize {
        self.connection.bytes() + self.unread.get()
    }

    /// Replaces the unsent messages with the reason why the store closes the connection. Later messages are dropped.
    pub(super) fn refuse(&self, kind: LostKind, message: String) {
        if self.is_closing.replace(true) {
            return;
        }
        // Keep a partly sent message, because the client would otherwise mistake the next message for the rest of this
        // one.
        self.queue.borrow_mut().truncate(usize::from(self.sent.get() > 0));
        let mut last = if self.has_begun.get() { Vec::new() } else { MAGIC.to_vec() };
        last.extend(Answer::Refused { kind, message: message.into() }.encode());
        self.append(Message::last(&self.all, last));
    }

    /// Same as [`Self::refuse`], but frees the memory immediately. If a message was partly sent, the client does not
    /// receive the reason.
    pub(super) fn abandon(&self, kind: LostKind, message: String) {
        // Stop counting the memory of this connection, because it is about to be closed. Otherwise the server could end
        // other sessions to free this memory.
        self.connection.set(0);
        if self.sent.get() == 0 {
            return self.refuse(kind, message);
        }
        self.discard();
    }

    /// Drops all messages and closes the connection without a reason, because the session has moved to another
    /// connection.
    pub(super) fn discard(&self) {
        self.sent.set(0);
        self.queue.take();
        self.is_closing.set(true);
        self.wake.notify_one();
    }

    /// True if the connection is about to be closed.
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.get()
    }

    /// Writes the messages with numbers below `pushed` until the kernel accepts no more bytes. Returns true if all of
    /// these messages have been sent.
    pub(super) fn flush(&self, stream: &TcpStream, pushed: u64) -> io::Result<bool> {
        let mut queue = self.queue.borrow_mut();
        while queue.front().is_some_and(|(number, _)| *number < pushed) {
            let skip = self.sent.get();
            let mut slices = [IoSlice::new(&[]); BATCH];
            let mut count = 0;
            let due = queue.iter().take_while(|(number, _)| *number < pushed);
            for (slice, (_, message)) in slices.iter_mut().zip(due) {
                *slice = IoSlice::new(if count == 0 { &message[skip..] } else { message });
                count += 1;
            }
            match stream.try_write_vectored(&slices[..count]) {
                Ok(written) => {
                    self.has_begun.set(true);
                    self.unread.set(self.unread.get().saturating_sub(written));
                    let mut left = skip + written;
                    while let Some((_, first)) = queue.front() {
                        if first.len() > MAX_UNREAD {
                            self.unread_of_long.set(first.len().saturating_sub(left));
                        }
                        if first.len() > left {
                            break;
                        }
                        left -= first.len();
                        queue.pop_front();
                    }
                    self.sent.set(left);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // Free the memory of a queue that has grown large.
        if queue.capacity() > 2 * BATCH {
            queue.shrink_to(BATCH);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_long_message_does_not_count_toward_the_outbox_limit() {
        let all = Rc::new(BytesInUse::default());
        let outbox = Outbox::new(&all, ([127, 0, 0, 1], 1).into());
        let push = |length| outbox.push(Message::new(&all, vec![0; length]));
        assert!(push(1) && push(50 << 20) && push(1));
        assert!(!push(MAX_UNREAD + 1));
        assert!(push(MAX_UNREAD) && !push(1));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_partly_sent_long_message_leaves_no_extra_room_for_other_messages() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let all = Rc::new(BytesInUse::default());
        let outbox = Outbox::new(&all, peer);
        let push = |length| outbox.push(Message::new(&all, vec![0; length]));
        assert!(push(50 << 20) && push(MAX_UNREAD));
        // The socket buffer has room for only part of the messages.
        assert!(!outbox.flush(&stream, u64::MAX).unwrap());
        assert!(push(1) && !push(1));
        drop(client);
    }

    #[test]
    fn shared_messages_are_counted_once_and_all_memory_is_released() {
        let all = Rc::new(BytesInUse::default());
        let message = Message::new(&all, vec![0; 100]);
        let other = Rc::clone(&message);
        assert_eq!(all.get(), MESSAGE_COST + 100);
        drop(message);
        assert_eq!(all.get(), MESSAGE_COST + 100);
        let buffer = Charge::new(&all, 10);
        buffer.set(30);
        assert_eq!((buffer.bytes(), all.get()), (30, MESSAGE_COST + 130));
        drop((other, buffer));
        assert_eq!(all.get(), 0);
    }
}
