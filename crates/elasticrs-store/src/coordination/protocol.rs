//! Messages between client and store, and their encoding. Pure. `docs/design/stores.md` describes the bytes.
//!
//! - **PROTO-1** a decoder accepts any bytes and returns a message or an error; it never panics;
//! - **PROTO-2** `decode(encode(m)) == m`: each message is declared once, with its fields in their order on the wire;
//! - **PROTO-3** the first field of both hellos is the version, and [`Answer::Refused`] never changes, so that any two
//!   versions can detect that they differ.

use std::sync::Arc;

use super::wire::{Cursor, Field, Malformed, Writer, kinds, record, texts};
use crate::session::client;
use crate::types::{
    Change, Compare, Entry, LostKind, MAX_KEY, MAX_RUN_ID, MAX_STEPS, Op, OpResult, Scope, StoreId, Txn, Watch,
};

/// Protocol version of this code, as major and minor number. Different major versions are incompatible.
pub const VERSION: (u16, u16) = (4, 0);

/// Challenge or proof in a handshake. Both have the length of a SHA-256 digest.
pub(crate) type Digest = [u8; 32];

/// Secret that a client sends, together with its session's ID, to resume the session.
pub type Secret = [u8; 32];

/// The first message of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    pub version: (u16, u16),
    pub run_id: String,
    pub interval_ms: u32,
    /// Number of intervals without a keep-alive after which the session ends.
    pub attempts: u16,
    /// Challenge to the store. The store answers it to prove that it knows the token.
    pub challenge: Digest,
    /// Session to resume. `None` to open a new session.
    pub resume: Option<(u64, Secret)>,
    /// Store to which this client was connected before. `None` if there was none. Another store refuses the client,
    /// unless that store has restored the earlier store's state.
    pub confirmed: Option<StoreId>,
}

/// Keep-alive settings of a session, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    pub interval_ms: u32,
    /// Session timeout, which each keep-alive restarts.
    pub ttl_ms: u32,
}

/// A message from a client to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// First message that a client sends on each connection.
    Hello(Hello),
    /// Answer to the store's challenge. It proves that the client knows the token for the key prefix `scope`, or the
    /// store's own token if `scope` is `None`.
    Prove { proof: Digest, scope: Scope },
    /// A transaction. The store executes all of its operations atomically.
    Txn { tag: u64, txn: Txn },
    /// Starts a watch: the store reports changes from now on.
    Watch { tag: u64, watch: Watch, snapshot: bool },
    /// Stops a watch. The store no longer reports changes to the watched keys.
    Unwatch(Watch),
    /// Extends the lease of the session.
    KeepAlive {
        /// Time at which the client sent this message, on the client's clock. The answer contains the same value.
        sent: u64,
    },
}

/// A message from the store to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// First answer to a client, unless the client is refused.
    Welcome {
        version: (u16, u16),
        run_id: String,
        /// Challenge to the client. The client answers it to prove that it knows the token. `None` if the store does
        /// not require a token.
        challenge: Option<Digest>,
    },
    Ready {
        session: u64,
        revision: u64,
        pace: Pace,
        /// Proof that answers the client's challenge. `None` if the store has no token.
        proof: Option<Digest>,
        /// Secret with which the client can resume the session after the connection breaks.
        secret: Secret,
        /// ID of this store, followed by the IDs of the stores whose state it restored, newest first.
        ids: Vec<StoreId>,
    },
    /// The store is about to close the connection for this reason.
    Refused { kind: LostKind, message: Box<str> },
    /// Reply to a transaction or a watch.
    Reply {
        tag: u64,
        /// True if the conditions of the transaction held. Always true for a watch.
        ok: bool,
        /// Revision of the store after it has executed the request.
        revision: u64,
        /// Results of the request:
        ///
        /// - for a transaction, one result for each operation;
        /// - for a watch, the current entries, if the client requested them.
        results: Vec<OpResult>,
    },
    /// Changes to keys that this client watches, made at one revision of the store.
    Changes { revision: u64, changes: Vec<Change> },
    Alive {
        sent: u64,
        /// Time on the store's wall clock, in nanoseconds since 1970.
        wall_ns: u64,
        pace: Pace,
    },
}

/// Kind byte of [`Request::Hello`]. It is the same in all versions.
const HELLO: u8 = 0x01;
/// The byte at the start of a [`Request::Txn`], which says of which kind the request is.
const TXN: u8 = 0x03;
/// Kind byte of [`Answer::Changes`].
const CHANGES: u8 = 0x85;

impl Request {
    /// Encodes the request as a frame.
    pub fn encode(&self) -> Vec<u8> {
        Writer::frame(|w| self.write(w))
    }

    /// Decodes a frame without its length.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        Cursor::whole(frame)
    }

    /// Reads the protocol version from a hello. It is at the same position in all protocol versions.
    pub(crate) fn version_of(frame: &[u8]) -> Result<(u16, u16), Malformed> {
        let mut c = Cursor::new(frame);
        match c.u8()? {
            HELLO => Field::read(&mut c),
            _ => Err(Malformed("the first message is no hello")),
        }
    }
}

impl Answer {
    /// Encodes the answer as a frame.
    pub fn encode(&self) -> Vec<u8> {
        Writer::frame(|w| self.write(w))
    }

    /// Decodes a frame without its length.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        Cursor::whole(frame)
    }
}

/// Encodes a request of the client's user. If the session can be resumed on another connection (`resume`), a request
/// for a watch always asks for a snapshot of the watched entries. After a reconnect, the client finds the changes that
/// it has missed by comparing this snapshot with a new one.
pub(super) fn encode_request(request: &client::Request, resume: bool) -> Vec<u8> {
    match request {
        // Encode the borrowed transaction, so that it does not have to be copied.
        client::Request::Txn { tag, txn } => Writer::frame(|w| {
            w.u8(TXN);
            tag.write(w);
            txn.write(w);
        }),
        client::Request::Watch { tag, watch, snapshot } => {
            Request::Watch { tag: *tag, watch: watch.clone(), snapshot: *snapshot || resume }.encode()
        }
        client::Request::Unwatch(watch) => Request::Unwatch(watch.clone()).encode(),
    }
}

/// Encodes an [`Answer::Changes`] from borrowed changes, so that the caller does not have to copy them into a list.
pub(crate) fn encode_changes<'a>(revision: u64, changes: impl ExactSizeIterator<Item = &'a Change>) -> Vec<u8> {
    Writer::frame(|w| {
        w.u8(CHANGES);
        revision.write(w);
        w.list(changes);
    })
}

kinds! { Request, "an unknown kind of request";
    HELLO => Hello(hello),
    0x02 => Prove { proof, scope },
    TXN => Txn { tag, txn },
    0x04 => Watch { tag, watch, snapshot },
    0x05 => Unwatch(watch),
    0x06 => KeepAlive { sent },
}

kinds! { Answer, "an unknown kind of answer";
    0x81 => Welcome { version, run_id, challenge },
    0x82 => Ready { session, revision, pace, proof, secret, ids },
    0x83 => Refused { kind, message },
    0x84 => Reply { tag, ok, revision, results },
    CHANGES => Changes { revision, changes },
    0x86 => Alive { sent, wall_ns, pace },
}

kinds! { Compare (at most MAX_STEPS), "an unknown kind of compare";
    0 => Exists(key),
    1 => Missing(key),
    2 => Create(key, revision),
    3 => Mod(key, revision),
    4 => Value(key, value),
}

kinds! { Op (at most MAX_STEPS), "an unknown kind of op";
    0 => Put { key, leased, value },
    1 => Delete(key),
    2 => DeletePrefix(prefix),
    3 => Get(key),
    4 => Range { prefix, limit },
    5 => Predecessor { prefix, key },
}

kinds! { OpResult, "an unknown kind of result";
    0 => Count(count),
    1 => Entry(entry),
    2 => Entries(entries),
}

record!(Hello { version, run_id, interval_ms, attempts, challenge, resume, confirmed });
record!(Pace { interval_ms, ttl_ms });
record!(Txn { compares, then, otherwise });
record!(Watch { exact, prefix });
record!(Entry { key, create_revision, mod_revision, value });
record!(Change { key, create_revision, mod_revision, value });

// The type of a text determines its length limit. Keys and prefixes are `Arc<str>`, run IDs are `String`, and messages
// to users are `Box<str>`.
texts!(Arc<str>: MAX_KEY, String: MAX_RUN_ID, Box<str>: u16::MAX as usize);

impl Field for LostKind {
    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
        c.u8().map(Self::of_code)
    }

    fn write(&self, w: &mut Writer) {
        w.u8(self.code());
    }
}

#[cfg(test)]
mod tests;
