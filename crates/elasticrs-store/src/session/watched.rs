//! Tracks the keys that a watch has reported, so that the watch can catch up after it has missed changes. Pure.
//!
//! - **WATCHED-1** after a watch has missed changes, it reports all differences from its last reported state,
//!   including deletions, as one revision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::types::{Change, Entry, Watch};

/// A key's create revision and mod revision.
pub(crate) type Ages = (u64, u64);

/// Changes of one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChangeSet {
    pub(crate) revision: u64,
    pub(crate) changes: Vec<Change>,
}

impl ChangeSet {
    /// Returns the approximate size in bytes of all keys and values in this set.
    pub(crate) fn bytes(&self) -> usize {
        self.changes.iter().map(|change| change.key.len() + change.value.as_ref().map_or(0, |v| v.len())).sum()
    }
}

/// State of a watch.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) watch: Watch,
    /// First revision that the watch has not reported.
    pub(crate) next: u64,
    /// Watched keys that exist in the last reported state.
    known: BTreeMap<Arc<str>, Ages>,
}

impl Watched {
    /// Creates a watch that reports all revisions after `revision`. `there` contains the entries at that revision.
    pub(crate) fn new<'a>(watch: Watch, revision: u64, there: impl IntoIterator<Item = &'a Entry>) -> Self {
        let known = there.into_iter().map(|entry| (Arc::clone(&entry.key), ages(entry))).collect();
        Self { watch, next: revision + 1, known }
    }

    /// Records a change of a watched key. Ignores changes of other keys.
    pub(crate) fn note(&mut self, change: &Change) {
        if !self.watch.covers(&change.key) {
            return;
        }
        if change.value.is_some() {
            self.known.insert(Arc::clone(&change.key), (change.create_revision, change.mod_revision));
        } else {
            self.known.remove(&change.key);
        }
    }

    /// Records the new state of a key. Returns the change to report.
    pub(crate) fn change(&mut self, entry: Entry, is_deleted: bool) -> Change {
        let Entry { key, value, create_revision, mod_revision } = entry;
        if is_deleted {
            let create_revision = self.known.remove(&key).map_or(0, |(created, _)| created);
            return Change { key, value: None, create_revision, mod_revision };
        }
        self.known.insert(Arc::clone(&key), (create_revision, mod_revision));
        Change { key, value: Some(value), create_revision, mod_revision }
    }

    /// Replaces the watch's known state with the entries at `revision`. Returns the changes since the last reported
    /// state, or `None` if nothing has changed.
    pub(crate) fn catch_up(&mut self, revision: u64, there: Vec<Entry>) -> Option<ChangeSet> {
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
        (!changes.is_empty()).then_some(ChangeSet { revision, changes })
    }
}

pub(crate) fn ages(entry: &Entry) -> Ages {
    (entry.create_revision, entry.mod_revision)
}
