//! The current nursery, and the token that identifies the processes that it leaves behind.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::report;
use elasticrs_nursery::token::Token;

use crate::supervisor::deadlines::{Deadlines, Timer};
use crate::supervisor::nursery_io::{Import, Nursery, NurseryEvent};

/// Time after which the user is notified that workers are waiting for an import.
const SLOW_IMPORT: Duration = Duration::from_secs(5);

/// The nursery that starts the workers. If it is lost, there is no nursery until the next group starts.
#[derive(Debug)]
pub(super) struct CurrentNursery {
    nursery: Option<Nursery>,
    /// Token of the last nursery, used to find the processes that the nursery left behind. `None` until the first
    /// nursery has been launched.
    token: Option<Token>,
    /// Pid of the nursery, for readers on other threads. Zero if there is no nursery.
    pid: Arc<AtomicI32>,
}

impl CurrentNursery {
    pub(super) fn new(pid: Arc<AtomicI32>) -> Self {
        Self { token: None, nursery: None, pid }
    }

    /// Switches to another nursery. Returns the previous nursery if it still exists.
    pub(super) fn replace(&mut self, nursery: Nursery) -> Option<Nursery> {
        self.pid.store(nursery.pid, Ordering::Relaxed);
        self.token = Some(nursery.token);
        self.nursery.replace(nursery)
    }

    /// Removes the nursery, because it was lost or is being closed.
    pub(super) fn take(&mut self) -> Option<Nursery> {
        self.pid.store(0, Ordering::Relaxed);
        self.nursery.take()
    }

    pub(super) fn token(&self) -> Option<Token> {
        self.token
    }

    pub(super) fn exists(&self) -> bool {
        self.nursery.is_some()
    }

    pub(super) fn pid(&self) -> Option<i32> {
        self.nursery.as_ref().map(|nursery| nursery.pid)
    }

    pub(super) fn get(&mut self) -> Option<&mut Nursery> {
        self.nursery.as_mut()
    }

    /// Sends a request. Does nothing if there is no nursery.
    pub(super) fn send(&mut self, request: &Request, fds: Vec<OwnedFd>) {
        if let Some(nursery) = &mut self.nursery {
            nursery.send(request, fds);
        }
    }

    /// Waits for the next event from the nursery and returns it. Never returns if there is no nursery. Cancel-safe.
    pub(super) async fn next(&mut self) -> NurseryEvent {
        match &mut self.nursery {
            Some(nursery) => nursery.next().await,
            None => std::future::pending().await,
        }
    }

    /// Returns true while the nursery imports modules.
    pub(super) fn is_warming(&self) -> bool {
        self.import().is_some()
    }

    fn import(&self) -> Option<&Import> {
        self.nursery.as_ref()?.import.as_ref()
    }

    /// Records that the imports are complete. Returns false if the nursery was not importing modules.
    pub(super) fn finish_import(&mut self, deadlines: &mut Deadlines) -> bool {
        let was_warming = self.nursery.as_mut().and_then(|nursery| nursery.import.take()).is_some();
        if was_warming {
            disarm_import(deadlines);
        }
        was_warming
    }

    /// Sets the deadlines for the imports. Called again when a group starts to wait for the imports, because all
    /// deadlines were cleared at the end of the previous group.
    pub(super) fn arm_import(&self, deadlines: &mut Deadlines) {
        if let Some(import) = self.import() {
            // Do not postpone a deadline that is already set, because all imports share one time limit. If an import
            // kills the nursery, its replacement imports the remaining modules within the same limit.
            deadlines.hasten(Timer::Warm, import.warm.limit, Instant::now());
            deadlines.hasten(Timer::SlowImport, SLOW_IMPORT, Instant::now());
        }
    }

    /// Kills a nursery that has exceeded the time limit of its imports.
    pub(super) fn kill_hung_import(&mut self) {
        if let Some(nursery) = self.nursery.as_mut().filter(|nursery| nursery.import.is_some()) {
            nursery.kill_hung();
        }
    }

    /// Returns a message about the module that is still being imported. `None` if no imports are in progress.
    pub(super) fn slow_import(&self) -> Option<String> {
        let import = self.import()?;
        let module = report::importing(&import.warm.report, import.since);
        Some(format!(
            "warm: {} is still being imported after {} s; the workers wait for it for at most {} s (--warm-timeout)",
            module.as_deref().unwrap_or("the first module"),
            SLOW_IMPORT.as_secs(),
            import.warm.limit.as_secs_f64(),
        ))
    }
}

/// Cancels the deadlines for the nursery's module imports.
pub(super) fn disarm_import(deadlines: &mut Deadlines) {
    deadlines.disarm(Timer::Warm);
    deadlines.disarm(Timer::SlowImport);
}
