//! Handles the module imports of a warm nursery, and a group that waits for them.

use std::time::{Duration, Instant};

use elasticrs_nursery::launch::{Import as Terms, NurseryImage};
use elasticrs_nursery::report::{self, End};
use elasticrs_sys::stage::Stage;

use super::{CLOSE_LIMIT, Current, Guard, Import, Nursery, Task};
use crate::spec::GroupSpec;
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::{Event, NurseryEnd, StartFailure};

/// Time after which the user is notified that workers are waiting for an import.
const SLOW_IMPORT: Duration = Duration::from_secs(5);

impl Task {
    pub(super) fn is_warming(&self) -> bool {
        self.nursery.as_ref().is_some_and(|nursery| nursery.import.is_some())
    }

    pub(super) fn may_be_warm(&self) -> bool {
        self.config.nursery.iter().any(|image| matches!(image, NurseryImage::Warm(_)))
    }

    /// Removes the warm programs from the configuration, so that every later nursery is cold.
    pub(super) fn forget_warm(&mut self) {
        self.config.nursery.retain(|image| !matches!(image, NurseryImage::Warm(_)));
    }

    /// Returns the programs for the nursery that starts this group. If the group has no warm workers, the nursery is
    /// cold, so that the group does not wait for imports.
    pub(super) fn images_for(&self, spec: &GroupSpec) -> Vec<NurseryImage> {
        let is_warm = spec.processes.iter().any(|process| process.warm);
        let fits = |image: &&NurseryImage| is_warm || !matches!(image, NurseryImage::Warm(_));
        self.config.nursery.iter().filter(fits).cloned().collect()
    }

    /// Stops a nursery that is no longer needed. This happens in the background, but closing the supervisor waits for
    /// it.
    pub(super) fn retire(&mut self, nursery: Nursery) {
        self.retire_by(async { _ = nursery.end(false, CLOSE_LIMIT).await });
    }

    pub(super) fn retire_by(&mut self, end: impl Future<Output = ()> + 'static) {
        while self.retired.try_join_next().is_some() {}
        self.retired.spawn_local(end);
    }

    /// Sets the deadlines for the imports. Called again when a group starts to wait for the imports, because the end of
    /// the previous group has cleared all deadlines.
    pub(super) fn arm_import(&mut self) {
        if let Some(import) = self.nursery.as_ref().and_then(|nursery| nursery.import.as_ref()) {
            // Keep an earlier deadline, because the time limit applies to the imports as a whole. They may take several
            // nurseries: if a module kills the nursery, another nursery imports the remaining modules.
            self.deadlines.hasten(Timer::Warm, import.warm.limit, Instant::now());
            self.deadlines.hasten(Timer::SlowImport, SLOW_IMPORT, Instant::now());
        }
    }

    fn disarm_import(&mut self) {
        self.deadlines.disarm(Timer::Warm);
        self.deadlines.disarm(Timer::SlowImport);
    }

    pub(super) fn on_slow_import(&mut self) {
        let Some(import) = self.nursery.as_ref().and_then(|nursery| nursery.import.as_ref()) else { return };
        let module = report::importing(&import.warm.report, import.since);
        let message = format!(
            "warm: {} is still being imported after {} s; the workers wait for it for at most {} s (--warm-timeout)",
            module.as_deref().unwrap_or("the first module"),
            SLOW_IMPORT.as_secs(),
            import.warm.limit.as_secs_f64(),
        );
        self.shared.queue.push(Event::Degraded { message });
    }

    pub(super) fn await_import(&mut self, spec: GroupSpec) {
        self.waits_for_import = Some(spec);
        self.deadlines.disarm(Timer::Warm);
        self.arm_import();
    }

    pub(super) fn on_ready(&mut self) {
        if self.nursery.as_mut().and_then(|nursery| nursery.import.take()).is_some() {
            self.disarm_import();
            self.shared.queue.push(Event::Warmed { failure: None, is_beside: false });
            self.start_what_waits();
        }
    }

    /// Kills a nursery that uses another version of the protocol. The job then continues as if an import had failed.
    pub(super) fn on_other_build(&mut self) {
        if let Some(nursery) = &mut self.nursery {
            refuse(nursery);
        }
    }

    pub(super) fn on_hung_import(&mut self) {
        if let Some(nursery) = self.nursery.as_mut().filter(|nursery| nursery.import.is_some()) {
            nursery.kill_hung();
        }
    }

    /// Handles the death of a nursery during its imports. Returns false if no other nursery could be launched while a
    /// group is being started.
    pub(super) fn on_lost_import(&mut self, import: Import, sentinel: Option<Guard>, end: NurseryEnd) -> bool {
        if let Some(nursery) = self.import_rest(import, sentinel, end, false) {
            self.use_nursery(nursery);
            return true;
        }
        self.go_on_cold(end)
    }

    /// Cleans up the processes of a nursery that died during its imports. If a module killed the nursery, starts
    /// another nursery for the remaining modules. Returns `None` if no nursery was started.
    pub(super) fn import_rest(
        &mut self,
        import: Import,
        sentinel: Option<Guard>,
        end: NurseryEnd,
        is_background: bool,
    ) -> Option<Nursery> {
        let Import { warm, since, end: how, is_unguarded } = import;
        if let Some(Guard { sentinel, .. }) = sentinel {
            self.retire_by(sentinel.end_what_it_guards(CLOSE_LIMIT));
        }
        if is_unguarded {
            report::fail(&warm.report, "the process that guards the import was lost");
        } else if !end.hung
            && report::blame(&warm.report, since, how.unwrap_or(End::Exit(end.exit)))
            && let Ok(nursery) =
                Nursery::launch_again(&self.config.nursery, &Terms { since: Some(since), is_background })
        {
            if nursery.import.is_some() {
                return Some(nursery);
            }
            self.retire(nursery);
        }
        None
    }

    /// Replaces the warm nursery with a cold one for the rest of the job. Returns false if the cold one could not be
    /// launched while a group is being started.
    fn go_on_cold(&mut self, end: NurseryEnd) -> bool {
        self.disarm_import();
        self.forget_warm();
        self.shared.queue.push(Event::Warmed { failure: Some(end), is_beside: false });
        if let Ok(nursery) = Nursery::launch(&self.config.nursery) {
            self.use_nursery(nursery);
            self.start_what_waits();
            true
        } else {
            // Do not report this error, because the next start tries again and reports its own error.
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

/// Kills a nursery that uses another version of the protocol. It must be a warm nursery: its program is an installed
/// file that may have been replaced since this process started. An embedded nursery is part of this program.
pub(super) fn refuse(nursery: &mut Nursery) {
    if let Some(import) = &nursery.import {
        report::fail(
            &import.warm.report,
            "another build of elasticrs was installed while this job was running; start the job again to use --warm",
        );
    }
    nursery.kill();
}
