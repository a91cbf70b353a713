//! A second nursery, which imports the modules again while the first nursery and its workers continue.
//!
//! There are at most two nurseries with imported modules at any time.
//!
//! The second nursery has no workers. It gets the agent's connections and the deadline for killing all workers only
//! when it replaces the first nursery.

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::launch::{Import as Terms, LaunchError};
use elasticrs_nursery::protocol::{PROTOCOL, Reply};
use elasticrs_sys::exit::WorkerExit;
use elasticrs_sys::priority;

use super::images::Images;
use super::imports::{refuse, rest};
use super::launches::{LAUNCH_LIMIT, Launches, Purpose, SecondTerms};
use super::retired::Retired;
use crate::supervisor::deadlines::after;
use crate::supervisor::event::{Event, NurseryExit};
use crate::supervisor::nursery_io::{Nursery, NurseryEvent};
use crate::supervisor::queue::Queue;

/// Slot for a second nursery, which can later replace the current nursery.
#[derive(Debug)]
pub(super) struct SecondNursery {
    running: Option<Second>,
    queue: Arc<Queue>,
}

/// A running second nursery.
#[derive(Debug)]
struct Second {
    nursery: Nursery,
    terms: SecondTerms,
}

impl SecondNursery {
    pub(super) fn new(queue: Arc<Queue>) -> Self {
        Self { running: None, queue }
    }

    /// Returns the pids of the nursery and its sentinel.
    pub(super) fn pids(&self) -> impl Iterator<Item = i32> {
        let sentinel = |nursery: &Nursery| nursery.sentinel.as_ref().map(|guard| guard.sentinel.pid);
        self.running.iter().flat_map(move |second| [second.nursery.pid].into_iter().chain(sentinel(&second.nursery)))
    }

    /// Waits for the next event of the second nursery. Kills the nursery if its imports take too long.
    ///
    /// If there is no second nursery, the future never completes, so that it can be used in `select!`. Cancel-safe.
    pub(super) async fn next(&mut self) -> NurseryEvent {
        let Some(Second { nursery, terms }) = &mut self.running else { return std::future::pending().await };
        let limited = nursery.import.is_some() && !nursery.hung;
        tokio::select! {
            biased;
            event = nursery.next() => return event,
            () = tokio::time::sleep_until(terms.until.into()), if limited => {}
        }
        nursery.kill_hung();
        nursery.next().await
    }

    /// Replaces the second nursery, if any, with a new one. `limit` is the time limit for its module imports.
    pub(super) fn launch(&mut self, limit: Duration, images: &Images, retired: &mut Retired, launches: &mut Launches) {
        self.stop(retired, launches);
        if images.can_be_warm() {
            let (until, nice) = (after(Instant::now(), limit), priority::restorable());
            let import = Terms { since: None, is_background: nice.is_some() };
            let purpose = Purpose::Second(SecondTerms { until, nice, lost: None });
            launches.nursery(purpose, images.all(), import, LAUNCH_LIMIT);
        }
    }

    /// Handles the result of launching the second nursery.
    pub(super) fn launched(
        &mut self,
        terms: SecondTerms,
        result: Result<Nursery, LaunchError>,
        images: &mut Images,
        retired: &mut Retired,
    ) {
        match result {
            Ok(nursery) if nursery.import.is_some() => return self.running = Some(Second { nursery, terms }),
            // Stop the nursery, because a second nursery is useful only if it imports modules and this one does not.
            Ok(nursery) => retired.add_nursery(nursery),
            Err(_) => {}
        }
        self.report_failure(terms.lost.unwrap_or(NurseryExit { exit: WorkerExit::Unknown, hung: false }), images);
    }

    /// Stops the second nursery, if there is one.
    pub(super) fn stop(&mut self, retired: &mut Retired, launches: &mut Launches) {
        launches.cancel(Purpose::is_second);
        if let Some(second) = self.running.take() {
            retired.add_nursery(second.nursery);
        }
    }

    /// Removes and returns the second nursery, so that it can take over from the first. `None` if its imports are not
    /// complete, or if it cannot take over.
    pub(super) fn take_over(&mut self, fence: &Fence, retired: &mut Retired) -> Option<Nursery> {
        let Second { nursery, terms } = self.running.take_if(|second| second.nursery.import.is_none())?;
        // If the nice value of this nursery cannot be restored, stop the nursery, because its workers would inherit the
        // low priority.
        if terms.nice.is_some_and(|nice| priority::set_nice_of(nursery.pid, nice).is_err()) {
            retired.add_nursery(nursery);
            return None;
        }
        // From now on, only the new nursery enforces the deadline for killing all workers, although the old nursery may
        // still run briefly.
        if !fence.hand_over() {
            self.running = Some(Second { nursery, terms: SecondTerms { nice: None, ..terms } });
            return None;
        }
        Some(nursery)
    }

    /// Handles an event of the nursery.
    pub(super) fn on_event(
        &mut self,
        event: &NurseryEvent,
        images: &mut Images,
        retired: &mut Retired,
        launches: &mut Launches,
    ) {
        let Some(Second { nursery, .. }) = &mut self.running else { return };
        match event {
            NurseryEvent::Reply(Reply::Ready { protocol: PROTOCOL, .. }, _) => {
                nursery.import = None;
                self.queue.push(Event::Warmed { failure: None, is_beside: true });
            }
            NurseryEvent::Reply(Reply::Ready { .. }, _) => refuse(nursery),
            // Ignore all other replies, because this nursery has no workers and holds no connections.
            NurseryEvent::Reply(..) => {}
            NurseryEvent::Died(exit) => self.on_lost(*exit, images, retired, launches),
            NurseryEvent::GivenUp => {
                self.queue.degraded(nursery.left_behind());
                self.on_lost(WorkerExit::Unknown, images, retired, launches);
            }
        }
    }

    fn on_lost(&mut self, exit: WorkerExit, images: &mut Images, retired: &mut Retired, launches: &mut Launches) {
        let Some(Second { nursery, terms }) = self.running.take() else { return };
        let exit = NurseryExit { exit, hung: nursery.hung };
        let Nursery { import, sentinel, .. } = nursery;
        if let Some(import) = import {
            if let Some(import) = rest(import, sentinel, exit, terms.nice.is_some(), retired) {
                let purpose = Purpose::Second(SecondTerms { lost: Some(exit), ..terms });
                return launches.nursery(purpose, images.all(), import, LAUNCH_LIMIT);
            }
        } else if let Some(guard) = sentinel {
            retired.add_sentinel(*guard.sentinel);
        }
        self.report_failure(exit, images);
    }

    /// Reports that the second nursery has failed, and stops using nurseries that import modules.
    fn report_failure(&self, exit: NurseryExit, images: &mut Images) {
        images.forget_warm();
        self.queue.push(Event::Warmed { failure: Some(exit), is_beside: true });
    }
}
