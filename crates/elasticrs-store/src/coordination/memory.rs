//! Accounting for the memory that a server holds for clients in addition to the keys.
//!
//! - **MEM-1** Each charge (a number of bytes that its owner added to the total) is released exactly once, when
//!   its owner is dropped. Memory that several clients share is counted once.

use std::cell::Cell;
use std::ops::Deref;
use std::rc::Rc;

/// Bytes of memory for a connection without its messages: its task, its socket, and its entries in the tables.
pub(super) const CONNECTION_COST: usize = 2048;
/// Bytes that a message takes in addition to its contents.
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

#[cfg(test)]
mod tests {
    use super::*;

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
