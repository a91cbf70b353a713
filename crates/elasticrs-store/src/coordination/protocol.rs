//! The messages, as bytes and back. Pure; the bytes are described in `docs/design/stores.md`.
//!
//! - **PROTO-1** a decoder takes any bytes and returns a message or an error: it never panics;
//! - **PROTO-2** `decode(encode(m)) == m`;
//! - **PROTO-3** the version comes first in both hellos, and [`Answer::Refused`] never changes, so that any two versions
//!   can tell each other apart.

use std::sync::Arc;

use super::types::{Change, Compare, Entry, LostKind, MAX_KEY, MAX_RUN_ID, MAX_STEPS, Op, OpResult, Txn, Watch};
use super::wire::{Cursor, Malformed, Writer};

/// What this code speaks. Another first number: no understanding.
pub const VERSION: (u16, u16) = (1, 0);

/// A challenge, a proof: as long as SHA-256.
pub type Digest = [u8; 32];

/// The first message of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    pub version: (u16, u16),
    pub run_id: String,
    pub interval_ms: u32,
    /// After so many intervals without one the session ends.
    pub attempts: u16,
    /// What the store is to prove its token with.
    pub challenge: Digest,
}

/// How often to tell that one lives, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    pub interval_ms: u32,
    /// From a keep-alive to the end of the session.
    pub ttl_ms: u32,
}

/// What a client says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Always first.
    Hello(Hello),
    /// The answer to the store's challenge.
    Prove(Digest),
    Txn {
        tag: u64,
        txn: Txn,
    },
    /// Tells of changes from now on.
    Watch {
        tag: u64,
        watch: Watch,
        /// The reply shall hold what is there.
        snapshot: bool,
        /// Begin with the changes of this revision.
        from_revision: Option<u64>,
    },
    Unwatch(Watch),
    KeepAlive {
        /// Comes back in the answer: the client's clock when it sent this.
        sent: u64,
    },
}

/// What the store says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Always first, but for a refusal.
    Welcome {
        version: (u16, u16),
        run_id: String,
        /// What the client is to prove its token with; `None`: no token is asked for.
        challenge: Option<Digest>,
    },
    Ready {
        session: u64,
        revision: u64,
        pace: Pace,
        /// The store's answer to the client's challenge, when it has a token.
        proof: Option<Digest>,
    },
    /// The connection ends, and why.
    Refused { kind: LostKind, message: String },
    /// To a transaction or a watch.
    Reply {
        tag: u64,
        /// The conditions held; the watch has begun.
        ok: bool,
        /// The revision at which it was judged.
        revision: u64,
        /// One for each op. Of a watch: what was there, one by one, if that was asked for; of one that was refused, the
        /// oldest revision that is remembered.
        results: Vec<OpResult>,
    },
    /// What one revision did to the keys that this client watches.
    Changes { revision: u64, changes: Vec<Change> },
    Alive {
        sent: u64,
        /// The store's wall clock, nanoseconds since 1970.
        wall_ns: u64,
        pace: Pace,
    },
}

const HELLO: u8 = 0x01;
const PROVE: u8 = 0x02;
const TXN: u8 = 0x03;
const WATCH: u8 = 0x04;
const UNWATCH: u8 = 0x05;
const KEEP_ALIVE: u8 = 0x06;
const WELCOME: u8 = 0x81;
const READY: u8 = 0x82;
const REFUSED: u8 = 0x83;
const REPLY: u8 = 0x84;
const CHANGES: u8 = 0x85;
const ALIVE: u8 = 0x86;

const EXACT: u8 = 1;
const SNAPSHOT: u8 = 2;
const FROM: u8 = 4;

impl Request {
    /// The whole frame.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(hello) => {
                let mut w = Writer::new(HELLO);
                w.u16(hello.version.0);
                w.u16(hello.version.1);
                w.text(&hello.run_id);
                w.u32(hello.interval_ms);
                w.u16(hello.attempts);
                w.raw(&hello.challenge);
                w.finish()
            }
            Self::Prove(proof) => {
                let mut w = Writer::new(PROVE);
                w.raw(proof);
                w.finish()
            }
            Self::Txn { tag, txn } => {
                let mut w = Writer::new(TXN);
                w.u64(*tag);
                w.list(&txn.compares, write_compare);
                w.list(&txn.then, write_op);
                w.list(&txn.otherwise, write_op);
                w.finish()
            }
            Self::Watch { tag, watch, snapshot, from_revision } => {
                let mut w = Writer::new(WATCH);
                w.u64(*tag);
                let from = if from_revision.is_some() { FROM } else { 0 };
                w.u8(u8::from(watch.exact) | if *snapshot { SNAPSHOT } else { 0 } | from);
                w.text(&watch.prefix);
                w.u64(from_revision.unwrap_or(0));
                w.finish()
            }
            Self::Unwatch(watch) => {
                let mut w = Writer::new(UNWATCH);
                w.u8(u8::from(watch.exact));
                w.text(&watch.prefix);
                w.finish()
            }
            Self::KeepAlive { sent } => {
                let mut w = Writer::new(KEEP_ALIVE);
                w.u64(*sent);
                w.finish()
            }
        }
    }

    /// Reads a frame.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut c = Cursor::new(frame);
        let request = match c.u8()? {
            HELLO => Self::Hello(Hello {
                version: (c.u16()?, c.u16()?),
                run_id: c.text(MAX_RUN_ID)?.to_owned(),
                interval_ms: c.u32()?,
                attempts: c.u16()?,
                challenge: c.array()?,
            }),
            PROVE => Self::Prove(c.array()?),
            TXN => Self::Txn {
                tag: c.u64()?,
                txn: Txn {
                    compares: c.list(3, MAX_STEPS, read_compare)?,
                    then: c.list(3, MAX_STEPS, read_op)?,
                    otherwise: c.list(3, MAX_STEPS, read_op)?,
                },
            },
            WATCH => {
                let tag = c.u64()?;
                let flags = c.u8()?;
                if flags & !(EXACT | SNAPSHOT | FROM) != 0 {
                    return Err(Malformed("an unknown kind of watch"));
                }
                let prefix = read_key(&mut c)?;
                let from = c.u64()?;
                if flags & FROM == 0 && from != 0 {
                    return Err(Malformed("a revision that is not asked for"));
                }
                Self::Watch {
                    tag,
                    watch: Watch { prefix, exact: flags & EXACT != 0 },
                    snapshot: flags & SNAPSHOT != 0,
                    from_revision: (flags & FROM != 0).then_some(from),
                }
            }
            UNWATCH => {
                let exact = c.flag()?;
                Self::Unwatch(Watch { prefix: read_key(&mut c)?, exact })
            }
            KEEP_ALIVE => Self::KeepAlive { sent: c.u64()? },
            _ => return Err(Malformed("an unknown kind of request")),
        };
        c.end()?;
        Ok(request)
    }

    /// The version of a hello, however the rest of it has changed since.
    pub fn version_of(frame: &[u8]) -> Result<(u16, u16), Malformed> {
        let mut c = Cursor::new(frame);
        match c.u8()? {
            HELLO => Ok((c.u16()?, c.u16()?)),
            _ => Err(Malformed("the first message is no hello")),
        }
    }
}

impl Answer {
    /// The whole frame.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Welcome { version, run_id, challenge } => {
                let mut w = Writer::new(WELCOME);
                w.u16(version.0);
                w.u16(version.1);
                w.text(run_id);
                write_digest(&mut w, challenge.as_ref());
                w.finish()
            }
            Self::Ready { session, revision, pace, proof } => {
                let mut w = Writer::new(READY);
                w.u64(*session);
                w.u64(*revision);
                write_pace(&mut w, *pace);
                write_digest(&mut w, proof.as_ref());
                w.finish()
            }
            Self::Refused { kind, message } => {
                let mut w = Writer::new(REFUSED);
                w.u8(kind.code());
                w.text(message);
                w.finish()
            }
            Self::Reply { tag, ok, revision, results } => {
                let mut w = Writer::new(REPLY);
                w.u64(*tag);
                w.flag(*ok);
                w.u64(*revision);
                w.list(results, write_result);
                w.finish()
            }
            Self::Changes { revision, changes } => encode_changes(*revision, changes.iter()),
            Self::Alive { sent, wall_ns, pace } => {
                let mut w = Writer::new(ALIVE);
                w.u64(*sent);
                w.u64(*wall_ns);
                write_pace(&mut w, *pace);
                w.finish()
            }
        }
    }

    /// Reads a frame.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut c = Cursor::new(frame);
        let answer = match c.u8()? {
            WELCOME => {
                let version = (c.u16()?, c.u16()?);
                let run_id = c.text(MAX_RUN_ID)?.to_owned();
                Self::Welcome { version, run_id, challenge: read_digest(&mut c)? }
            }
            READY => {
                let (session, revision) = (c.u64()?, c.u64()?);
                Self::Ready { session, revision, pace: read_pace(&mut c)?, proof: read_digest(&mut c)? }
            }
            REFUSED => {
                Self::Refused { kind: LostKind::of_code(c.u8()?), message: c.text(usize::from(u16::MAX))?.to_owned() }
            }
            REPLY => Self::Reply {
                tag: c.u64()?,
                ok: c.flag()?,
                revision: c.u64()?,
                results: c.list(2, usize::MAX, read_result)?,
            },
            CHANGES => Self::Changes { revision: c.u64()?, changes: c.list(19, usize::MAX, read_change)? },
            ALIVE => {
                let (sent, wall_ns) = (c.u64()?, c.u64()?);
                Self::Alive { sent, wall_ns, pace: read_pace(&mut c)? }
            }
            _ => return Err(Malformed("an unknown kind of answer")),
        };
        c.end()?;
        Ok(answer)
    }
}

/// As [`Answer::Changes`], without a list of its own.
pub fn encode_changes<'a>(revision: u64, changes: impl ExactSizeIterator<Item = &'a Change>) -> Vec<u8> {
    let mut w = Writer::new(CHANGES);
    w.u64(revision);
    w.count(changes.len());
    for change in changes {
        w.text(&change.key);
        w.u64(change.create_revision);
        w.u64(change.mod_revision);
        w.flag(change.value.is_some());
        if let Some(value) = &change.value {
            w.blob(value);
        }
    }
    w.finish()
}

fn read_change(c: &mut Cursor<'_>) -> Result<Change, Malformed> {
    let key = read_key(c)?;
    let (create_revision, mod_revision) = (c.u64()?, c.u64()?);
    let value = if c.flag()? { Some(c.blob()?.into()) } else { None };
    Ok(Change { key, value, create_revision, mod_revision })
}

fn read_key(c: &mut Cursor<'_>) -> Result<Arc<str>, Malformed> {
    c.text(MAX_KEY).map(Arc::from)
}

fn write_pace(w: &mut Writer, pace: Pace) {
    w.u32(pace.interval_ms);
    w.u32(pace.ttl_ms);
}

fn read_pace(c: &mut Cursor<'_>) -> Result<Pace, Malformed> {
    Ok(Pace { interval_ms: c.u32()?, ttl_ms: c.u32()? })
}

fn write_digest(w: &mut Writer, digest: Option<&Digest>) {
    w.flag(digest.is_some());
    if let Some(digest) = digest {
        w.raw(digest);
    }
}

fn read_digest(c: &mut Cursor<'_>) -> Result<Option<Digest>, Malformed> {
    Ok(if c.flag()? { Some(c.array()?) } else { None })
}

fn write_compare(w: &mut Writer, compare: &Compare) {
    let (kind, key) = match compare {
        Compare::Exists(key) => (0, key),
        Compare::Missing(key) => (1, key),
        Compare::Create(key, _) => (2, key),
        Compare::Mod(key, _) => (3, key),
        Compare::Value(key, _) => (4, key),
    };
    w.u8(kind);
    w.text(key);
    match compare {
        Compare::Exists(_) | Compare::Missing(_) => {}
        Compare::Create(_, revision) | Compare::Mod(_, revision) => w.u64(*revision),
        Compare::Value(_, value) => w.blob(value),
    }
}

fn read_compare(c: &mut Cursor<'_>) -> Result<Compare, Malformed> {
    let kind = c.u8()?;
    let key = read_key(c)?;
    Ok(match kind {
        0 => Compare::Exists(key),
        1 => Compare::Missing(key),
        2 => Compare::Create(key, c.u64()?),
        3 => Compare::Mod(key, c.u64()?),
        4 => Compare::Value(key, c.blob()?.to_vec()),
        _ => return Err(Malformed("an unknown kind of compare")),
    })
}

fn write_op(w: &mut Writer, op: &Op) {
    match op {
        Op::Put { key, value, leased } => {
            w.u8(0);
            w.text(key);
            w.flag(*leased);
            w.blob(value);
        }
        Op::Delete(key) => {
            w.u8(1);
            w.text(key);
        }
        Op::DeletePrefix(prefix) => {
            w.u8(2);
            w.text(prefix);
        }
        Op::Get(key) => {
            w.u8(3);
            w.text(key);
        }
        Op::Range { prefix, limit } => {
            w.u8(4);
            w.text(prefix);
            w.u32(*limit);
        }
        Op::Predecessor { prefix, key } => {
            w.u8(5);
            w.text(prefix);
            w.text(key);
        }
    }
}

fn read_op(c: &mut Cursor<'_>) -> Result<Op, Malformed> {
    let kind = c.u8()?;
    let key = read_key(c)?;
    Ok(match kind {
        0 => {
            let leased = c.flag()?;
            Op::Put { key, value: c.blob()?.into(), leased }
        }
        1 => Op::Delete(key),
        2 => Op::DeletePrefix(key),
        3 => Op::Get(key),
        4 => Op::Range { prefix: key, limit: c.u32()? },
        5 => Op::Predecessor { prefix: key, key: read_key(c)? },
        _ => return Err(Malformed("an unknown kind of op")),
    })
}

fn write_entry(w: &mut Writer, entry: &Entry) {
    w.text(&entry.key);
    w.u64(entry.create_revision);
    w.u64(entry.mod_revision);
    w.blob(&entry.value);
}

fn read_entry(c: &mut Cursor<'_>) -> Result<Entry, Malformed> {
    let key = read_key(c)?;
    let (create_revision, mod_revision) = (c.u64()?, c.u64()?);
    Ok(Entry { key, value: c.blob()?.into(), create_revision, mod_revision })
}

fn write_result(w: &mut Writer, result: &OpResult) {
    match result {
        OpResult::Count(count) => {
            w.u8(0);
            w.u64(*count);
        }
        OpResult::Entry(entry) => {
            w.u8(1);
            w.flag(entry.is_some());
            if let Some(entry) = entry {
                write_entry(w, entry);
            }
        }
        OpResult::Entries(entries) => {
            w.u8(2);
            w.list(entries, write_entry);
        }
    }
}

fn read_result(c: &mut Cursor<'_>) -> Result<OpResult, Malformed> {
    Ok(match c.u8()? {
        0 => OpResult::Count(c.u64()?),
        1 => OpResult::Entry(if c.flag()? { Some(read_entry(c)?) } else { None }),
        2 => OpResult::Entries(c.list(22, usize::MAX, read_entry)?),
        _ => return Err(Malformed("an unknown kind of result")),
    })
}

#[cfg(test)]
mod tests;
