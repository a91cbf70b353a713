//! The thread on which stores and their clients run, and how they tell the user something.
//!
//! 1. With a supervisor both are the supervisor's: its thread, and its events ([`Degraded`](crate::event::Degraded)).
//! 2. Without one all share a thread that ends with the last of them, and what they tell is kept until somebody asks.
//! 3. A forked child has neither: nothing of its parent's is waited for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use elasticrs_store::notices::{List, Tell};
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

    /// What tells the user something: the supervisor, or a list that is asked.
    pub fn teller(&self, list: &Arc<List>) -> Tell {
        match self {
            Self::Agent(supervisor) => Box::new(supervisor.get().inner.teller()),
            Self::Own { .. } => {
                let list = Arc::clone(list);
                Box::new(move |line| list.add(line))
            }
        }
    }

    /// Ends what runs here, and gives the thread back. Raises in a forked child.
    pub fn close(&self, py: Python<'_>, end: impl FnOnce() + Send) -> PyResult<()> {
        self.check_owner()?;
        py.detach(|| {
            end();
            self.leave();
        });
        Ok(())
    }

    /// Gives the shared thread back; the last one who does waits for its end.
    pub fn leave(&self) {
        if let Self::Own { runtime, owner } = self {
            let left = lock(runtime).take();
            if *owner != std::process::id() {
                // Waiting for a thread that this process does not have would never end.
                std::mem::forget(left);
            }
        }
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
        self.leave();
    }
}
