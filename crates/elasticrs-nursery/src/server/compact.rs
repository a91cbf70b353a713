//! Moves the memory of a warm nursery to huge pages while its workers run and the nursery is idle. Later forks then
//! have fewer page table entries to copy.

use std::time::Duration;

use elasticrs_sys::collapse;

use super::Nursery;

/// Pause between two pages, which leaves CPU time for the workers and lets the nursery handle events.
const PAUSE: Duration = Duration::from_millis(5);

/// Progress of moving the nursery's memory to huge pages.
#[derive(Debug)]
pub(super) enum Compaction {
    /// The compaction has not started. It starts after the first fork, because it would otherwise delay that fork.
    Later,
    /// The compaction is in progress. Contains the addresses of the pages that are not compacted yet.
    Now(Vec<usize>),
    Done,
}

impl Nursery {
    /// Returns how long the nursery may sleep before it compacts the next page. `None` if no compaction is in progress.
    pub(super) fn pause_of_compaction(&self) -> Option<Duration> {
        matches!(self.compaction, Compaction::Now(_)).then_some(PAUSE)
    }

    /// Starts the compaction, unless it has already started. Called after forking a worker.
    pub(super) fn begin_compaction(&mut self) {
        if matches!(self.compaction, Compaction::Later) {
            self.compaction = Compaction::Now(collapse::places());
        }
    }

    pub(super) fn step_compaction(&mut self) {
        let Compaction::Now(places) = &mut self.compaction else { return };
        match places.pop() {
            // Ignore errors: if huge pages are unsupported or currently unavailable, the memory stays in small pages.
            Some(place) => drop(collapse::collapse(place)),
            None => self.compaction = Compaction::Done,
        }
    }
}
