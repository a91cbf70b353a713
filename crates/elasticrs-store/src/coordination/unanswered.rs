//! What a session needs to go on over another connection: what was asked and not answered, and what its watches were told. Pure.
//!
//! - **ASKED-1** every request is answered once, in the order in which they were made. It may be *carried out* twice: what was
//!   not answered when the connection broke is asked again;
//! - **ASKED-2** a watch is told of each change once and in order, and after a break of what differs from what it was told
//!   ([`crate::watched`]); before the reply of a revision all that the watches have to tell up to it.

use std::collections::{BTreeMap, VecDeque};

use super::protocol::{Request, WatchFrom};
use super::types::{Entry, OpResult, Watch};
use super::wire::Malformed;
use crate::watched::{Told, Watched};

/// What kind of request it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    /// It is answered, and nothing else is known of it.
    Plain,
    /// A watch; its user wants to know what is there.
    Watch { watch: Watch, wants_snapshot: bool },
    /// The end of a watch, which is not answered; it is not taken up again.
    Unwatch(Watch),
}

#[derive(Debug)]
struct Asked {
    kind: Kind,
    frame: Vec<u8>,
    /// A watch that was ended before it was answered.
    is_over: bool,
}

/// What the user is to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    Reply(Vec<OpResult>),
    Changes(Told),
}

#[derive(Debug, Default)]
pub(super) struct Unanswered {
    asked: VecDeque<Asked>,
    watches: BTreeMap<Watch, Watched>,
    /// Watches that were asked for again on this connection, and are told first of all what is there.
    again: VecDeque<Watch>,
}

impl Unanswered {
    /// A request is made.
    pub(super) fn ask(&mut self, kind: Kind, frame: Vec<u8>) {
        if let Kind::Unwatch(ended) = &kind {
            self.watches.remove(ended);
            for asked in &mut self.asked {
                asked.is_over |= matches!(&asked.kind, Kind::Watch { watch, .. } if watch == ended);
            }
        }
        self.asked.push_back(Asked { kind, frame, is_over: false });
        self.forget_ends();
    }

    /// What is sent first on a new connection.
    pub(super) fn ask_again(&mut self) -> Vec<u8> {
        self.again = self.watches.keys().cloned().collect();
        let watches = self.again.iter().map(|watch| {
            let watch = WatchFrom { watch: watch.clone(), snapshot: true, from_revision: None };
            Request::Watch { tag: 0, watch }.encode()
        });
        let mut frames: Vec<u8> = watches.flatten().collect();
        frames.extend(self.asked.iter().flat_map(|asked| &asked.frame));
        frames
    }

    pub(super) fn changes(&mut self, told: Told) -> Heard {
        for watched in self.watches.values_mut() {
            told.changes.iter().for_each(|change| watched.note(change));
            watched.next = told.revision + 1;
        }
        Heard::Changes(told)
    }

    pub(super) fn reply(&mut self, ok: bool, revision: u64, results: Vec<OpResult>) -> Result<Heard, Malformed> {
        if let Some(watch) = self.again.pop_front() {
            return self.catch_up(&watch, revision, results);
        }
        let Some(Asked { kind, is_over, .. }) = self.asked.pop_front() else {
            return Err(Malformed("an answer to nothing"));
        };
        let results = match kind {
            Kind::Watch { watch, wants_snapshot } if ok => {
                if !is_over {
                    let there = results.iter().filter_map(entry_of);
                    self.watches.insert(watch.clone(), Watched::new(watch, revision, there));
                }
                if wants_snapshot { results } else { Vec::new() }
            }
            Kind::Plain | Kind::Watch { .. } | Kind::Unwatch(_) => results,
        };
        self.forget_ends();
        Ok(Heard::Reply(results))
    }

    /// The end of a watch is asked for again only behind a request that may begin it.
    fn forget_ends(&mut self) {
        while self.asked.front().is_some_and(|asked| matches!(asked.kind, Kind::Unwatch(_))) {
            self.asked.pop_front();
        }
    }

    fn catch_up(&mut self, watch: &Watch, revision: u64, results: Vec<OpResult>) -> Result<Heard, Malformed> {
        // It has ended meanwhile.
        let Some(watched) = self.watches.get_mut(watch) else { return Ok(Heard::Nothing) };
        let there = results.into_iter().map(|result| match result {
            OpResult::Entry(Some(entry)) => Ok(entry),
            _ => Err(Malformed("a watch without what is there")),
        });
        let there: Vec<Entry> = there.collect::<Result<_, _>>()?;
        Ok(watched.catch_up(revision, there).map_or(Heard::Nothing, |told| self.changes(told)))
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
