//! Translates transactions into requests to etcd, and etcd's answers into results. Pure.
//!
//! - **MAP-1** etcd executes each transaction as a whole and at one revision, even if the encoding contains nested
//!   transactions;
//! - **MAP-2** a transaction that writes is executed only once, no matter how often it is sent, because it checks and
//!   updates the session's marker.
//!
//! Encoding of a transaction that writes:
//!
//! ```text
//! if the marker is unchanged since the last write:
//!     if the conditions hold: put the marker (number, true), run `then`
//!     otherwise:              put the marker (number, false), run `otherwise`
//! otherwise:
//!     get the marker: if it has this number, an earlier copy was executed
//! ```
//!
//! etcd evaluates all conditions, including nested ones, before it executes any operation.

use std::sync::Arc;

use super::messages as pb;
use super::messages::{CompareResult, CompareTarget, Operand, Request, RequestOp, Response, ResponseOp};
use crate::types::{Compare, Entry, Op, OpResult, Txn, Watch};

/// Prefix of the keys for session markers, relative to the store's prefix. It sorts after all keys of users, so
/// that a single range can contain all of their keys but no markers.
const SESSIONS: &str = "~sessions/";

/// Error for an answer that does not match its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the answer is none to this request")]
pub(super) struct Unexpected;

/// A single key or a key prefix, in etcd's range encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) key: Vec<u8>,
    /// End of the range, exclusive. Empty for a single key.
    pub(super) end: Vec<u8>,
}

impl Region {
    /// Returns the key range that contains only `key`.
    pub(super) fn key(key: Vec<u8>) -> Self {
        Self { key, end: Vec::new() }
    }

    pub(super) fn range(self) -> pb::RangeRequest {
        pb::RangeRequest { key: self.key, range_end: self.end, ..pb::RangeRequest::default() }
    }
}

/// Identifies a write within its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) number: u64,
    /// Revision at which the session's marker key was last put.
    pub(super) marker: i64,
}

/// Outcome of a transaction that writes.
#[derive(Debug, PartialEq)]
pub(super) enum Written {
    /// etcd executed the transaction in response to this request, not in response to an earlier attempt.
    Now { ok: bool, revision: i64, responses: Vec<ResponseOp> },
    /// etcd had already executed an earlier copy of the transaction, at `revision`.
    Before { ok: bool, revision: i64 },
    /// etcd did not execute the transaction in any attempt, because the session's marker key is missing or has an
    /// unexpected value.
    Never,
}

/// Prefix of a session's keys, and the leases that the keys are attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keys {
    /// Prefix that is prepended to each key.
    pub(super) prefix: String,
    /// ID of the session's lease.
    pub(super) lease: i64,
    /// ID of the lease for keys that outlive the session. 0 for no lease.
    pub(super) job_lease: i64,
}

impl Keys {
    pub(super) fn full(&self, key: &str) -> Vec<u8> {
        [self.prefix.as_bytes(), key.as_bytes()].concat()
    }

    /// Removes the store's prefix from a key. Returns `None` for keys outside this store and for the store's internal
    /// keys.
    fn strip(&self, key: &[u8]) -> Option<Arc<str>> {
        let key = str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        (key < SESSIONS).then(|| key.into())
    }

    /// Returns the key range that a watch covers.
    pub(super) fn region(&self, watch: &Watch) -> Region {
        if watch.exact { Region::key(self.full(&watch.prefix)) } else { self.under(&watch.prefix) }
    }

    /// Returns the key range that contains all keys with this prefix.
    pub(super) fn under(&self, prefix: &str) -> Region {
        let mut key = self.full(prefix);
        if SESSIONS.starts_with(prefix) {
            if key.is_empty() {
                // A range in etcd cannot start with an empty key. A single zero byte is the first possible key.
                key.push(0);
            }
            return Region { key, end: self.full(SESSIONS) };
        }
        let mut end = key.clone();
        if let Some(last) = end.last_mut() {
            // This cannot overflow, because UTF-8 has no byte 255.
            *last += 1;
        }
        Region { key, end }
    }

    /// Converts a key-value pair from etcd to an entry. Returns `None` if the key does not belong to this store or is
    /// not a key of a user.
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

    /// Returns the request that reads the session's marker key.
    pub(super) fn find_marker(&self) -> pb::RangeRequest {
        Region::key(self.marker()).range()
    }

    fn put_marker(&self, number: u64, ok: bool) -> RequestOp {
        let value = format!("{number} {ok}").into_bytes();
        let put = pb::PutRequest { key: self.marker(), value, lease: self.lease, ignore_lease: false };
        Request::Put(put).into()
    }

    /// Returns the request that puts the session's marker key for the first time. The answer contains the revision of
    /// the marker.
    pub(super) fn begin(&self) -> pb::TxnRequest {
        pb::TxnRequest { success: vec![self.put_marker(0, true)], ..pb::TxnRequest::default() }
    }

    /// Encodes a transaction that only reads.
    pub(super) fn read(&self, txn: &Txn) -> pb::TxnRequest {
        pb::TxnRequest {
            compare: txn.compares.iter().map(|compare| self.compare(compare)).collect(),
            success: txn.then.iter().map(|op| self.op(op)).collect(),
            failure: txn.otherwise.iter().map(|op| self.op(op)).collect(),
        }
    }

    /// Encodes a transaction that writes.
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

    /// Decodes the answer to [`Self::write`].
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

    /// Returns the region that an op reads or changes. For [`Op::Predecessor`], this is only `key`, not its
    /// predecessor.
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
        // If a put without a lease overwrites a leased key, keep the lease. Otherwise the key would outlive its
        // session. This needs a nested transaction, because etcd rejects `ignore_lease` if the key does not exist.
        let kept = pb::PutRequest { ignore_lease: true, ..put.clone() };
        let made = pb::PutRequest { lease: self.job_lease, ..put };
        let nested = pb::TxnRequest {
            compare: vec![compared(key, CompareResult::Greater, CompareTarget::Create, Operand::CreateRevision(0))],
            success: vec![Request::Put(kept).into()],
            failure: vec![Request::Put(made).into()],
        };
        Request::Txn(nested).into()
    }

    /// Returns the results of the ops. For [`Op::Predecessor`], the result is the entry of `key`, because the caller
    /// needs its create revision for the call to [`Self::predecessor`].
    pub(super) fn results(&self, ops: &[Op], responses: Vec<ResponseOp>) -> Result<Vec<OpResult>, Unexpected> {
        if ops.len() != responses.len() {
            return Err(Unexpected);
        }
        ops.iter().zip(responses).map(|(op, response)| self.result(op, response)).collect()
    }

    fn result(&self, op: &Op, response: ResponseOp) -> Result<OpResult, Unexpected> {
        match (op, response.response.ok_or(Unexpected)?) {
            (Op::Put { .. }, Response::Put(()) | Response::Txn(_)) => Ok(OpResult::Count(1)),
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

    /// Returns the request that reads the two newest keys with `prefix` that were created before revision `created`.
    /// The second key shows whether several keys were created at the same revision.
    ///
    /// The request reads the state at `revision`, or the newest state if `revision` is 0.
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

    /// Returns the request that reads a key with `prefix` that was created at revision `created`. If several keys
    /// match, the request reads the last one in name order.
    pub(super) fn last_made(&self, prefix: &str, created: u64, revision: i64) -> pb::RangeRequest {
        pb::RangeRequest {
            limit: 1,
            sort_target: pb::SortTarget::Key.into(),
            min_create_revision: signed(created),
            max_create_revision: signed(created),
            ..self.predecessor(prefix, created, revision)
        }
    }

    /// Returns the requests whose answers [`Self::recovered`] needs to reconstruct the result of an op. The op's
    /// transaction was executed at `revision`.
    pub(super) fn recover(&self, op: &Op, revision: i64) -> Vec<pb::RangeRequest> {
        let at = |revision| pb::RangeRequest { revision, ..self.region_of(op).range() };
        match op {
            Op::Put { .. } => Vec::new(),
            Op::Delete(_) | Op::DeletePrefix(_) => vec![pb::RangeRequest { keys_only: true, ..at(revision - 1) }],
            _ => vec![at(revision - 1), at(revision)],
        }
    }

    /// Reconstructs the result of `op` if the answer to its transaction was lost.
    ///
    /// `before` contains the operations that precede `op` in the transaction. `there` contains the answers to the
    /// requests of [`Self::recover`].
    ///
    /// The result is unambiguous, because etcd rejects a transaction that writes a key twice, unless both operations
    /// delete the key.
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

/// Returns true if the transaction may change a key.
pub(super) fn is_write(txn: &Txn) -> bool {
    txn.then.iter().chain(&txn.otherwise).any(writes)
}

fn writes(op: &Op) -> bool {
    matches!(op, Op::Put { .. } | Op::Delete(_) | Op::DeletePrefix(_))
}

/// Returns true if the op reads or changes this key.
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

/// Converts a revision or a count from etcd, which is never negative.
pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// Converts a revision to etcd's type. Values that are too large become the maximum, which etcd never reaches.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
