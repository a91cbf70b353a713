//! Fewer pages to copy at each fork: a warm nursery gets huge pages while its workers run and it has nothing to do.

use std::time::Duration;

use super::Nursery;
use crate::sys::collapse;

/// Between two pages, so that the workers get the CPU, and everything else comes first.
const PAUSE: Duration = Duration::from_millis(5);

/// How far it has come.
#[derive(Debug)]
pub(super) enum Compaction {
    /// Nobody was forked yet: the first attempt must not wait for it.
    Later,
    /// The places that are left.
    Now(Vec<usize>),
    Done,
}

impl Nursery {
    /// How long it may sleep, if there is something left to do.
    pub(super) fn pause_of_compaction(&self) -> Option<Duration> {
        matches!(self.compaction, Compaction::Now(_)).then_some(PAUSE)
    }

    /// A worker was forked.
    pub(super) fn begin_compaction(&mut self) {
        if matches!(self.compaction, Compaction::Later) {
            self.compaction = Compaction::Now(collapse::places());
        }
    }

    pub(super) fn step_compaction(&mut self) {
        let Compaction::Now(places) = &mut self.compaction else { return };
        match places.pop() {
            // Where there are no huge pages, or not now, the small ones do.
            Some(place) => drop(collapse::collapse(place)),
            None => self.compaction = Compaction::Done,
        }
    }
}
