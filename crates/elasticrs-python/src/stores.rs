//! The two threads on which the stores of a process run. One runs the agents' stores, and the other runs the workers'
//! stores. The two threads are separate, because any program that can connect to a workers' store can keep the thread
//! of that store busy, and the agents' stores must still answer in time.
//!
//! A thread exits when its last store is closed. An agent keeps the thread of its workers' stores running until its
//! supervisor is closed, so that the next attempt can use the same thread. A forked child does not have these threads
//! and never waits for them.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, Weak};

use elasticrs_runtime::lock;
use elasticrs_runtime::runtime::{Runtime, Spawn, Task};
use pyo3::prelude::*;

use crate::error::{SupervisorError, os_error};

/// A thread shared by several stores, and the pid of the process that started the thread. The pid is needed because a
/// forked child may not use its parent's thread.
type Shared = Mutex<Option<(u32, Weak<Runtime>)>>;

/// Kind of clients that a store serves. Stores for the same kind of clients share a thread.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Of {
    Agents,
    Workers,
}

impl Of {
    fn shared(self) -> (&'static str, &'static Shared) {
        static AGENTS: Shared = Mutex::new(None);
        static WORKERS: Shared = Mutex::new(None);
        match self {
            Self::Agents => ("elasticrs-store", &AGENTS),
            Self::Workers => ("elasticrs-ranks", &WORKERS),
        }
    }
}

/// An optional reference to a thread that runs stores. The thread keeps running while any reference exists.
pub(crate) struct Stores {
    of: Of,
    runtime: Mutex<Option<Arc<Runtime>>>,
    owner: u32,
}

impl Stores {
    /// Creates a `Stores` that does not hold a reference to the thread yet.
    pub(crate) fn new(of: Of) -> Self {
        Self { of, runtime: Mutex::default(), owner: std::process::id() }
    }

    /// Acquires a reference to the thread. The first reference starts the thread.
    pub(crate) fn enter(&self) -> io::Result<()> {
        let mut own = lock(&self.runtime);
        if own.is_none() {
            let (name, shared) = self.of.shared();
            let mut shared = lock(shared);
            let known =
                shared.as_ref().filter(|(pid, _)| *pid == self.owner).and_then(|(_, runtime)| runtime.upgrade());
            let runtime = match known {
                Some(runtime) => runtime,
                None => Arc::new(Runtime::new(name)?),
            };
            *shared = Some((self.owner, Arc::downgrade(&runtime)));
            *own = Some(runtime);
        }
        Ok(())
    }

    /// Raises an exception in a forked child, because the thread belongs to the parent.
    pub(crate) fn check_owner(&self) -> PyResult<()> {
        let owner = self.owner;
        if owner == std::process::id() {
            return Ok(());
        }
        Err(SupervisorError::new_err(format!("the process was forked: the store belongs to pid {owner}")))
    }

    /// Calls `end` to close a store or a client, then releases the reference to the thread. Raises an exception in a
    /// forked child.
    pub(crate) fn close(&self, py: Python<'_>, end: impl FnOnce() + Send) -> PyResult<()> {
        self.check_owner()?;
        py.detach(|| {
            end();
            self.leave();
        });
        Ok(())
    }

    /// Releases the reference to the thread, if there is one. If it is the last reference, waits until the thread has
    /// exited.
    pub(crate) fn leave(&self) {
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

/// A Python object's reference to a thread that runs stores. Dropping the reference releases the GIL while it waits for
/// the thread to exit.
pub(crate) struct Entered(Stores);

impl Entered {
    /// Creates a reference to the thread that runs this kind of store in this process. Starts the thread if necessary.
    pub(crate) fn new(of: Of) -> PyResult<Self> {
        let stores = Stores::new(of);
        stores.enter().map_err(|error| os_error(&error, "start the thread of the stores"))?;
        Ok(Self(stores))
    }
}

impl Deref for Entered {
    type Target = Stores;

    fn deref(&self) -> &Stores {
        &self.0
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        end_detached(|| self.0.leave());
    }
}

/// Calls `end` without holding the GIL, because `end` may wait for a thread. Call this function only when a Python
/// object is dropped.
pub(crate) fn end_detached(end: impl FnOnce() + Send) {
    let mut end = Some(end);
    Python::try_attach(|py| py.detach(|| run(&mut end)));
    // Call `end` here if the interpreter is shutting down, because `try_attach` does not call it in that case.
    run(&mut end);
}

fn run(end: &mut Option<impl FnOnce()>) {
    if let Some(end) = end.take() {
        end();
    }
}
