//! Watches that outlive connections, and the history that etcd remembers. Pure.
//!
//! - **RESUME-1** a watch is told of each revision that it covers whole, once, in order; after a compaction as
//!   [`crate::watched`] says.

use std::collections::BTreeMap;

use super::mapping::{Keys, signed, unsigned};
use super::messages as pb;
use crate::coordination::types::{Entry, Watch};
use crate::watched::{Told, Watched};

/// What events say that this watch was not told yet.
fn told(watched: &mut Watched, keys: &Keys, events: Vec<pb::WatchEvent>) -> Vec<Told> {
    let mut told = Vec::<Told>::new();
    for event in events {
        let is_deleted = event.kind == i32::from(pb::EventKind::Delete);
        let Some(entry) = event.kv.and_then(|kv| keys.entry(kv)) else { continue };
        let revision = entry.mod_revision;
        if revision < watched.next {
            continue;
        }
        let change = watched.change(entry, is_deleted);
        match told.last_mut() {
            Some(last) if last.revision == revision => last.changes.push(change),
            _ => told.push(Told { revision, changes: vec![change] }),
        }
    }
    if let Some(last) = told.last() {
        watched.next = last.revision + 1;
    }
    told
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
        Heard::Told(told(watched, keys, message.events))
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
