//! Keys that a watch was notified of, so that the watch can continue after missing changes. Pure.
//!
//! - **WATCHED-1** A watch that has missed changes is notified of all differences from its last known state, including
//!   deletions, as one revision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::coordination::types::{Change, Entry, Watch};

/// The revisions that made a key and changed it last.
pub(crate) type Ages = (u64, u64);

/// Changes of one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) revision: u64,
    pub(crate) changes: Vec<Change>,
}

impl Told {
    /// About how many bytes that is.
    pub(crate) fn bytes(&self) -> usize {
        self.changes.iter().map(|change| change.key.len() + change.value.as_ref().map_or(0, |v| v.len())).sum()
    }
}

/// State of a watch.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) watch: Watch,
    /// The first revision of which the watch was not notified.
    pub(crate) next: u64,
    /// Keys that exist, as far as the watch was notified.
    known: BTreeMap<Arc<str>, Ages>,
}

impl Watched {
    /// Creates a watch that is notified of all revisions after `revision`, at which these keys existed.
    pub(crate) fn new<'a>(watch: Watch, revision: u64, there: impl IntoIterator<Item = &'a Entry>) -> Self {
        let known = there.into_iter().map(|entry| (Arc::clone(&entry.key), ages(entry))).collect();
        Self { watch, next: revision + 1, known }
    }

    /// Handles a change that the watch may cover.
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

    /// Returns the notification for a key that now has this value or was deleted.
    pub(crate) fn change(&mut self, entry: Entry, is_deleted: bool) -> Change {
        let Entry { key, value, create_revision, mod_revision } = entry;
        if is_deleted {
            let create_revision = self.known.remove(&key).map_or(0, |(created, _)| created);
            return Change { key, value: None, create_revision, mod_revision };
        }
        self.known.insert(Arc::clone(&key), (create_revision, mod_revision));
        Change { key, value: Some(value), create_revision, mod_revision }
    }

    /// Returns the difference between the keys at `revision` and the keys that the watch was notified of.
    pub(crate) fn catch_up(&mut self, revision: u64, there: Vec<Entry>) -> Option<Told> {
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

pub(crate) fn ages(entry: &Entry) -> Ages {
    (entry.create_revision, entry.mod_revision)
}
