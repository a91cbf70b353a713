//! Index of watches: finds the clients to which a change must be sent. Pure.
//!
//! - **WATCH-1** a client receives each revision at most once, with every change that any of its watches covers, in
//!   order;
//! - **WATCH-2** clients that receive the same changes share one message;
//! - **WATCH-3** the index tracks the memory that all watches use.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::state::{Revision, SessionId};
use crate::types::Watch;

/// Estimated memory overhead of a watch, in bytes, in addition to its prefix. It covers the watch's entries in
/// three tables.
const WATCH_COST: usize = 192;

/// All watches of all clients.
#[derive(Debug, Default)]
pub(super) struct Watches {
    exact: HashMap<Arc<str>, Vec<SessionId>>,
    /// Prefix watches, grouped by prefix length. Finding the watchers of a key takes one lookup per length, which is
    /// fast because there are few different lengths even if there are many watches.
    prefixes: BTreeMap<usize, HashMap<Arc<str>, Vec<SessionId>>>,
    of_client: HashMap<SessionId, Vec<Watch>>,
    bytes: usize,
}

impl Watches {
    /// Adds a watch. Does nothing if the client already has it.
    pub(super) fn add(&mut self, client: SessionId, watch: Watch) {
        let own = self.of_client.entry(client).or_default();
        if own.contains(&watch) {
            return;
        }
        own.push(watch.clone());
        self.bytes += cost(&watch);
        let keys = if watch.exact { &mut self.exact } else { self.prefixes.entry(watch.prefix.len()).or_default() };
        keys.entry(watch.prefix).or_default().push(client);
    }

    pub(super) fn remove(&mut self, client: SessionId, watch: &Watch) {
        if let Some(own) = self.of_client.get_mut(&client) {
            let before = own.len();
            own.retain(|other| other != watch);
            self.bytes -= (before - own.len()) * cost(watch);
            if own.is_empty() {
                self.of_client.remove(&client);
            }
        }
        self.forget(client, watch);
    }

    pub(super) fn remove_client(&mut self, client: SessionId) {
        for watch in self.of_client.remove(&client).unwrap_or_default() {
            self.bytes -= cost(&watch);
            self.forget(client, &watch);
        }
    }

    pub(super) fn count(&self, client: SessionId) -> usize {
        self.of_client.get(&client).map_or(0, Vec::len)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn bytes_of(&self, client: SessionId) -> usize {
        self.of_client.get(&client).map_or(0, |own| own.iter().map(cost).sum())
    }

    fn forget(&mut self, client: SessionId, watch: &Watch) {
        let length = watch.prefix.len();
        let keys = if watch.exact { Some(&mut self.exact) } else { self.prefixes.get_mut(&length) };
        let Some(keys) = keys else { return };
        if let Some(clients) = keys.get_mut(&watch.prefix) {
            clients.retain(|other| *other != client);
            if clients.is_empty() {
                keys.remove(&watch.prefix);
            }
        }
        if keys.is_empty() && !watch.exact {
            self.prefixes.remove(&length);
        }
    }

    /// Returns groups of clients that receive the same changes of this revision. The key of a group is the list of the
    /// positions of these changes in `revision.changes`, in ascending order.
    pub(super) fn deliveries(&self, revision: &Revision) -> BTreeMap<Vec<usize>, Vec<SessionId>> {
        let mut of_client: BTreeMap<SessionId, Vec<usize>> = BTreeMap::new();
        for (position, change) in revision.changes.iter().enumerate() {
            for client in self.watchers(&change.key) {
                let seen = of_client.entry(client).or_default();
                // Add each change only once, even if several watches of a client cover its key.
                if seen.last() != Some(&position) {
                    seen.push(position);
                }
            }
        }
        let mut deliveries: BTreeMap<_, Vec<SessionId>> = BTreeMap::new();
        for (client, changes) in of_client {
            deliveries.entry(changes).or_default().push(client);
        }
        deliveries
    }

    fn watchers<'a>(&'a self, key: &'a str) -> impl Iterator<Item = SessionId> + 'a {
        let by_prefix =
            self.prefixes.range(..=key.len()).filter_map(move |(length, keys)| keys.get(key.get(..*length)?)).flatten();
        self.exact.get(key).into_iter().flatten().chain(by_prefix).copied()
    }
}

fn cost(watch: &Watch) -> usize {
    WATCH_COST + watch.prefix.len()
}
