//! Keys, revisions, transactions and sessions of the store. Pure: uses no clock and no socket.
//!
//! - **STATE-1** a transaction is applied completely, at one revision, or not at all;
//! - **STATE-2** the revision rises by one when a transaction, or the end of sessions, changes at least one key. It
//!   does not change otherwise;
//! - **STATE-3** a leased key exists only as long as the session that most recently leased it;
//! - **STATE-4** the stored bytes never exceed the limit;
//! - **STATE-5** a transaction visits a bounded number of keys in addition to those that it changes or returns.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use super::turns::OPERATION;
use super::wire::MAX_ANSWER;
use crate::types::{Change, Compare, Entry, Op, OpResult, Txn, Watch};

/// ID of a session. IDs are never reused.
pub(super) type SessionId = u64;

/// Estimated memory overhead of a key, in bytes, in addition to its name and value. It covers the key's entries
/// in two trees.
const ENTRY_COST: usize = 256;
/// Maximum number of steps for all searches of one transaction. This many steps take about 25 ms, and the store serves
/// no other client during that time. The limit is sufficient for any single search in a store of the default size,
/// because a search takes at most half as many steps as the store has keys.
const MAX_SEARCHED: usize = 1 << 18;

/// A revision with all its changes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Revision {
    pub(super) number: u64,
    pub(super) changes: Vec<Change>,
}

/// Limit that a transaction exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Exceeded {
    /// The transaction would make the store exceed its size limit. Nothing was changed.
    #[error("the store is full: it holds {held} of at most {limit} bytes")]
    Full { held: usize, limit: usize },
    /// The transaction was applied, but its results are larger than an answer may be. The field is the limit in
    /// bytes.
    #[error("the answer is larger than {0} bytes")]
    Answer(usize),
    /// The transaction was applied, but its searches exceeded the step limit and were stopped. Its results are
    /// incomplete.
    #[error("the searches of the transaction went through more than {MAX_SEARCHED} keys")]
    Searched,
}

/// Remaining budget of a transaction: bytes of its answer (`room`) and search steps (`searched`). A budget becomes
/// `None` when it is exceeded.
#[derive(Debug)]
struct Budget {
    /// Number of bytes that can still be added to the answer.
    room: Option<usize>,
    most: usize,
    searched: Option<usize>,
}

impl Budget {
    fn exceeded(&self) -> Option<Exceeded> {
        match self {
            Self { room: None, most, .. } => Some(Exceeded::Answer(*most)),
            Self { searched: None, .. } => Some(Exceeded::Searched),
            Self { room: Some(_), searched: Some(_), .. } => None,
        }
    }
}

/// Outcome of a transaction.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) ok: bool,
    /// One result for each op, or the limit that the transaction exceeded.
    pub(super) results: Result<Vec<OpResult>, Exceeded>,
    /// The new revision. `None` if nothing changed.
    pub(super) revision: Option<Revision>,
}

/// Value and metadata of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) value: Arc<[u8]>,
    pub(super) create_revision: u64,
    pub(super) mod_revision: u64,
    pub(super) lease: Option<SessionId>,
}

/// Contents of the store.
#[derive(Debug, Default)]
pub(super) struct State {
    revision: u64,
    entries: BTreeMap<Arc<str>, Stored>,
    by_creation: BTreeSet<(u64, Arc<str>)>,
    sessions: HashMap<SessionId, BTreeSet<Arc<str>>>,
    entry_bytes: usize,
    max_bytes: usize,
}

impl State {
    /// Creates an empty store.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, ..Self::default() }
    }

    /// Restores the revision and the entries of a previous store. The caller must have restored the sessions first.
    pub(super) fn restore(&mut self, revision: u64, entries: BTreeMap<Arc<str>, Stored>) {
        (self.revision, self.entries) = (revision, entries);
        self.entry_bytes = cost_of_entries(&self.entries);
        for (key, stored) in &self.entries {
            self.by_creation.insert((stored.create_revision, Arc::clone(key)));
            if let Some(keys) = stored.lease.and_then(|session| self.sessions.get_mut(&session)) {
                keys.insert(Arc::clone(key));
            }
        }
    }

    /// Returns the current value and metadata of a key.
    pub(super) fn stored(&self, key: &str) -> Option<&Stored> {
        self.entries.get(key)
    }

    pub(super) fn entries(&self) -> &BTreeMap<Arc<str>, Stored> {
        &self.entries
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn entry_bytes(&self) -> usize {
        self.entry_bytes
    }

    fn room(&self) -> usize {
        MAX_ANSWER.min(self.max_bytes - self.entry_bytes)
    }

    pub(super) fn begin_session(&mut self, session: SessionId) {
        self.sessions.insert(session, BTreeSet::new());
    }

    /// Ends sessions and deletes all their leased keys in a single revision.
    pub(super) fn end_sessions(&mut self, ended: &[SessionId]) -> Option<Revision> {
        let mut changes = Vec::new();
        for session in ended {
            for key in self.sessions.remove(session).unwrap_or_default() {
                self.remove(&key, &mut changes);
            }
        }
        self.commit(changes)
    }

    /// Returns the maximum number of steps that a transaction takes. [`super::turns`] defines a step.
    pub(super) fn steps(&self, txn: &Txn) -> usize {
        let all = self.entries.len();
        let ops = txn.then.iter().chain(&txn.otherwise).map(|op| match op {
            Op::Put { .. } | Op::Delete(_) | Op::Get(_) => OPERATION,
            Op::DeletePrefix(_) | Op::Range { limit: 0, .. } => OPERATION + all,
            Op::Range { limit, .. } => OPERATION + all.min(usize::try_from(*limit).unwrap_or(all)),
            Op::Predecessor { .. } => OPERATION + all / 2,
        });
        ops.fold(OPERATION * txn.compares.len(), usize::saturating_add)
    }

    /// Returns the maximum number of steps that [`Self::snapshot`] takes.
    pub(super) fn steps_of_snapshot(&self, covers: &Watch) -> usize {
        if covers.exact { OPERATION } else { OPERATION + self.entries.len() }
    }

    /// Executes a transaction. Returns [`Exceeded::Full`], without any change, if the store has no room for it.
    pub(super) fn txn(&mut self, session: SessionId, txn: &Txn) -> Result<Done, Exceeded> {
        let ok = txn.compares.iter().all(|compare| self.holds(compare));
        let ops = if ok { &txn.then } else { &txn.otherwise };
        let added: usize = ops.iter().map(cost_of_op).sum();
        let limit = entry_limit(self.max_bytes);
        if added > 0 && self.entry_bytes + added > limit {
            return Err(Exceeded::Full { held: self.entry_bytes, limit });
        }
        let mut changes = Vec::new();
        let most = self.room();
        let mut budget = Budget { room: Some(most), most, searched: Some(MAX_SEARCHED) };
        // Apply every op even if the results are already too large, because a transaction is applied completely or not
        // at all.
        let results = ops.iter().map(|op| self.apply(session, op, &mut changes, &mut budget)).collect();
        let results = budget.exceeded().map_or(Ok(results), Err);
        Ok(Done { ok, results, revision: self.commit(changes) })
    }

    /// Returns all entries that the watch covers. Fails if they are too large for one answer.
    pub(super) fn snapshot(&self, covers: &Watch) -> Result<Vec<Entry>, Exceeded> {
        let most = self.room();
        let mut room = Some(most);
        let found = if covers.exact {
            self.get(&covers.prefix, &mut room).into_iter().collect()
        } else {
            self.range(&covers.prefix, 0, &mut room)
        };
        if room.is_some() { Ok(found) } else { Err(Exceeded::Answer(most)) }
    }

    fn holds(&self, compare: &Compare) -> bool {
        let found = |key: &Arc<str>| self.entries.get(key);
        match compare {
            Compare::Exists(key) => found(key).is_some(),
            Compare::Missing(key) => found(key).is_none(),
            Compare::Create(key, revision) => found(key).map_or(0, |stored| stored.create_revision) == *revision,
            Compare::Mod(key, revision) => found(key).map_or(0, |stored| stored.mod_revision) == *revision,
            Compare::Value(key, value) => found(key).is_some_and(|stored| *stored.value == **value),
        }
    }

    fn apply(&mut self, session: SessionId, op: &Op, changes: &mut Vec<Change>, budget: &mut Budget) -> OpResult {
        let Budget { room, searched, .. } = budget;
        match op {
            Op::Put { key, value, leased } => {
                OpResult::Count(u64::from(self.put(key, value, leased.then_some(session), changes)))
            }
            Op::Delete(key) => OpResult::Count(u64::from(self.remove(key, changes))),
            Op::DeletePrefix(prefix) => {
                let keys: Vec<_> = self.under(prefix).map(|(key, _)| Arc::clone(key)).collect();
                for key in &keys {
                    self.remove(key, changes);
                }
                OpResult::Count(keys.len() as u64)
            }
            Op::Get(key) => OpResult::Entry(self.get(key, room)),
            Op::Range { prefix, limit } => OpResult::Entries(self.range(prefix, *limit, room)),
            Op::Predecessor { prefix, key } => {
                OpResult::Entry(self.predecessor(prefix, key, searched).and_then(|found| self.get(&found, room)))
            }
        }
    }

    fn put(&mut self, key: &Arc<str>, value: &Arc<[u8]>, lease: Option<SessionId>, changes: &mut Vec<Change>) -> bool {
        // Ignore a leased put if its session has ended, because the key would never be deleted.
        if lease.is_some_and(|session| !self.sessions.contains_key(&session)) {
            return false;
        }
        let mod_revision = self.revision + 1;
        let mut create_revision = mod_revision;
        let mut key = Arc::clone(key);
        let mut lease = lease;
        if let Some((known, stored)) = self.entries.remove_entry(&key) {
            create_revision = stored.create_revision;
            self.entry_bytes -= cost(&known, &stored.value);
            self.unlease(&known, stored.lease);
            // If a put without a lease overwrites a leased key, keep the lease. Otherwise the key would outlive its
            // session.
            lease = lease.or(stored.lease);
            key = known;
        } else {
            self.by_creation.insert((create_revision, Arc::clone(&key)));
        }
        self.entry_bytes += cost(&key, value);
        if let Some(keys) = lease.and_then(|session| self.sessions.get_mut(&session)) {
            keys.insert(Arc::clone(&key));
        }
        changes.push(Change { key: Arc::clone(&key), value: Some(Arc::clone(value)), create_revision, mod_revision });
        self.entries.insert(key, Stored { value: Arc::clone(value), create_revision, mod_revision, lease });
        true
    }

    fn remove(&mut self, key: &str, changes: &mut Vec<Change>) -> bool {
        let Some((key, stored)) = self.entries.remove_entry(key) else { return false };
        self.entry_bytes -= cost(&key, &stored.value);
        self.unlease(&key, stored.lease);
        let creation = (stored.create_revision, Arc::clone(&key));
        self.by_creation.remove(&creation);
        let (create_revision, key) = creation;
        changes.push(Change { key, value: None, create_revision, mod_revision: self.revision + 1 });
        true
    }

    fn unlease(&mut self, key: &str, lease: Option<SessionId>) {
        if let Some(keys) = lease.and_then(|session| self.sessions.get_mut(&session)) {
            keys.remove(key);
        }
    }

    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a Arc<str>, &'a Stored)> {
        self.entries
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }

    fn get(&self, key: &str, room: &mut Option<usize>) -> Option<Entry> {
        self.entries.get_key_value(key).and_then(|(key, stored)| entry_within(key, stored, room))
    }

    fn range(&self, prefix: &str, limit: u32, room: &mut Option<usize>) -> Vec<Entry> {
        let limit = if limit == 0 { usize::MAX } else { usize::try_from(limit).unwrap_or(usize::MAX) };
        self.under(prefix).take(limit).map_while(|(key, stored)| entry_within(key, stored, room)).collect()
    }

    /// Finds the newest key with this prefix that is older than `key`. Runs two searches alternately and returns the
    /// result of the one that finishes first. One visits all keys from newest to oldest, which is fast if many keys
    /// have the prefix. The other visits only the keys with the prefix, which is fast if there are few of them.
    fn predecessor(&self, prefix: &str, key: &str, searched: &mut Option<usize>) -> Option<Arc<str>> {
        let own = self.entries.get(key)?.create_revision;
        let mut by_age = self.by_creation.range(..(own, Arc::from(""))).rev().map(|(_, key)| key);
        let mut by_name = self.under(prefix);
        let mut newest = None;
        loop {
            *searched = searched.and_then(|left| left.checked_sub(1));
            (*searched)?;
            let key = by_age.next()?;
            if key.starts_with(prefix) {
                return Some(Arc::clone(key));
            }
            match by_name.next() {
                Some((key, stored)) if stored.create_revision < own => {
                    newest = newest.max(Some((stored.create_revision, key)));
                }
                Some(_) => {}
                None => return newest.map(|(_, key)| Arc::clone(key)),
            }
        }
    }

    fn commit(&mut self, changes: Vec<Change>) -> Option<Revision> {
        if changes.is_empty() {
            return None;
        }
        self.revision += 1;
        Some(Revision { number: self.revision, changes })
    }
}

fn entry_within(key: &Arc<str>, stored: &Stored, room: &mut Option<usize>) -> Option<Entry> {
    *room = room.and_then(|left| left.checked_sub(cost(key, &stored.value)));
    (*room)?;
    Some(Entry {
        key: Arc::clone(key),
        value: Arc::clone(&stored.value),
        create_revision: stored.create_revision,
        mod_revision: stored.mod_revision,
    })
}

/// Returns the maximum number of bytes for the keys of a store with this `max_bytes`. The rest is for messages.
pub(super) fn entry_limit(max_bytes: usize) -> usize {
    max_bytes / 5 * 3
}

pub(super) fn cost_of_entries(entries: &BTreeMap<Arc<str>, Stored>) -> usize {
    entries.iter().map(|(key, stored)| cost(key, &stored.value)).sum()
}

fn cost(key: &str, value: &[u8]) -> usize {
    ENTRY_COST + key.len() + value.len()
}

fn cost_of_op(op: &Op) -> usize {
    match op {
        Op::Put { key, value, .. } => cost(key, value),
        Op::Delete(_) | Op::DeletePrefix(_) | Op::Get(_) | Op::Range { .. } | Op::Predecessor { .. } => 0,
    }
}

#[cfg(test)]
pub(super) mod tests;
