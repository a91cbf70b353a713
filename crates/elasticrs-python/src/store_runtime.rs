//! The thread on which stores and their clients run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use elasticrs_store::runtime::{Runtime, Spawn, Task};
use pyo3::prelude::*;

use crate::error::{SupervisorError, os_error};
use crate::supervisor::Supervisor;

/// All that have no supervisor share one thread, which ends with the last of them. With the pid, as a forked child must
/// not use the thread of its parent.
static SHARED: Mutex<Option<(u32, Weak<Runtime>)>> = Mutex::new(None);

/// Where the futures of one object run.
pub enum Home {
    Agent(Py<Supervisor>),
    Own { runtime: Mutex<Option<Arc<Runtime>>>, owner: u32 },
}

impl Home {
    /// The supervisor's thread, or the shared one.
    pub fn new(supervisor: Option<Py<Supervisor>>) -> PyResult<Self> {
        let owner = std::process::id();
        let Some(supervisor) = supervisor else {
            let mut shared = lock(&SHARED);
            let known = shared.as_ref().filter(|(pid, _)| *pid == owner).and_then(|(_, runtime)| runtime.upgrade());
            let runtime = match known {
                Some(runtime) => runtime,
                None => Arc::new(Runtime::new().map_err(|error| os_error(&error, "start the thread of the stores"))?),
            };
            *shared = Some((owner, Arc::downgrade(&runtime)));
            return Ok(Self::Own { runtime: Mutex::new(Some(runtime)), owner });
        };
        Ok(Self::Agent(supervisor))
    }

    /// Raises in a forked child: the thread is its parent's.
    pub fn check_owner(&self) -> PyResult<()> {
        match self {
            Self::Own { owner, .. } if *owner != std::process::id() => {
                Err(SupervisorError::new_err(format!("the process was forked: the store belongs to pid {owner}")))
            }
            // A supervisor checks for itself.
            Self::Own { .. } | Self::Agent(_) => Ok(()),
        }
    }
}

impl Home {
    /// Gives the shared thread back; the last one who does waits for its end.
    pub fn leave(&self) {
        if let Self::Own { runtime, .. } = self {
            let left = lock(runtime).take();
            drop(left);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Spawn for Home {
    fn spawn(&self, task: Task) -> bool {
        match self {
            Self::Agent(supervisor) => supervisor.get().inner.spawn(task).is_ok(),
            Self::Own { runtime, .. } => lock(runtime).as_ref().is_some_and(|runtime| runtime.spawn(task)),
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Self::Own { runtime, owner } = self
            && *owner != std::process::id()
        {
            // Waiting for a thread that this process does not have would never end.
            std::mem::forget(lock(runtime).take());
        }
    }
}
