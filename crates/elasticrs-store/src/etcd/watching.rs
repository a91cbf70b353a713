//! Watches that outlive connections, and the history that etcd remembers. Pure.
//!
//! - **RESUME-1** a watch is told of each revision that it covers whole, once, in order;
//! - **RESUME-2** after a compaction it is told of what differs from what it was told, as one revision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::mapping::{Keys, signed, unsigned};
use super::messages as pb;
use crate::coordination::types::{Change, Entry, Watch};

/// The revisions that made a key and changed it last.
type Ages = (u64, u64);

/// What one revision did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) revision: u64,
    pub(super) changes: Vec<Change>,
}

/// One watch.
#[derive(Debug)]
pub(super) struct Watched {
    watch: Watch,
    /// The first revision that was not told of.
    next: u64,
    /// What is there, as far as it was told.
    known: BTreeMap<Arc<str>, Ages>,
}

impl Watched {
    /// A watch that is told of all after `revision`, at which these keys were there.
    pub(super) fn new(watch: Watch, revision: u64, there: &[Entry]) -> Self {
        let known = there.iter().map(|entry| (Arc::clone(&entry.key), ages(entry))).collect();
        Self { watch, next: revision + 1, known }
    }

    /// What events say that was not told yet.
    fn told(&mut self, keys: &Keys, events: Vec<pb::WatchEvent>) -> Vec<Told> {
        let mut told = Vec::<Told>::new();
        for event in events {
            let is_deleted = event.kind == i32::from(pb::EventKind::Delete);
            let Some(entry) = event.kv.and_then(|kv| keys.entry(kv)) else { continue };
            let revision = entry.mod_revision;
            if revision < self.next {
                continue;
            }
            let change = self.change(entry, is_deleted);
            match told.last_mut() {
                Some(last) if last.revision == revision => last.changes.push(change),
                _ => told.push(Told { revision, changes: vec![change] }),
            }
        }
        if let Some(last) = told.last() {
            self.next = last.revision + 1;
        }
        told
    }

    fn change(&mut self, entry: Entry, is_deleted: bool) -> Change {
        let Entry { key, value, create_revision, mod_revision } = entry;
        if is_deleted {
            let create_revision = self.known.remove(&key).map_or(0, |(created, _)| created);
            return Change { key, value: None, create_revision, mod_revision };
        }
        self.known.insert(Arc::clone(&key), (create_revision, mod_revision));
        Change { key, value: Some(value), create_revision, mod_revision }
    }

    /// How what is there at `revision` differs from what was told.
    pub(super) fn catch_up(&mut self, revision: u64, there: Vec<Entry>) -> Option<Told> {
        let alive: BTreeSet<_> = there.iter().map(|entry| Arc::clone(&entry.key)).collect();
        let gone: Vec<_> = self.known.keys().filter(|key| !alive.contains(*key)).cloned().collect();
        let mut changes = Vec::new();
        for key in gone {
            let entry = Entry { key, value: Arc::default(), create_revision: 0, mod_revision: revision };
            changes.push(self.change(entry, true));
        }
        for entry in there {
            if self.known.get(&entry.key) != Some(&ages(&entry)) {
                changes.push(self.change(entry, false));
            }
        }
        self.next = revision + 1;
        (!changes.is_empty()).then_some(Told { revision, changes })
    }
}

fn ages(entry: &Entry) -> Ages {
    (entry.create_revision, entry.mod_revision)
}

/// What a message of etcd's asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Told(Vec<Told>),
    /// The history that this watch needs is forgotten: [`Watches::catch_up`] with what is there.
    Forgotten(i64),
    /// Etcd has ended this watch, for this reason.
    Ended(String),
}

/// All watches of a session, by the number under which etcd knows them on the present connection.
#[derive(Debug, Default)]
pub(super) struct Watches {
    watches: BTreeMap<i64, Watched>,
    last: i64,
}

impl Watches {
    /// Adds a watch; its number.
    pub(super) fn add(&mut self, watched: Watched) -> i64 {
        self.last += 1;
        self.watches.insert(self.last, watched);
        self.last
    }

    /// Ends all watches of these keys; their numbers.
    pub(super) fn remove(&mut self, watch: &Watch) -> Vec<i64> {
        let same = self.watches.iter().filter(|(_, watched)| watched.watch == *watch);
        let numbers: Vec<_> = same.map(|(number, _)| *number).collect();
        for number in &numbers {
            self.watches.remove(number);
        }
        numbers
    }

    /// What a watch covers.
    pub(super) fn watch(&self, number: i64) -> Option<&Watch> {
        self.watches.get(&number).map(|watched| &watched.watch)
    }

    pub(super) fn numbers(&self) -> Vec<i64> {
        self.watches.keys().copied().collect()
    }

    /// Asks etcd for what a watch was not told yet.
    pub(super) fn create(&self, number: i64, keys: &Keys) -> Option<pb::WatchRequest> {
        let watched = self.watches.get(&number)?;
        let region = keys.region(&watched.watch);
        let create = pb::WatchCreate {
            key: region.key,
            range_end: region.end,
            start_revision: signed(watched.next),
            watch_id: number,
        };
        Some(pb::WatchCommand::Create(create).into())
    }

    /// What a message says. One of a watch that has ended here says nothing.
    pub(super) fn hear(&mut self, keys: &Keys, message: pb::WatchResponse) -> Heard {
        let Some(watched) = self.watches.get_mut(&message.watch_id) else { return Heard::Told(Vec::new()) };
        if message.compact_revision > 0 {
            return Heard::Forgotten(message.watch_id);
        }
        if message.canceled {
            return Heard::Ended(message.cancel_reason);
        }
        Heard::Told(watched.told(keys, message.events))
    }

    /// Tells a watch of what is there at `revision`, in place of the history; its new number.
    pub(super) fn catch_up(&mut self, number: i64, revision: i64, there: Vec<Entry>) -> Option<(i64, Option<Told>)> {
        let mut watched = self.watches.remove(&number)?;
        let told = watched.catch_up(unsigned(revision), there);
        Some((self.add(watched), told))
    }
}

#[cfg(test)]
mod tests;
