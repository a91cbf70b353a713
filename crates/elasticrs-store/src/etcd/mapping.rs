//! Transactions as etcd wants them, and its answers in our terms. Pure.
//!
//! - **MAP-1** a transaction is carried out by etcd as one, at one revision, whatever was nested for it;
//! - **MAP-2** a transaction that writes is carried out once, however often it was sent: it compares the session's
//!   marker, and puts it.
//!
//! What a transaction that writes looks like to etcd:
//!
//! ```text
//! if the marker is as the last write left it:
//!     if the compares hold: put the marker (number, true), then ...
//!     otherwise:            put the marker (number, false), otherwise ...
//! otherwise:
//!     get the marker: with this number, an earlier copy was carried out
//! ```
//!
//! etcd judges all compares, nested ones too, before it carries out anything.

use std::sync::Arc;

use super::messages as pb;
use super::messages::{CompareResult, CompareTarget, Operand, Request, RequestOp, Response, ResponseOp};
use crate::coordination::types::{Compare, Entry, Op, OpResult, Txn, Watch};

/// Where the marker of each session is, under the prefix. It is behind all other keys, so that each of our prefixes is one
/// range without it.
const SESSIONS: &str = "~sessions/";

/// An answer that is none to what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the answer is none to this request")]
pub(super) struct Unexpected;

/// One key, or all that begin alike, as etcd writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) key: Vec<u8>,
    /// Empty: the key alone.
    pub(super) end: Vec<u8>,
}

impl Region {
    /// Of a key.
    pub(super) fn key(key: Vec<u8>) -> Self {
        Self { key, end: Vec::new() }
    }

    pub(super) fn range(self) -> pb::RangeRequest {
        pb::RangeRequest { key: self.key, range_end: self.end, ..pb::RangeRequest::default() }
    }
}

/// A write that is told apart from all others of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) number: u64,
    /// The revision at which the marker was put last.
    pub(super) marker: i64,
}

/// What became of a transaction that writes.
#[derive(Debug, PartialEq)]
pub(super) enum Written {
    /// It was carried out now.
    Now { ok: bool, revision: i64, responses: Vec<ResponseOp> },
    /// An earlier copy of it was carried out, at this revision.
    Before { ok: bool, revision: i64 },
    /// Neither: the marker is gone, or somebody else's.
    Never,
}

/// Which keys are the job's, and which leases they get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keys {
    /// Put before each key.
    pub(super) prefix: String,
    /// Of the session.
    pub(super) lease: i64,
    /// Of keys that outlive the session; 0: none.
    pub(super) job_lease: i64,
}

impl Keys {
    pub(super) fn full(&self, key: &str) -> Vec<u8> {
        [self.prefix.as_bytes(), key.as_bytes()].concat()
    }

    /// Our name of a key; `None`: it is none of ours.
    fn strip(&self, key: &[u8]) -> Option<Arc<str>> {
        let key = str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        (key < SESSIONS).then(|| key.into())
    }

    /// What a watch covers.
    pub(super) fn region(&self, watch: &Watch) -> Region {
        if watch.exact { Region::key(self.full(&watch.prefix)) } else { self.under(&watch.prefix) }
    }

    /// The keys that begin so.
    pub(super) fn under(&self, prefix: &str) -> Region {
        let mut key = self.full(prefix);
        if SESSIONS.starts_with(prefix) {
            if key.is_empty() {
                // etcd's word for the first of all keys.
                key.push(0);
            }
            return Region { key, end: self.full(SESSIONS) };
        }
        let mut end = key.clone();
        if let Some(last) = end.last_mut() {
            // No byte of UTF-8 is 255.
            *last += 1;
        }
        Region { key, end }
    }

    /// A key and its value, under our name; `None`: it is none of ours.
    pub(super) fn entry(&self, kv: pb::KeyValue) -> Option<Entry> {
        Some(Entry {
            key: self.strip(&kv.key)?,
            value: kv.value.into(),
            create_revision: unsigned(kv.create_revision),
            mod_revision: unsigned(kv.mod_revision),
        })
    }

    pub(super) fn entries(&self, kvs: Vec<pb::KeyValue>) -> Vec<Entry> {
        kvs.into_iter().filter_map(|kv| self.entry(kv)).collect()
    }

    fn marker(&self) -> Vec<u8> {
        self.full(&format!("{SESSIONS}{:016x}", self.lease))
    }

    /// Reads the marker.
    pub(super) fn find_marker(&self) -> pb::RangeRequest {
        Region::key(self.marker()).range()
    }

    fn put_marker(&self, number: u64, ok: bool) -> RequestOp {
        let value = format!("{number} {ok}").into_bytes();
        let put = pb::PutRequest { key: self.marker(), value, lease: self.lease, ignore_lease: false };
        Request::Put(put).into()
    }

    /// Puts the marker for the first time; the answer's revision is that of the marker.
    pub(super) fn begin(&self) -> pb::TxnRequest {
        pb::TxnRequest { success: vec![self.put_marker(0, true)], ..pb::TxnRequest::default() }
    }

    /// A transaction that only reads.
    pub(super) fn read(&self, txn: &Txn) -> pb::TxnRequest {
        pb::TxnRequest {
            compare: txn.compares.iter().map(|compare| self.compare(compare)).collect(),
            success: txn.then.iter().map(|op| self.op(op)).collect(),
            failure: txn.otherwise.iter().map(|op| self.op(op)).collect(),
        }
    }

    /// A transaction that writes.
    pub(super) fn write(&self, txn: &Txn, write: Write) -> pb::TxnRequest {
        let mut inner = self.read(txn);
        inner.success.insert(0, self.put_marker(write.number, true));
        inner.failure.insert(0, self.put_marker(write.number, false));
        let operand = Operand::ModRevision(write.marker);
        pb::TxnRequest {
            compare: vec![compared(self.marker(), CompareResult::Equal, CompareTarget::Mod, operand)],
            success: vec![Request::Txn(inner).into()],
            failure: vec![Request::Range(self.find_marker()).into()],
        }
    }

    /// What the answer to [`Self::write`] says.
    pub(super) fn written(write: Write, answer: pb::TxnResponse) -> Result<Written, Unexpected> {
        let revision = answer.header.ok_or(Unexpected)?.revision;
        let only = answer.responses.into_iter().next().and_then(|op| op.response);
        match (answer.succeeded, only) {
            (true, Some(Response::Txn(mut inner))) if !inner.responses.is_empty() => {
                inner.responses.remove(0);
                Ok(Written::Now { ok: inner.succeeded, revision, responses: inner.responses })
            }
            (false, Some(Response::Range(found))) => {
                Ok(found.kvs.first().map_or(Written::Never, |marker| match marker_of(&marker.value) {
                    Some((number, ok)) if number == write.number => {
                        Written::Before { ok, revision: marker.mod_revision }
                    }
                    _ => Written::Never,
                }))
            }
            _ => Err(Unexpected),
        }
    }

    fn compare(&self, compare: &Compare) -> pb::Compare {
        use {CompareResult as Is, CompareTarget as The};

        let (key, is, target, operand) = match compare {
            Compare::Exists(key) => (key, Is::Greater, The::Create, Operand::CreateRevision(0)),
            Compare::Missing(key) => (key, Is::Equal, The::Create, Operand::CreateRevision(0)),
            Compare::Create(key, at) => (key, Is::Equal, The::Create, Operand::CreateRevision(signed(*at))),
            Compare::Mod(key, at) => (key, Is::Equal, The::Mod, Operand::ModRevision(signed(*at))),
            Compare::Value(key, value) => (key, Is::Equal, The::Value, Operand::Value(value.clone())),
        };
        compared(self.full(key), is, target, operand)
    }

    fn op(&self, op: &Op) -> RequestOp {
        match op {
            Op::Put { key, value, leased } => self.put(key, value, *leased),
            Op::Delete(_) | Op::DeletePrefix(_) => {
                let Region { key, end } = self.region_of(op);
                Request::DeleteRange(pb::DeleteRangeRequest { key, range_end: end }).into()
            }
            Op::Get(_) | Op::Predecessor { .. } => Request::Range(self.region_of(op).range()).into(),
            Op::Range { limit, .. } => {
                let range = pb::RangeRequest { limit: i64::from(*limit), ..self.region_of(op).range() };
                Request::Range(range).into()
            }
        }
    }

    /// What an op reads or changes; of a predecessor, the key whose age is asked first.
    fn region_of(&self, op: &Op) -> Region {
        match op {
            Op::Put { key, .. } | Op::Delete(key) | Op::Get(key) | Op::Predecessor { key, .. } => {
                Region::key(self.full(key))
            }
            Op::DeletePrefix(prefix) | Op::Range { prefix, .. } => self.under(prefix),
        }
    }

    fn put(&self, key: &str, value: &[u8], leased: bool) -> RequestOp {
        let key = self.full(key);
        let put = pb::PutRequest { key: key.clone(), value: value.into(), ..pb::PutRequest::default() };
        if leased {
            return Request::Put(pb::PutRequest { lease: self.lease, ..put }).into();
        }
        // Whoever writes over a leased key does not make it outlive its owner; etcd refuses this for a key that is missing.
        let kept = pb::PutRequest { ignore_lease: true, ..put.clone() };
        let made = pb::PutRequest { lease: self.job_lease, ..put };
        let nested = pb::TxnRequest {
            compare: vec![compared(key, CompareResult::Greater, CompareTarget::Create, Operand::CreateRevision(0))],
            success: vec![Request::Put(kept).into()],
            failure: vec![Request::Put(made).into()],
        };
        Request::Txn(nested).into()
    }

    /// What the ops have given. The result of [`Op::Predecessor`] is the key itself: see [`Self::predecessor`].
    pub(super) fn results(&self, ops: &[Op], responses: Vec<ResponseOp>) -> Result<Vec<OpResult>, Unexpected> {
        if ops.len() != responses.len() {
            return Err(Unexpected);
        }
        ops.iter().zip(responses).map(|(op, response)| self.result(op, response)).collect()
    }

    fn result(&self, op: &Op, response: ResponseOp) -> Result<OpResult, Unexpected> {
        match (op, response.response.ok_or(Unexpected)?) {
            (Op::Put { .. }, Response::Put(_) | Response::Txn(_)) => Ok(OpResult::Count(1)),
            (Op::Delete(_) | Op::DeletePrefix(_), Response::DeleteRange(answer)) => {
                Ok(OpResult::Count(unsigned(answer.deleted)))
            }
            (Op::Get(_) | Op::Predecessor { .. }, Response::Range(answer)) => {
                Ok(OpResult::Entry(self.entries(answer.kvs).pop()))
            }
            (Op::Range { .. }, Response::Range(answer)) => Ok(OpResult::Entries(self.entries(answer.kvs))),
            _ => Err(Unexpected),
        }
    }

    /// The youngest keys that begin so and are older than this create revision, as of `revision` (0: the newest): the
    /// two youngest, as keys that were made together are as old.
    pub(super) fn predecessor(&self, prefix: &str, created: u64, revision: i64) -> pb::RangeRequest {
        pb::RangeRequest {
            limit: 2,
            revision,
            sort_order: pb::SortOrder::Descend.into(),
            sort_target: pb::SortTarget::Create.into(),
            max_create_revision: signed(created) - 1,
            ..self.under(prefix).range()
        }
    }

    /// Of the keys that begin so and were made at this revision, the last by name.
    pub(super) fn last_made(&self, prefix: &str, created: u64, revision: i64) -> pb::RangeRequest {
        pb::RangeRequest {
            limit: 1,
            sort_target: pb::SortTarget::Key.into(),
            min_create_revision: signed(created),
            max_create_revision: signed(created),
            ..self.predecessor(prefix, created, revision)
        }
    }

    /// Asks what the op at this place has given, of a transaction that was carried out at `revision`: see
    /// [`Self::recovered`].
    pub(super) fn recover(&self, op: &Op, revision: i64) -> Vec<pb::RangeRequest> {
        let at = |revision| pb::RangeRequest { revision, ..self.region_of(op).range() };
        match op {
            Op::Put { .. } => Vec::new(),
            Op::Delete(_) | Op::DeletePrefix(_) => vec![pb::RangeRequest { keys_only: true, ..at(revision - 1) }],
            _ => vec![at(revision - 1), at(revision)],
        }
    }

    /// What an op has given after those `before` it, from what was there before and after the transaction. No key is
    /// written twice in one, but by deletions.
    pub(super) fn recovered(&self, before: &[Op], op: &Op, mut there: Vec<Vec<pb::KeyValue>>) -> OpResult {
        let is_touched = |entry: &Entry| before.iter().any(|op| writes(op) && covers(op, &entry.key));
        let mut after = self.entries(there.pop().unwrap_or_default());
        let mut found = self.entries(there.pop().unwrap_or_default());
        match op {
            Op::Put { .. } => OpResult::Count(1),
            Op::Delete(_) | Op::DeletePrefix(_) => {
                after.retain(|entry| !is_touched(entry));
                OpResult::Count(after.len() as u64)
            }
            Op::Get(_) | Op::Predecessor { .. } | Op::Range { .. } => {
                found.retain(|entry| !is_touched(entry));
                after.retain(is_touched);
                found.append(&mut after);
                found.sort_by(|one, other| one.key.cmp(&other.key));
                if let Op::Range { limit: limit @ 1.., .. } = op {
                    found.truncate(usize::try_from(*limit).unwrap_or(usize::MAX));
                }
                if let Op::Range { .. } = op { OpResult::Entries(found) } else { OpResult::Entry(found.pop()) }
            }
        }
    }
}

/// Whether the transaction may change anything.
pub(super) fn is_write(txn: &Txn) -> bool {
    txn.then.iter().chain(&txn.otherwise).any(writes)
}

fn writes(op: &Op) -> bool {
    matches!(op, Op::Put { .. } | Op::Delete(_) | Op::DeletePrefix(_))
}

/// Whether an op is about this key.
fn covers(op: &Op, key: &str) -> bool {
    match op {
        Op::Put { key: own, .. } | Op::Delete(own) | Op::Get(own) | Op::Predecessor { key: own, .. } => **own == *key,
        Op::DeletePrefix(prefix) | Op::Range { prefix, .. } => key.starts_with(&**prefix),
    }
}

fn compared(key: Vec<u8>, result: CompareResult, target: CompareTarget, operand: Operand) -> pb::Compare {
    pb::Compare { result: result.into(), target: target.into(), key, operand: Some(operand) }
}

fn marker_of(value: &[u8]) -> Option<(u64, bool)> {
    let (number, ok) = str::from_utf8(value).ok()?.split_once(' ')?;
    Some((number.parse().ok()?, ok.parse().ok()?))
}

/// Revisions and counts of etcd are never negative.
pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// A revision of etcd; one that it cannot have reached is none.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
