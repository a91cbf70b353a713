//! The contents of the store, the waits of clients for keys, and the effect of each request on them. Pure.
//!
//! A request produces a reply to the connection that sent it, and a list of connections whose wait is over. The caller
//! has to send a `READY` byte to each connection in the list. A connection has at most one wait at a time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::Write as _;
use std::rc::Rc;

use super::wire::{Keys, MAX_MESSAGE, Pairs, Request, put_bytes, put_number};

/// Reply to a successful wait. Also the reply to a check if all keys exist.
pub(super) const READY: u8 = 0;
const MISSING: u8 = 1;
const CANCELLED: u8 = 1;

/// Maximum length of a value that append requests build up, in bytes. A value of this length still fits in one
/// reply.
pub(crate) const MAX_VALUE_STORED: usize = MAX_MESSAGE - 8;

/// Approximate memory in bytes that an entry uses in addition to its key and value.
const OVERHEAD: usize = 96;

/// ID of a connection.
pub type Id = u64;

type Key = Rc<[u8]>;

/// Reason why a request was rejected. A rejected request has no effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the value of {0:?} is not a number")]
    NotANumber(String),
    #[error("the store is full (the limit is {0} bytes)")]
    Full(usize),
    #[error("a reply of {0} bytes (the limit is {MAX_MESSAGE})")]
    Reply(usize),
    /// The new value would not fit in one reply.
    #[error("a value of {0} bytes (the limit is {MAX_VALUE_STORED})")]
    Value(usize),
}

/// Number of bytes that the clients' data uses, and the limit for them.
#[derive(Debug, Default)]
pub struct Budget {
    used: usize,
    limit: usize,
}

impl Budget {
    /// Adds to the number of bytes in use. Fails without a change if the limit would be exceeded.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<(), Refused> {
        self.check(bytes)?;
        self.used += bytes;
        Ok(())
    }

    pub(super) fn check(&self, bytes: usize) -> Result<(), Refused> {
        if bytes > self.limit - self.used { Err(Refused::Full(self.limit)) } else { Ok(()) }
    }

    pub(super) fn release(&mut self, bytes: usize) {
        self.used -= bytes;
    }

    /// Returns the number of bytes in use.
    pub fn used(&self) -> usize {
        self.used
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Keys,
    Barrier,
}

#[derive(Debug)]
struct Waiting {
    what: What,
    /// Sequence number of the wait. Later waits have higher numbers.
    ticket: u64,
    /// Keys that were missing when the wait started, without duplicates.
    keys: Vec<Key>,
    still_missing: usize,
    charged: usize,
}

type Waiters = HashMap<Key, BTreeMap<u64, Id>>;

/// The state of a store.
#[derive(Debug, Default)]
pub struct Map {
    values: HashMap<Key, Vec<u8>>,
    /// Length of the reply that lists all keys of `values` in bytes, without the count at its start.
    listed: usize,
    queues: HashMap<Key, VecDeque<Vec<u8>>>,
    waiting: HashMap<Id, Waiting>,
    /// Connections that wait for a key, longest wait first. One map for each kind of wait ([`What`]).
    waiters: [Waiters; 2],
    tickets: u64,
    budget: Budget,
}

impl Map {
    /// Creates an empty store that may use `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { budget: Budget { used: 0, limit }, ..Self::default() }
    }

    /// Returns the store's memory budget, so that the caller can charge requests and replies to the budget.
    pub fn budget(&mut self) -> &mut Budget {
        &mut self.budget
    }

    /// Executes a request of the connection `from`. Appends the reply to `reply`. Appends the connections that this
    /// request has woken to `woken`.
    ///
    /// After an error, the request has had no effect, and the caller must close the connection.
    pub fn apply(
        &mut self,
        from: Id,
        request: &Request<'_>,
        reply: &mut Vec<u8>,
        woken: &mut Vec<Id>,
    ) -> Result<(), Refused> {
        match request {
            Request::Validate => {}
            Request::Ping(nonce) => reply.extend_from_slice(&nonce.to_le_bytes()),
            Request::Set { key, value } => self.set(key, value, woken)?,
            Request::CompareSet { key, expected, desired } => self.compare_set(key, expected, desired, reply, woken)?,
            Request::Get(key) => {
                self.check_reply(8 + self.values.get(*key).map_or(0, Vec::len))?;
                put_bytes(reply, self.values.get(*key).map_or(&[], Vec::as_slice));
            }
            Request::Add { key, delta } => {
                let sum = self.add(key, *delta, woken)?;
                put_number(reply, sum);
            }
            Request::Check(keys) => {
                let has_all = keys.clone().all(|key| self.is_present(key));
                reply.push(if has_all { READY } else { MISSING });
            }
            Request::Wait(keys) => self.wait(from, keys, reply)?,
            Request::NumKeys => put_number(reply, signed(self.values.len())),
            Request::Delete(key) => put_number(reply, i64::from(self.delete(key))),
            Request::Append { key, value } => self.append(key, value, woken)?,
            Request::MultiGet(keys) => self.multi_get(keys, reply)?,
            Request::MultiSet(pairs) => self.multi_set(pairs, woken)?,
            Request::CancelWait => {
                self.stop_waiting(from);
                reply.push(CANCELLED);
            }
            Request::QueuePush { key, value } => self.push(key, value, woken)?,
            Request::QueuePop(key) => self.pop(key, reply),
            Request::QueueLen(key) => put_number(reply, signed(self.queues.get(*key).map_or(0, VecDeque::len))),
            Request::ListKeys => self.list_keys(reply)?,
            Request::Barrier { key, size } => self.barrier(from, key, *size, reply, woken)?,
        }
        Ok(())
    }

    /// Returns the waiting connections, oldest wait first. Each comes with at most `most` of its missing keys.
    pub(super) fn waiters(&self, most: usize) -> Vec<(Id, Vec<&[u8]>)> {
        let mut found: Vec<_> = self.waiting.iter().collect();
        found.sort_unstable_by_key(|(_, waiting)| waiting.ticket);
        found
            .into_iter()
            .map(|(id, waiting)| {
                let waiters = &self.waiters[waiting.what as usize];
                let is_missing = |key: &&Key| waiters.get(*key).is_some_and(|of| of.contains_key(&waiting.ticket));
                (*id, waiting.keys.iter().filter(is_missing).take(most).map(|key| &**key).collect())
            })
            .collect()
    }

    // --- values -----------------------------------------------------------------------------------------------

    fn set(&mut self, key: &[u8], value: &[u8], woken: &mut Vec<Id>) -> Result<(), Refused> {
        self.put(key, value)?;
        self.wake_all(key, woken);
        Ok(())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refused> {
        if let Some(old) = self.values.get_mut(key) {
            self.budget.charge(value.len())?;
            self.budget.release(old.len());
            *old = value.to_vec();
        } else {
            self.budget.charge(cost(key, value))?;
            self.values.insert(key.into(), value.to_vec());
            self.listed += 8 + key.len();
        }
        Ok(())
    }

    fn multi_set(&mut self, pairs: &Pairs<'_>, woken: &mut Vec<Id>) -> Result<(), Refused> {
        // Check the memory budget for all pairs before storing any of them, so that a rejected request has no effect.
        self.budget.check(pairs.clone().map(|(key, value)| cost(key, value)).sum())?;
        for (key, value) in pairs.clone() {
            self.set(key, value, woken)?;
        }
        Ok(())
    }

    fn append(&mut self, key: &[u8], value: &[u8], woken: &mut Vec<Id>) -> Result<(), Refused> {
        let Some(old) = self.values.get_mut(key) else { return self.set(key, value, woken) };
        let length = old.len() + value.len();
        if length > MAX_VALUE_STORED {
            return Err(Refused::Value(length));
        }
        self.budget.charge(value.len())?;
        if length > old.capacity() {
            // Keep the unused capacity small instead of letting `Vec` double its capacity, because unused capacity
            // takes memory that the memory limit does not count.
            old.reserve_exact(value.len().max(old.len() / 8));
        }
        old.extend_from_slice(value);
        self.wake_all(key, woken);
        Ok(())
    }

    fn compare_set(
        &mut self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        reply: &mut Vec<u8>,
        woken: &mut Vec<Id>,
    ) -> Result<(), Refused> {
        let is_to_be_set = match self.values.get(key) {
            Some(current) if current == expected => true,
            Some(_) => false,
            None => expected.is_empty(),
        };
        if is_to_be_set {
            self.check_reply(8 + desired.len())?;
            self.set(key, desired, woken)?;
            put_bytes(reply, desired);
        } else {
            // If the key does not exist, reply with the expected value, as torch's server does.
            let current = self.values.get(key).map_or(expected, Vec::as_slice);
            self.check_reply(8 + current.len())?;
            put_bytes(reply, current);
        }
        Ok(())
    }

    fn add(&mut self, key: &[u8], delta: i64, woken: &mut Vec<Id>) -> Result<i64, Refused> {
        let current = match self.values.get(key) {
            Some(value) => parse_number(value).ok_or_else(|| Refused::NotANumber(text(key)))?,
            None => 0,
        };
        let sum = current.wrapping_add(delta);
        let mut digits = [0; 20];
        let mut unused = &mut digits[..];
        write!(unused, "{sum}").expect("no i64 has more than 20 characters");
        let length = 20 - unused.len();
        self.set(key, &digits[..length], woken)?;
        Ok(sum)
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let removed = self.values.remove(key);
        if let Some(value) = &removed {
            self.budget.release(cost(key, value));
            self.listed -= 8 + key.len();
        }
        removed.is_some()
    }

    fn multi_get(&self, keys: &Keys<'_>, reply: &mut Vec<u8>) -> Result<(), Refused> {
        let found = |key: &[u8]| self.values.get(key).map_or(&[][..], Vec::as_slice);
        self.check_reply(keys.clone().map(|key| 8 + found(key).len()).sum())?;
        for key in keys.clone() {
            put_bytes(reply, found(key));
        }
        Ok(())
    }

    fn list_keys(&self, reply: &mut Vec<u8>) -> Result<(), Refused> {
        self.check_reply(8 + self.listed)?;
        reply.reserve(8 + self.listed);
        put_number(reply, signed(self.values.len()));
        for key in self.values.keys() {
            put_bytes(reply, key);
        }
        Ok(())
    }

    fn check_reply(&self, length: usize) -> Result<(), Refused> {
        if length > MAX_MESSAGE {
            return Err(Refused::Reply(length));
        }
        self.budget.check(length)
    }

    // --- queues -----------------------------------------------------------------------------------------------

    fn push(&mut self, key: &[u8], value: &[u8], woken: &mut Vec<Id>) -> Result<(), Refused> {
        self.budget.charge(cost(key, value))?;
        if let Some(queue) = self.queues.get_mut(key) {
            queue.push_back(value.to_vec());
        } else {
            self.queues.insert(key.into(), VecDeque::from([value.to_vec()]));
        }
        self.wake_one(key, woken);
        Ok(())
    }

    fn pop(&mut self, key: &[u8], reply: &mut Vec<u8>) {
        let Some(queue) = self.queues.get_mut(key) else { return put_number(reply, 0) };
        put_number(reply, signed(queue.len()));
        let value = queue.pop_front().expect("a queue that becomes empty is removed");
        if queue.is_empty() {
            self.queues.remove(key);
        }
        put_bytes(reply, &value);
        self.budget.release(cost(key, &value));
    }

    // --- waiting ----------------------------------------------------------------------------------------------

    fn is_present(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    fn wait(&mut self, from: Id, keys: &Keys<'_>, reply: &mut Vec<u8>) -> Result<(), Refused> {
        self.stop_waiting(from);
        let missing: Vec<&[u8]> = keys.clone().filter(|key| !self.is_present(key)).collect();
        if missing.is_empty() {
            reply.push(READY);
            return Ok(());
        }
        self.begin_to_wait(from, What::Keys, &missing)
    }

    fn barrier(
        &mut self,
        from: Id,
        key: &[u8],
        size: i64,
        reply: &mut Vec<u8>,
        woken: &mut Vec<Id>,
    ) -> Result<(), Refused> {
        self.stop_waiting(from);
        self.budget.check(2 * cost(key, &[0; 20]) + key.len())?;
        if self.add(key, 1, woken)? < size {
            return self.begin_to_wait(from, What::Barrier, &[key]);
        }
        reply.push(READY);
        for id in self.waiters[What::Barrier as usize].remove(key).unwrap_or_default().into_values() {
            self.end_wait(id);
            woken.push(id);
        }
        Ok(())
    }

    fn begin_to_wait(&mut self, id: Id, what: What, missing: &[&[u8]]) -> Result<(), Refused> {
        let charged = missing.iter().map(|key| cost(key, key)).sum();
        self.budget.charge(charged)?;
        self.tickets += 1;
        let ticket = self.tickets;
        let waiters = &mut self.waiters[what as usize];
        let mut keys = Vec::with_capacity(missing.len());
        for key in missing {
            let key: Key = Rc::from(*key);
            if waiters.entry(Rc::clone(&key)).or_default().insert(ticket, id).is_none() {
                keys.push(key);
            }
        }
        let still_missing = keys.len();
        self.waiting.insert(id, Waiting { what, ticket, keys, still_missing, charged });
        Ok(())
    }

    /// Updates all connections that wait for this key, because the key now exists. Adds a connection to `woken` if it
    /// waits for no other key.
    fn wake_all(&mut self, key: &[u8], woken: &mut Vec<Id>) {
        for id in self.waiters[What::Keys as usize].remove(key).unwrap_or_default().into_values() {
            if self.has_found(id) {
                woken.push(id);
            }
        }
    }

    /// Adds the connection that has waited longest for this queue to `woken`, because the queue has a new value. Skips
    /// connections that still wait for other keys.
    ///
    /// Adds only one connection, because only one client can take the value.
    fn wake_one(&mut self, key: &[u8], woken: &mut Vec<Id>) {
        while let Some(waiters) = self.waiters[What::Keys as usize].get_mut(key) {
            let Some((_, id)) = waiters.pop_first() else { break };
            if waiters.is_empty() {
                self.waiters[What::Keys as usize].remove(key);
            }
            if self.has_found(id) {
                return woken.push(id);
            }
        }
    }

    /// Records that one of the keys that a connection waits for now exists. Returns true if it was the last missing
    /// key.
    fn has_found(&mut self, id: Id) -> bool {
        let waiting = self.waiting.get_mut(&id).expect("who is among the waiters of a key waits");
        waiting.still_missing -= 1;
        let is_over = waiting.still_missing == 0;
        if is_over {
            self.end_wait(id);
        }
        is_over
    }

    /// Ends a connection's wait, and releases the memory that was charged for it.
    fn end_wait(&mut self, id: Id) {
        if let Some(waiting) = self.waiting.remove(&id) {
            self.budget.release(waiting.charged);
        }
    }

    /// Removes a connection from the wait queues, because it was closed or its client has cancelled the wait.
    pub fn stop_waiting(&mut self, id: Id) {
        let Some(waiting) = self.waiting.remove(&id) else { return };
        self.budget.release(waiting.charged);
        let waiters = &mut self.waiters[waiting.what as usize];
        for key in &waiting.keys {
            if let Some(of_key) = waiters.get_mut(key) {
                of_key.remove(&waiting.ticket);
                if of_key.is_empty() {
                    waiters.remove(key);
                }
            }
        }
    }
}

fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + OVERHEAD
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).expect("memory does not hold 2^63 entries")
}

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).chars().take(80).collect()
}

/// Parses a number as torch's server does: accepts leading whitespace and a sign, and ignores everything after
/// the digits.
fn parse_number(value: &[u8]) -> Option<i64> {
    let value = value.trim_ascii_start();
    let signs = usize::from(matches!(value.first(), Some(b'+' | b'-')));
    let digits = value[signs..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&value[..signs + digits]).ok()?.parse().ok()
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
