//! The thread on which the stores of a process run.
//!
//! It ends with the last of them; those of an agent leave it when the supervisor is closed, so that it is there for the next
//! attempt. A forked child has none: nothing of its parent's is waited for.

use std::io;
use std::sync::{Arc, Mutex, Weak};

use elasticrs_runtime::lock;
use elasticrs_runtime::runtime::{Runtime, Spawn, Task};
use pyo3::prelude::*;

use crate::error::{SupervisorError, os_error};

/// The one thread of all stores. With the pid, as a forked child must not use the thread of its parent.
static SHARED: Mutex<Option<(u32, Weak<Runtime>)>> = Mutex::new(None);

/// A share in the stores' thread.
pub struct Stores {
    runtime: Mutex<Option<Arc<Runtime>>>,
    owner: u32,
}

impl Stores {
    /// None yet.
    pub fn new() -> Self {
        Self { runtime: Mutex::default(), owner: std::process::id() }
    }

    /// One that has its share.
    pub fn entered() -> PyResult<Self> {
        let stores = Self::new();
        stores.enter().map_err(|error| os_error(&error, "start the thread of the stores"))?;
        Ok(stores)
    }

    /// Takes a share; the first one starts the thread.
    pub fn enter(&self) -> io::Result<()> {
        let mut own = lock(&self.runtime);
        if own.is_none() {
            let mut shared = lock(&SHARED);
            let known =
                shared.as_ref().filter(|(pid, _)| *pid == self.owner).and_then(|(_, runtime)| runtime.upgrade());
            let runtime = match known {
                Some(runtime) => runtime,
                None => Arc::new(Runtime::new("elasticrs-store")?),
            };
            *shared = Some((self.owner, Arc::downgrade(&runtime)));
            *own = Some(runtime);
        }
        Ok(())
    }

    /// Raises in a forked child: the thread is its parent's.
    pub fn check_owner(&self) -> PyResult<()> {
        let owner = self.owner;
        if owner == std::process::id() {
            return Ok(());
        }
        Err(SupervisorError::new_err(format!("the process was forked: the store belongs to pid {owner}")))
    }

    /// Ends what runs here, and gives the share back. Raises in a forked child.
    pub fn close(&self, py: Python<'_>, end: impl FnOnce() + Send) -> PyResult<()> {
        self.check_owner()?;
        py.detach(|| {
            end();
            self.leave();
        });
        Ok(())
    }

    /// Gives the share back; the last one who does waits for the end of the thread.
    pub fn leave(&self) {
        let left = lock(&self.runtime).take();
        drop(left);
    }
}

impl Spawn for Stores {
    fn spawn(&self, task: Task) -> bool {
        lock(&self.runtime).as_ref().is_some_and(|runtime| runtime.spawn(task))
    }
}

impl Drop for Stores {
    fn drop(&mut self) {
        self.leave();
    }
}
