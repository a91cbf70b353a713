//! A second warm nursery. It imports modules again while the first nursery and its workers continue.
//!
//! There are at most two warm nurseries at any time. The second one has no workers, so it does not get the agent's
//! connections and the fence until it takes over.

use std::time::{Duration, Instant};

use elasticrs_nursery::launch::Import as Terms;
use elasticrs_nursery::protocol::{PROTOCOL, Reply};
use elasticrs_sys::exit::WorkerExit;
use elasticrs_sys::priority;

use super::{CLOSE_LIMIT, Current, Task, loss, warm};
use crate::supervisor::deadlines::after;
use crate::supervisor::event::{Event, NurseryEnd};
use crate::supervisor::nursery_io::{FromNursery, Nursery};

/// The second nursery and its import deadline.
pub(super) struct Beside {
    nursery: Nursery,
    /// Deadline for the imports.
    until: Instant,
    /// Nice value to restore when the nursery takes over. `None` if the nursery runs at normal priority.
    nice: Option<i32>,
}

impl Beside {
    /// Returns the next event from the nursery. Kills the nursery if its imports exceed their deadline. Cancel-safe.
    pub(super) async fn next(&mut self) -> FromNursery {
        let limited = self.nursery.import.is_some() && !self.nursery.hung;
        tokio::select! {
            biased;
            from = self.nursery.next() => return from,
            () = tokio::time::sleep_until(self.until.into()), if limited => {}
        }
        self.nursery.kill_hung();
        self.nursery.next().await
    }

    /// Returns the pids of the second nursery and its sentinel.
    pub(super) fn pids(&self) -> impl Iterator<Item = i32> {
        [self.nursery.pid].into_iter().chain(self.nursery.sentinel.as_ref().map(|guard| guard.sentinel.pid))
    }
}

impl Task {
    pub(super) fn import_beside(&mut self, limit: Duration) {
        self.end_beside();
        if !self.may_be_warm() {
            return;
        }
        let nice = priority::restorable();
        let terms = Terms { since: None, is_background: nice.is_some() };
        match Nursery::launch_again(&self.config.nursery, &terms) {
            Ok(nursery) if nursery.import.is_some() => {
                self.beside = Some(Beside { nursery, until: after(Instant::now(), limit), nice });
            }
            // The warm program could not be executed. The nursery that was launched instead is a cold one, which is not
            // needed.
            Ok(nursery) => {
                self.retire(nursery);
                self.beside_has_failed(NurseryEnd { exit: WorkerExit::Unknown, hung: false });
            }
            Err(_) => self.beside_has_failed(NurseryEnd { exit: WorkerExit::Unknown, hung: false }),
        }
    }

    /// Stops the second nursery, if there is one.
    pub(super) fn end_beside(&mut self) {
        if let Some(beside) = self.beside.take() {
            self.retire(beside.nursery);
        }
    }

    pub(super) fn take_over(&mut self) -> bool {
        if !matches!(self.current, Current::Idle) {
            return false;
        }
        let Some(beside) = self.beside.take_if(|beside| beside.nursery.import.is_none()) else { return false };
        // If the nice value of this nursery cannot be restored, stop the nursery. Its workers would otherwise inherit
        // the low priority.
        if beside.nice.is_some_and(|nice| priority::set_nice_of(beside.nursery.pid, nice).is_err()) {
            self.retire(beside.nursery);
            return false;
        }
        // From here on, only the second nursery enforces the fence deadline, although the first one may still run
        // briefly.
        if !self.shared.fence.hand_over() {
            self.beside = Some(Beside { nice: None, ..beside });
            return false;
        }
        if let Some(first) = self.nursery.take() {
            self.retire(first);
        }
        self.use_nursery(beside.nursery);
        true
    }

    pub(super) fn on_beside(&mut self, from: &FromNursery) {
        let Some(beside) = &mut self.beside else { return };
        match from {
            FromNursery::Reply(Reply::Ready { protocol: PROTOCOL, .. }, _) => {
                beside.nursery.import = None;
                self.shared.queue.push(Event::Warmed { failure: None, is_beside: true });
            }
            FromNursery::Reply(Reply::Ready { .. }, _) => warm::refuse(&mut beside.nursery),
            // Ignore all other replies, because this nursery has no workers and holds no connections.
            FromNursery::Reply(..) => {}
            FromNursery::Died(exit) => self.on_lost_beside(*exit),
            FromNursery::GivenUp => {
                let message = loss::left_behind(beside.nursery.pid);
                self.shared.queue.push(Event::Degraded { message });
                self.on_lost_beside(WorkerExit::Unknown);
            }
        }
    }

    fn on_lost_beside(&mut self, exit: WorkerExit) {
        let Some(Beside { nursery, until, nice }) = self.beside.take() else { return };
        let end = NurseryEnd { exit, hung: nursery.hung };
        let Nursery { import, sentinel, .. } = nursery;
        if let Some(import) = import {
            if let Some(nursery) = self.import_rest(import, sentinel, end, nice.is_some()) {
                self.beside = Some(Beside { nursery, until, nice });
                return;
            }
        } else if let Some(guard) = sentinel {
            self.retire_by(guard.sentinel.end_what_it_guards(CLOSE_LIMIT));
        }
        self.beside_has_failed(end);
    }

    fn beside_has_failed(&mut self, end: NurseryEnd) {
        self.forget_warm();
        self.shared.queue.push(Event::Warmed { failure: Some(end), is_beside: true });
    }
}
