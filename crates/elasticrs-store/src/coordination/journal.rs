//! What has changed since the state was last on disk, and who waits until it is there.
//!
//! - **JOURNAL-1** nothing leaves the store while a part of its state is not on disk: nobody has seen what is lost.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::yield_now;

use super::durable::{Granted, Image, Item, Replaced, StateError, StateFile};
use super::state::{Revision, SessionId, State};

/// Of a store that keeps its state.
#[derive(Debug)]
pub(super) struct Journal {
    kept: RefCell<Kept>,
    /// Number of changes so far, and how many of them are on disk.
    noted: Cell<u64>,
    on_disk: Cell<u64>,
    changed: Notify,
    saved: Notify,
}

#[derive(Debug)]
struct Kept {
    file: StateFile,
    /// What is kept beside the keys.
    image: Image,
    /// Keys and sessions that are not on disk as they are.
    keys: BTreeSet<Arc<str>>,
    sessions: BTreeSet<SessionId>,
}

impl Journal {
    /// Of a file that holds this image, and these keys.
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

    /// A session has begun.
    pub(super) fn begin(&self, session: SessionId, granted: Granted) {
        self.note(|kept| {
            kept.image.sessions.insert(session, granted);
            kept.sessions.insert(session);
        });
    }

    /// A session is told this time to live.
    pub(super) fn extend(&self, session: SessionId, ttl_ms: u32) {
        let is_longer = |kept: &Kept| kept.image.sessions.get(&session).is_some_and(|granted| granted.ttl_ms < ttl_ms);
        if is_longer(&self.kept.borrow()) {
            self.note(|kept| {
                kept.sessions.insert(session);
                kept.image.sessions.entry(session).and_modify(|granted| granted.ttl_ms = ttl_ms);
            });
        }
    }

    /// Sessions have ended, and their keys have been deleted.
    pub(super) fn end(&self, sessions: &[SessionId]) {
        self.note(|kept| {
            for session in sessions {
                kept.image.sessions.remove(session);
                kept.sessions.insert(*session);
            }
        });
    }

    /// Keys have changed.
    pub(super) fn revise(&self, revision: &Revision) {
        self.note(|kept| kept.keys.extend(revision.changes.iter().map(|change| Arc::clone(&change.key))));
    }

    fn note(&self, change: impl FnOnce(&mut Kept)) {
        change(&mut self.kept.borrow_mut());
        self.noted.set(self.noted.get() + 1);
        self.changed.notify_one();
    }

    /// Waits until something is not on disk, and until all who could ask for something now have done so.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
        yield_now().await;
    }

    /// Waits until all changes so far are on disk. Changes that come meanwhile are not waited for: in a busy store there would
    /// always be more of them.
    pub(super) async fn settled(&self) {
        let noted = self.noted.get();
        while self.on_disk.get() < noted {
            self.saved.notified().await;
        }
    }

    /// Writes to disk whatever is not there yet. Returns a line for the user if the file could not be replaced by a shorter one,
    /// which does no harm as long as there is room for it to grow.
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

    /// Puts the rest on disk, behind which nothing follows.
    pub(super) fn finish(&self, state: &State, next_session: SessionId) -> Result<(), StateError> {
        if self.on_disk.get() < self.noted.get() {
            self.save(state, next_session)?;
        }
        self.kept.borrow_mut().file.finish()
    }
}

#[cfg(test)]
mod tests;
