//! Moves the memory of a warm nursery to huge pages while its workers run and the nursery is idle. Later forks then
//! have fewer page table entries to copy.

use std::time::Duration;

use elasticrs_sys::resources;

use super::NurseryServer;

/// Pause after moving memory to a huge page. It leaves CPU time for the workers, and lets the nursery process handle
/// events.
const PAUSE: Duration = Duration::from_millis(5);

/// Progress of moving the nursery's memory to huge pages.
#[derive(Debug)]
pub(super) enum Compaction {
    /// The compaction has not started. It starts after the first fork, because it would otherwise delay that fork.
    Later,
    /// The memory is being moved to huge pages. The field contains the addresses that have not been moved yet.
    Now(Vec<usize>),
    Done,
}

impl NurseryServer {
    /// Returns how long the nursery process may sleep before it moves more memory to huge pages. `None` if no memory is
    /// being moved.
    pub(super) fn pause_of_compaction(&self) -> Option<Duration> {
        matches!(self.compaction, Compaction::Now(_)).then_some(PAUSE)
    }

    /// Starts moving the nursery's memory to huge pages. Only the first call has an effect. The first call is made
    /// after the first fork, because the move would delay that fork.
    pub(super) fn begin_compaction(&mut self) {
        if matches!(self.compaction, Compaction::Later) {
            self.compaction = Compaction::Now(resources::huge_page_places());
        }
    }

    pub(super) fn step_compaction(&mut self) {
        let Compaction::Now(places) = &mut self.compaction else { return };
        match places.pop() {
            // Ignore errors: if huge pages are unsupported or currently unavailable, the memory stays in small pages.
            Some(place) => drop(resources::collapse(place)),
            None => self.compaction = Compaction::Done,
        }
    }
}
