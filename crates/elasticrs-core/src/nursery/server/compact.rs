//! Moves the memory of a warm nursery to huge pages while its workers run and it has nothing else to do. Each fork then
//! has fewer pages to copy.

use std::time::Duration;

use super::Nursery;
use crate::sys::collapse;

/// Pause between two pages. It leaves the CPU to the workers and lets the nursery handle events first.
const PAUSE: Duration = Duration::from_millis(5);

/// Progress of the compaction.
#[derive(Debug)]
pub(super) enum Compaction {
    /// No worker was forked yet, and compaction must not delay the first one.
    Later,
    /// Addresses that are still to be compacted.
    Now(Vec<usize>),
    Done,
}

impl Nursery {
    /// Returns the time for which the nursery may sleep before it compacts the next page. `None` if no compaction is in
    /// progress.
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
            // Ignore errors, because small pages work as well if huge pages are unsupported or not available now.
            Some(place) => drop(collapse::collapse(place)),
            None => self.compaction = Compaction::Done,
        }
    }
}
