//! State of a session's watches, which survive reconnects and compactions of etcd's history. All functions are pure.
//!
//! - **RESUME-1** a watch reports each revision once and in order, with all changes to the watched keys. After a
//!   compaction, it reports the differences from its last report instead (see [`crate::session::watched`]).

use std::collections::BTreeMap;

use super::mapping::{Keys, signed, unsigned};
use super::messages as pb;
use crate::session::watched::{ChangeSet, Watched};
use crate::types::{Entry, Watch};

/// Returns the changes that the watch has not reported yet, grouped by revision, and marks them as reported.
fn change_sets(watched: &mut Watched, keys: &Keys, events: Vec<pb::WatchEvent>) -> Vec<ChangeSet> {
    let mut sets = Vec::<ChangeSet>::new();
    for event in events {
        let is_deleted = event.kind == i32::from(pb::EventKind::Delete);
        let Some(entry) = event.kv.and_then(|kv| keys.entry(kv)) else { continue };
        let revision = entry.mod_revision;
        if revision < watched.next {
            continue;
        }
        let change = watched.change(entry, is_deleted);
        match sets.last_mut() {
            Some(last) if last.revision == revision => last.changes.push(change),
            _ => sets.push(ChangeSet { revision, changes: vec![change] }),
        }
    }
    if let Some(last) = sets.last() {
        watched.next = last.revision + 1;
    }
    sets
}

/// Effect of a message from etcd.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WatchUpdate {
    Changes(Vec<ChangeSet>),
    /// etcd no longer has the history that the watch with this ID needs. The caller must pass the current entries to
    /// [`Watches::catch_up`].
    Compacted(i64),
    /// etcd cancelled the watch. The field is the reason.
    Canceled(String),
}

/// All watches of a session, keyed by watch ID.
#[derive(Debug, Default)]
pub(super) struct Watches {
    watches: BTreeMap<i64, Watched>,
    last: i64,
}

impl Watches {
    /// Adds a watch and returns its ID.
    pub(super) fn add(&mut self, watched: Watched) -> i64 {
        self.last += 1;
        self.watches.insert(self.last, watched);
        self.last
    }

    /// Removes all watches that equal `watch` and returns their IDs.
    pub(super) fn remove(&mut self, watch: &Watch) -> Vec<i64> {
        let same = self.watches.iter().filter(|(_, watched)| watched.watch == *watch);
        let numbers: Vec<_> = same.map(|(number, _)| *number).collect();
        for number in &numbers {
            self.watches.remove(number);
        }
        numbers
    }

    /// Returns the watch with this ID, if it exists.
    pub(super) fn watch(&self, number: i64) -> Option<&Watch> {
        self.watches.get(&number).map(|watched| &watched.watch)
    }

    pub(super) fn numbers(&self) -> Vec<i64> {
        self.watches.keys().copied().collect()
    }

    /// Returns the request that creates a watch in etcd, starting with the first revision that the watch has not
    /// reported yet.
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

    /// Handles a message from etcd. Ignores messages for watches that were already removed.
    pub(super) fn update(&mut self, keys: &Keys, message: pb::WatchResponse) -> WatchUpdate {
        let Some(watched) = self.watches.get_mut(&message.watch_id) else { return WatchUpdate::Changes(Vec::new()) };
        if message.compact_revision > 0 {
            return WatchUpdate::Compacted(message.watch_id);
        }
        if message.canceled {
            return WatchUpdate::Canceled(message.cancel_reason);
        }
        WatchUpdate::Changes(change_sets(watched, keys, message.events))
    }

    /// Updates a watch to `there`, the entries at `revision`, because the events since its last report are no longer
    /// available. Returns the watch's new ID and the differences to report.
    pub(super) fn catch_up(
        &mut self,
        number: i64,
        revision: i64,
        there: Vec<Entry>,
    ) -> Option<(i64, Option<ChangeSet>)> {
        let mut watched = self.watches.remove(&number)?;
        let sets = watched.catch_up(unsigned(revision), there);
        Some((self.add(watched), sets))
    }
}

#[cfg(test)]
mod tests;
