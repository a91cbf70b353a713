//! Tracks the changes that are not on disk yet, and lets tasks wait until those changes are saved.
//!
//! - **JOURNAL-1** The store sends a message only when all changes made before it are on disk. A crash therefore
//!   loses only changes that no client has seen.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::yield_now;

use super::durable::{Granted, Image, Item, Replaced, StateError, StateFile};
use super::state::{Revision, SessionId, State};

/// The journal of a store that keeps its state in a file.
#[derive(Debug)]
pub(super) struct Journal {
    kept: RefCell<Kept>,
    /// Number of changes recorded so far. `on_disk` is the number of changes that are on disk.
    noted: Cell<u64>,
    on_disk: Cell<u64>,
    changed: Notify,
    saved: Notify,
}

#[derive(Debug)]
struct Kept {
    file: StateFile,
    /// Everything to save except the keys and their values, which [`State`] holds.
    image: Image,
    /// Keys and sessions that have changed since the last save.
    keys: BTreeSet<Arc<str>>,
    sessions: BTreeSet<SessionId>,
}

impl Journal {
    /// Creates a journal for the state file `file`. The file already contains the state in `image`.
    pub(super) fn new(file: StateFile, image: Image) -> Self {
        let kept = Kept { file, image, keys: BTreeSet::new(), sessions: BTreeSet::new() };
        Self {
            kept: RefCell::new(kept),
            noted: Cell::new(0),
            on_disk: Cell::new(0),
            changed: Notify::new(),
            saved: Notify::new(),
        }
    }

    /// Records that a session has started.
    pub(super) fn begin(&self, session: SessionId, granted: Granted) {
        self.note(|kept| {
            kept.image.sessions.insert(session, granted);
            kept.sessions.insert(session);
        });
    }

    /// Records a time to live that is announced to a session, if it is the longest so far.
    pub(super) fn extend(&self, session: SessionId, ttl_ms: u32) {
        let is_longer = |kept: &Kept| kept.image.sessions.get(&session).is_some_and(|granted| granted.ttl_ms < ttl_ms);
        if is_longer(&self.kept.borrow()) {
            self.note(|kept| {
                kept.sessions.insert(session);
                kept.image.sessions.entry(session).and_modify(|granted| granted.ttl_ms = ttl_ms);
            });
        }
    }

    /// Records that sessions have ended. The deletion of their keys is recorded by [`Self::revise`].
    pub(super) fn end(&self, sessions: &[SessionId]) {
        self.note(|kept| {
            for session in sessions {
                kept.image.sessions.remove(session);
                kept.sessions.insert(*session);
            }
        });
    }

    /// Records that keys have changed.
    pub(super) fn revise(&self, revision: &Revision) {
        self.note(|kept| kept.keys.extend(revision.changes.iter().map(|change| Arc::clone(&change.key))));
    }

    fn note(&self, change: impl FnOnce(&mut Kept)) {
        change(&mut self.kept.borrow_mut());
        self.noted.set(self.noted.get() + 1);
        self.changed.notify_one();
    }

    /// Waits until there is an unsaved change. Then yields once, so that other tasks that are ready can add changes to
    /// the same save.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
        yield_now().await;
    }

    /// Waits until all changes made before this call are on disk. Does not wait for later changes, because a busy store
    /// always has unsaved changes.
    pub(super) async fn settled(&self) {
        let noted = self.noted.get();
        while self.on_disk.get() < noted {
            self.saved.notified().await;
        }
    }

    /// Writes all unsaved changes to disk. Also replaces the state file if it has grown too much. If the new file
    /// cannot be written, continues with the old file and returns a message for the user.
    pub(super) fn save(&self, state: &State, next_session: SessionId) -> Result<Option<String>, StateError> {
        let Kept { file, image, keys, sessions } = &mut *self.kept.borrow_mut();
        (image.revision, image.next_session) = (state.revision(), next_session);
        let replaced = file.has_grown().then(|| file.replace(image.items(state.entries()))).transpose()?;
        if !matches!(replaced, Some(Replaced::Yes)) {
            let sessions =
                sessions.iter().map(|id| Item::Session { id: *id, granted: image.sessions.get(id).cloned() });
            let keys = keys.iter().map(|key| Item::Key { key: Arc::clone(key), stored: state.stored(key).cloned() });
            file.commit(&[image.counters()].into_iter().chain(sessions).chain(keys).collect::<Vec<_>>())?;
        }
        keys.clear();
        sessions.clear();
        self.on_disk.set(self.noted.get());
        self.saved.notify_waiters();
        Ok(match replaced {
            Some(Replaced::No(error)) => Some(format!(
                "{error}; the store goes on with its present file, which needs room to grow, and tries again when that has doubled"
            )),
            Some(Replaced::Yes) | None => None,
        })
    }

    /// Saves the remaining changes and marks the state file as complete. After this call, nothing may be saved.
    pub(super) fn finish(&self, state: &State, next_session: SessionId) -> Result<(), StateError> {
        if self.on_disk.get() < self.noted.get() {
            self.save(state, next_session)?;
        }
        self.kept.borrow_mut().file.finish()
    }
}

#[cfg(test)]
mod tests;
