//! What the store holds, and what is asked of it.

use std::sync::Arc;

use elasticrs_runtime::named_enum;

/// The longest key or prefix, in bytes of UTF-8.
pub const MAX_KEY: usize = 1024;
/// The longest run id, in bytes of UTF-8.
pub const MAX_RUN_ID: usize = 512;

/// The most conditions, and the most ops, of a transaction.
pub const MAX_STEPS: usize = 4096;

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Arc<[u8]>,
    /// The revision that made the key; overwriting keeps it.
    pub create_revision: u64,
    pub mod_revision: u64,
}

/// What a revision did to one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub key: Arc<str>,
    /// Its new bytes; `None`: it was deleted.
    pub value: Option<Arc<[u8]>>,
    pub create_revision: u64,
    pub mod_revision: u64,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    Exists(Arc<str>),
    Missing(Arc<str>),
    /// It was made by this revision; 0: it is not there.
    Create(Arc<str>, u64),
    /// It was last changed by this revision; 0: it is not there.
    Mod(Arc<str>, u64),
    Value(Arc<str>, Vec<u8>),
}

/// A step of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Makes or overwrites a key; a leased one ends with the session that leased it last.
    Put { key: Arc<str>, value: Arc<[u8]>, leased: bool },
    /// Deletes a key.
    Delete(Arc<str>),
    /// Deletes the keys that begin so.
    DeletePrefix(Arc<str>),
    /// Reads a key.
    Get(Arc<str>),
    /// Reads the first keys that begin so, in order.
    Range {
        prefix: Arc<str>,
        /// At most so many; 0: all.
        limit: u32,
    },
    /// Reads, of the keys that begin so, the one with the highest create revision below that of `key`; of several, the
    /// last by name. Nothing when `key` is not there.
    Predecessor { prefix: Arc<str>, key: Arc<str> },
}

/// What an [`Op`] gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpResult {
    /// Of a write: how many keys it changed.
    Count(u64),
    /// Of [`Op::Get`] and [`Op::Predecessor`].
    Entry(Option<Entry>),
    /// Of [`Op::Range`].
    Entries(Vec<Entry>),
}

/// A transaction: runs `then` if all conditions hold, and `otherwise` if not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    pub compares: Vec<Compare>,
    pub then: Vec<Op>,
    pub otherwise: Vec<Op>,
}

/// Prefix of the keys that a session may use. `None` if it may use all keys.
pub type Scope = Option<Arc<str>>;

/// The keys that a client watches: a single key, or all keys with a prefix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watch {
    /// A key, or a key prefix.
    pub prefix: Arc<str>,
    /// True to watch only the key that equals `prefix`.
    pub exact: bool,
}

impl Watch {
    /// Returns true if the watch covers this key.
    pub fn covers(&self, key: &str) -> bool {
        if self.exact { key == &*self.prefix } else { key.starts_with(&*self.prefix) }
    }
}

named_enum! {
    /// Machine-readable reason for the end of a connection. The position of a variant is its code on the wire.
    pub enum LostKind {
        /// Nothing listens on the port.
        Refused = "refused",
        /// There is no route to the host.
        Unreachable = "unreachable",
        /// No answer in time.
        Timeout = "timeout",
        /// The host's name has no address.
        Resolve = "resolve",
        /// The two sides speak different versions.
        Version = "version",
        /// One side has no token, or another one.
        Token = "token",
        /// Another program uses the port.
        NotOurs = "not_ours",
        /// The endpoint serves another run.
        Run = "run",
        /// The other side closed the connection.
        Closed = "closed",
        /// Keep-alives went unanswered.
        Silent = "silent",
        /// This client read too slowly.
        Slow = "slow",
        /// A message that is against the rules.
        Protocol = "protocol",
        /// A limit of the store was reached.
        Limit = "limit",
        /// The session that was to be taken up again has ended in the store.
        Gone = "gone",
        /// This store is not the one that the client has met before.
        Other = "other",
        /// TLS failed: a certificate was rejected, or one side does not speak TLS. Only reported for etcd.
        Tls = "tls",
        /// The store denied access to this user, or access to the requested keys.
        Denied = "denied",
    }
}

impl LostKind {
    pub(super) fn code(self) -> u8 {
        self as u8
    }

    /// The kind of a code; one that a newer store made up is a breach of the protocol.
    pub(super) fn of_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Protocol)
    }
}
