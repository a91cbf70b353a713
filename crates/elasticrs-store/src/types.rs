//! Types for the contents of the store and for client requests.

use std::sync::Arc;

use elasticrs_sys::named_enum;

/// Maximum length of a key or prefix, in bytes of UTF-8.
pub const MAX_KEY: usize = 1024;
/// Maximum length of a run ID, in bytes of UTF-8.
pub const MAX_RUN_ID: usize = 512;

/// Maximum length of a request, in bytes.
pub const MAX_REQUEST: usize = 1 << 20;
/// Maximum length of an answer, in bytes. It is large because an answer can contain a snapshot of all keys with a
/// prefix.
pub const MAX_ANSWER: usize = 64 << 20;

/// Maximum number of conditions in a transaction, and of ops in each of its two branches.
pub const MAX_STEPS: usize = 4096;

/// Random ID of a store. A restarted store has a new ID.
pub type StoreId = [u8; 16];

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Arc<[u8]>,
    /// Revision that created the key. Overwriting the key does not change this revision.
    pub create_revision: u64,
    pub mod_revision: u64,
}

/// A change to a single key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub key: Arc<str>,
    /// New value of the key. `None` if the key was deleted.
    pub value: Option<Arc<[u8]>>,
    pub create_revision: u64,
    pub mod_revision: u64,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    Exists(Arc<str>),
    Missing(Arc<str>),
    /// Holds if this revision created the key. With revision 0, holds if the key does not exist.
    Create(Arc<str>, u64),
    /// Holds if this revision was the last to change the key. With revision 0, holds if the key does not exist.
    Mod(Arc<str>, u64),
    Value(Arc<str>, Vec<u8>),
}

/// A step of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Creates or overwrites a key. If `leased`, the key is deleted when the session of this client ends.
    Put { key: Arc<str>, value: Arc<[u8]>, leased: bool },
    /// Deletes a key.
    Delete(Arc<str>),
    /// Deletes all keys with this prefix.
    DeletePrefix(Arc<str>),
    /// Reads a key.
    Get(Arc<str>),
    /// Reads the keys with this prefix, sorted by name.
    Range {
        prefix: Arc<str>,
        /// Maximum number of keys. 0 means no limit.
        limit: u32,
    },
    /// Reads the newest key with this prefix that was created at an earlier revision than `key`. If several such keys
    /// were created at the same revision, reads the last one by name. The result is empty if `key` does not exist.
    Predecessor { prefix: Arc<str>, key: Arc<str> },
}

/// Result of an [`Op`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpResult {
    /// Number of keys that the operation changed.
    Count(u64),
    /// Result of [`Op::Get`] and [`Op::Predecessor`].
    Entry(Option<Entry>),
    /// Result of [`Op::Range`].
    Entries(Vec<Entry>),
}

/// A transaction. The store executes `then` if all conditions hold, and `otherwise` if they do not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    pub compares: Vec<Compare>,
    pub then: Vec<Op>,
    pub otherwise: Vec<Op>,
}

/// Prefix of the keys that a session may use. `None` if it may use all keys.
pub(crate) type Scope = Option<Arc<str>>;

/// The keys that a client watches: a single key, or all keys with a prefix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watch {
    /// A key, or a key prefix.
    pub prefix: Arc<str>,
    /// True to watch only the key `prefix`, not all keys that start with it.
    pub exact: bool,
}

impl Watch {
    /// Returns true if the watch covers this key.
    pub fn covers(&self, key: &str) -> bool {
        if self.exact { key == &*self.prefix } else { key.starts_with(&*self.prefix) }
    }
}

named_enum! {
    /// Machine-readable reason for the end of a connection. The position of a variant is its code in the protocol.
    pub enum LostKind {
        /// Nothing listens on the port.
        Refused = "refused",
        /// There is no route to the host.
        Unreachable = "unreachable",
        /// The other side did not answer in time.
        Timeout = "timeout",
        /// The host name has no address.
        Resolve = "resolve",
        /// The two sides use different versions of the protocol.
        Version = "version",
        /// One side has no token, or the two tokens differ.
        Token = "token",
        /// Another program uses the port.
        NotOurs = "not_ours",
        /// The endpoint serves another run.
        Run = "run",
        /// The other side closed the connection.
        Closed = "closed",
        /// Keep-alives went unanswered.
        Silent = "silent",
        /// This client read its messages too slowly.
        Slow = "slow",
        /// A message violated the protocol.
        Protocol = "protocol",
        /// A limit of the store was reached.
        Limit = "limit",
        /// The session that the client wanted to resume has ended.
        Gone = "gone",
        /// This is not the store to which the client was connected before.
        Other = "other",
        /// TLS failed, because a certificate was rejected or because one side does not use TLS. Only reported for etcd.
        Tls = "tls",
        /// The store denied access to this user, or access to the requested keys.
        Denied = "denied",
    }
}

impl LostKind {
    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    /// Returns the kind with this code. Returns [`Self::Protocol`] for an unknown code, because the store must then be
    /// using a newer protocol.
    pub(crate) fn of_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Protocol)
    }
}
