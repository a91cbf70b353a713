//! The time in which a warm nursery imports, and what is to start after it.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{CLOSE_LIMIT, Current, Nursery, Task};
use crate::nursery::launch::NurseryImage;
use crate::spec::GroupSpec;
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::{Event, NurseryEnd, StartFailure};
use crate::supervisor::watch;
use crate::sys::stage::Stage;

impl Task {
    pub(super) fn is_warming(&self) -> bool {
        self.nursery.as_ref().is_some_and(|nursery| nursery.warming.is_some())
    }

    pub(super) fn renew_nursery(&mut self) {
        let may_be_warm = self.config.nursery.iter().any(|image| matches!(image, NurseryImage::Warm(_)));
        if !matches!(self.current, Current::Idle) || !may_be_warm {
            return;
        }
        if let Some(old) = self.nursery.take() {
            self.tasks.spawn_local(async move {
                old.end(false, CLOSE_LIMIT).await;
            });
        }
        self.shared.nursery_pid.store(0, Ordering::Relaxed);
        // An error is that of the next start, which tries again.
        if let Ok(nursery) = Nursery::launch(&self.config.nursery) {
            self.use_nursery(nursery);
        }
    }

    /// At the end of a group all deadlines go: this one begins anew with what waits for it.
    pub(super) fn arm_import(&mut self) {
        if let Some(warm) = self.nursery.as_ref().and_then(|nursery| nursery.warming.as_ref()) {
            self.deadlines.arm(Timer::Warm, warm.limit, Instant::now());
        }
    }

    pub(super) fn await_import(&mut self, spec: GroupSpec) {
        self.waits_for_import = Some(spec);
        self.arm_import();
    }

    pub(super) fn on_ready(&mut self) {
        if self.nursery.as_mut().and_then(|nursery| nursery.warming.take()).is_some() {
            self.deadlines.disarm(Timer::Warm);
            self.shared.queue.push(Event::Warmed { failure: None });
            self.start_what_waits();
        }
    }

    pub(super) fn on_hung_import(&mut self) {
        if let Some(nursery) = self.nursery.as_mut().filter(|nursery| nursery.warming.is_some()) {
            nursery.kill_hung();
        }
    }

    /// The nursery has ended while it imported: from now on workers start cold. Says whether this was all: no worker was
    /// lost with it.
    pub(super) fn go_on_cold(&mut self, end: NurseryEnd) -> bool {
        self.deadlines.disarm(Timer::Warm);
        self.tasks.spawn_local(watch::sweep_after_import(self.token));
        self.config.nursery.retain(|image| !matches!(image, NurseryImage::Warm(_)));
        self.shared.queue.push(Event::Warmed { failure: Some(end) });
        if let Ok(nursery) = Nursery::launch(&self.config.nursery) {
            self.use_nursery(nursery);
            self.start_what_waits();
            true
        } else {
            // The next start tries again, and fails with its error.
            self.waits_for_import = None;
            matches!(self.current, Current::Idle)
        }
    }

    fn start_what_waits(&mut self) {
        let Some(spec) = self.waits_for_import.take() else { return };
        if let (Err(error), Current::Starting(starting)) = (self.request_start(&spec), &mut self.current) {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            let (stage, subject) = (Stage::Receive, String::new());
            for local_rank in (0..).take(spec.processes.len()) {
                starting.failed(StartFailure::Worker { local_rank, stage, errno, subject: subject.clone() });
            }
            self.start_when_answered();
        }
    }
}
