//! State that a session needs to continue on a new connection: its unanswered requests, and the keys that its watches
//! have already reported. Pure.
//!
//! - **ASKED-1** every request is answered once, in the order in which the requests were made. A request may be
//!   *executed* twice, because a request without an answer is sent again after the connection breaks;
//! - **ASKED-2** a watch reports each change once and in order. After a reconnect, it reports the differences from the
//!   state that it last reported ([`crate::session::watched`]). A reply is reported only after all changes up to its
//!   revision.

use std::collections::{BTreeMap, VecDeque};

use super::protocol::encode_request;
use super::wire::Malformed;
use crate::session::client::Request;
use crate::session::watched::{ChangeSet, Watched};
use crate::types::{Entry, OpResult, Watch};

#[derive(Debug)]
struct Asked {
    request: Request,
    /// True if this request starts a watch that the user stopped before the store answered.
    is_over: bool,
}

/// Effect of a reply from the store: an event for the user, or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AnswerEffect {
    Nothing,
    Reply(Vec<OpResult>),
    Changes(ChangeSet),
}

#[derive(Debug, Default)]
pub(super) struct Unanswered {
    asked: VecDeque<Asked>,
    watches: BTreeMap<Watch, Watched>,
    /// Restored watches that the store has not answered yet. The store answers them before all other requests on this
    /// connection, each with the current entries.
    again: VecDeque<Watch>,
}

impl Unanswered {
    /// Records a request that is about to be sent.
    pub(super) fn ask(&mut self, request: Request) {
        if let Request::Unwatch(ended) = &request {
            self.watches.remove(ended);
            for asked in &mut self.asked {
                asked.is_over |= matches!(&asked.request, Request::Watch { watch, .. } if watch == ended);
            }
        }
        self.asked.push_back(Asked { request, is_over: false });
        self.forget_ends();
    }

    /// Returns the frames to send first on a new connection: the restored watches and the unanswered requests.
    pub(super) fn ask_again(&mut self) -> Vec<u8> {
        self.again = self.watches.keys().cloned().collect();
        let watches = self.again.iter().map(|watch| Request::Watch { tag: 0, watch: watch.clone(), snapshot: true });
        let mut frames: Vec<u8> = watches.flat_map(|watch| encode_request(&watch, true)).collect();
        frames.extend(self.asked.iter().flat_map(|asked| encode_request(&asked.request, true)));
        frames
    }

    /// Updates the state of each watch for changes that are about to be reported to the caller.
    pub(super) fn note(&mut self, set: &ChangeSet) {
        for watched in self.watches.values_mut() {
            set.changes.iter().for_each(|change| watched.note(change));
            watched.next = set.revision + 1;
        }
    }

    pub(super) fn reply(&mut self, revision: u64, results: Vec<OpResult>) -> Result<AnswerEffect, Malformed> {
        if let Some(watch) = self.again.pop_front() {
            return self.catch_up(&watch, revision, results);
        }
        let Some(Asked { request, is_over }) = self.asked.pop_front() else {
            return Err(Malformed("an answer to nothing"));
        };
        let results = match request {
            Request::Watch { watch, snapshot, .. } => {
                if !is_over {
                    let there = results.iter().filter_map(entry_of);
                    self.watches.insert(watch.clone(), Watched::new(watch, revision, there));
                }
                if snapshot { results } else { Vec::new() }
            }
            Request::Txn { .. } | Request::Unwatch(_) => results,
        };
        self.forget_ends();
        Ok(AnswerEffect::Reply(results))
    }

    /// Removes requests to stop watches from the front of the queue of unanswered requests, because the store does not
    /// answer them. On a new connection, they need not be sent again, because stopped watches are not restored there. A
    /// stop request behind another request stays in the queue, because that request may start the same watch.
    fn forget_ends(&mut self) {
        while self.asked.front().is_some_and(|asked| matches!(asked.request, Request::Unwatch(_))) {
            self.asked.pop_front();
        }
    }

    fn catch_up(&mut self, watch: &Watch, revision: u64, results: Vec<OpResult>) -> Result<AnswerEffect, Malformed> {
        // Ignore the answer if the watch was stopped in the meantime.
        let Some(watched) = self.watches.get_mut(watch) else { return Ok(AnswerEffect::Nothing) };
        let there = results.into_iter().map(|result| match result {
            OpResult::Entry(Some(entry)) => Ok(entry),
            _ => Err(Malformed("a watch without what is there")),
        });
        let there: Vec<Entry> = there.collect::<Result<_, _>>()?;
        let Some(set) = watched.catch_up(revision, there) else { return Ok(AnswerEffect::Nothing) };
        self.note(&set);
        Ok(AnswerEffect::Changes(set))
    }
}

fn entry_of(result: &OpResult) -> Option<&Entry> {
    match result {
        OpResult::Entry(entry) => entry.as_ref(),
        OpResult::Count(_) | OpResult::Entries(_) => None,
    }
}

#[cfg(test)]
mod tests;
