//! What the store holds, and what is asked of it.

use std::sync::Arc;

/// The longest key or prefix, in bytes of UTF-8.
pub const MAX_KEY: usize = 1024;
/// The longest run id, in bytes of UTF-8.
pub const MAX_RUN_ID: usize = 512;

/// The most conditions, and the most ops, of a transaction.
pub const MAX_STEPS: usize = 4096;

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub key: Arc<str>,
    /// Its bytes.
    pub value: Arc<[u8]>,
    /// The revision that made the key; overwriting keeps it.
    pub create_revision: u64,
    /// The revision of the last change.
    pub mod_revision: u64,
}

/// What a revision did to one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Its name.
    pub key: Arc<str>,
    /// Its new bytes; `None`: it was deleted.
    pub value: Option<Arc<[u8]>>,
    /// The revision that made the key.
    pub create_revision: u64,
    /// The revision of this change.
    pub mod_revision: u64,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compare {
    /// The key is there.
    Exists(Arc<str>),
    /// The key is not there.
    Missing(Arc<str>),
    /// It was made by this revision; 0: it is not there.
    Create(Arc<str>, u64),
    /// It was last changed by this revision; 0: it is not there.
    Mod(Arc<str>, u64),
    /// It has this value.
    Value(Arc<str>, Vec<u8>),
}

/// A step of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Makes or overwrites a key; a leased one ends with the session that leased it last.
    Put {
        /// Its name.
        key: Arc<str>,
        /// Its bytes.
        value: Arc<[u8]>,
        /// Whether the key ends with the session.
        leased: bool,
    },
    /// Deletes a key.
    Delete(Arc<str>),
    /// Deletes every key that begins so.
    DeletePrefix(Arc<str>),
    /// Reads a key.
    Get(Arc<str>),
    /// Reads the first keys that begin so, in order.
    Range {
        /// How they begin.
        prefix: Arc<str>,
        /// At most so many; 0: all.
        limit: u32,
    },
    /// Reads, of the keys that begin so, the one with the highest create revision below that of `key`; of several, the
    /// last by name. Nothing when `key` is not there.
    Predecessor {
        /// How they begin.
        prefix: Arc<str>,
        /// Before which one.
        key: Arc<str>,
    },
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

/// Conditions, and what to do when all or not all of them hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    /// The conditions.
    pub compares: Vec<Compare>,
    /// When all hold.
    pub then: Vec<Op>,
    /// When one does not.
    pub otherwise: Vec<Op>,
}

/// What a client wants to hear of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watch {
    /// A key, or how keys begin.
    pub prefix: Arc<str>,
    /// Only the key that is called exactly so.
    pub exact: bool,
}

impl Watch {
    /// Whether the watch covers this key.
    pub fn covers(&self, key: &str) -> bool {
        if self.exact { key == &*self.prefix } else { key.starts_with(&*self.prefix) }
    }
}

/// Why a connection ends, in words that a program can tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LostKind {
    /// Nobody listens.
    Refused,
    /// No way to the host.
    Unreachable,
    /// No answer in time.
    Timeout,
    /// The host's name has no address.
    Resolve,
    /// The two sides speak different versions.
    Version,
    /// One side has no token, or another one.
    Token,
    /// Another program uses the port.
    NotOurs,
    /// The endpoint serves another run.
    Run,
    /// The other side closed the connection.
    Closed,
    /// Keep-alives went unanswered.
    Silent,
    /// This client read too slowly.
    Slow,
    /// A message that is against the rules.
    Protocol,
    /// A limit of the store was reached.
    Limit,
}

impl LostKind {
    /// All of them; the position is the code on the wire.
    pub const ALL: [Self; 13] = [
        Self::Refused,
        Self::Unreachable,
        Self::Timeout,
        Self::Resolve,
        Self::Version,
        Self::Token,
        Self::NotOurs,
        Self::Run,
        Self::Closed,
        Self::Silent,
        Self::Slow,
        Self::Protocol,
        Self::Limit,
    ];

    /// The name that Python sees.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::Timeout => "timeout",
            Self::Resolve => "resolve",
            Self::Version => "version",
            Self::Token => "token",
            Self::NotOurs => "not_ours",
            Self::Run => "run",
            Self::Closed => "closed",
            Self::Silent => "silent",
            Self::Slow => "slow",
            Self::Protocol => "protocol",
            Self::Limit => "limit",
        }
    }

    /// The code on the wire.
    pub fn code(self) -> u8 {
        // The order of `ALL` is that of the declaration.
        self as u8
    }

    /// The kind of a code; one that a newer store made up is a breach of the protocol.
    pub fn of_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Protocol)
    }
}
