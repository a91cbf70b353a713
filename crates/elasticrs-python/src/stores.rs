//! The two threads on which the stores of a process run. One runs the agents' stores, and the other runs the workers'
//! stores. Also what a store's client needs of the agent: its thread, the destination of its messages to the user, and
//! the nursery, which guards its lease because the nursery outlives a killed agent.
//!
//! The agents' stores have a separate thread, because any program that can connect to a workers' store can keep its
//! thread busy.
//!
//! A thread exits when its last store is closed. An agent keeps the thread of its workers' stores running until its
//! supervisor is closed, so that the next attempt can use the same thread. A forked child does not have these threads
//! and never waits for them.
//!
//! An agent's client runs on the supervisor's thread. Other clients share a thread with the agents' stores of this
//! process. The supervisor has its own thread, because a busy store could delay its signals and keep-alives.

use std::io;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use elasticrs_core::supervisor::Keeper;
use elasticrs_nursery::connections::Release;
use elasticrs_runtime::lock;
use elasticrs_runtime::notices::{List, Tell};
use elasticrs_runtime::runtime::{Runtime, Spawn, Task};
use elasticrs_store::session::client::{Guard, NoGuard};
use pyo3::prelude::*;

use crate::error::{Error, SupervisorError, os_error};
use crate::supervisor::Supervisor;

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

/// Thread on which a store client runs.
pub(crate) enum Home {
    Agent(Py<Supervisor>),
    Stores(Entered),
}

impl Home {
    /// Chooses the supervisor's thread, or the thread of the agents' stores if there is no supervisor.
    pub(crate) fn new(supervisor: Option<Py<Supervisor>>) -> PyResult<Self> {
        supervisor.map_or_else(|| Entered::new(Of::Agents).map(Self::Stores), |supervisor| Ok(Self::Agent(supervisor)))
    }

    /// Raises an exception in a forked child, because the thread belongs to the parent.
    pub(crate) fn check_owner(&self) -> PyResult<()> {
        match self {
            Self::Stores(stores) => stores.check_owner(),
            Self::Agent(supervisor) => Ok(supervisor.get().inner.check_owner().map_err(Error)?),
        }
    }

    /// Same as [`Stores::close`].
    pub(crate) fn close(&self, py: Python<'_>, end: impl FnOnce() + Send) -> PyResult<()> {
        match self {
            Self::Stores(stores) => stores.close(py, end),
            Self::Agent(_) => {
                py.detach(end);
                Ok(())
            }
        }
    }
}

impl Spawn for Home {
    fn spawn(&self, task: Task) -> bool {
        match self {
            Self::Agent(supervisor) => Spawn::spawn(&supervisor.get().inner, task),
            Self::Stores(stores) => stores.spawn(task),
        }
    }
}

/// Returns a function that delivers messages to the user. With a supervisor, the messages become events.
/// Otherwise, they are added to a list that the user fetches.
pub(crate) fn teller(supervisor: Option<&Py<Supervisor>>, list: &Arc<List>) -> Tell {
    if let Some(supervisor) = supervisor {
        return Box::new(supervisor.get().inner.teller());
    }
    let list = Arc::clone(list);
    Box::new(move |line| list.add(line))
}

/// Passes a session's connections and deadline to the nursery.
struct NurseryGuard {
    keeper: Keeper,
    /// True if the nursery holds a second connection, to which the session may move.
    has_two: Arc<AtomicBool>,
}

impl Guard for NurseryGuard {
    fn connected(&self, socket: BorrowedFd<'_>) {
        // The nursery (the process that supervises the workers) keeps a duplicate of the socket open, so that the
        // session lasts until the workers are dead. If the socket cannot be duplicated, the supervisor reports the
        // error to the user. The nursery still kills the workers at the lease's deadline.
        self.keeper.hold(socket);
    }

    fn resuming(&self, socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        let (is_held, has_two) = (self.keeper.hold_beside(socket), Arc::clone(&self.has_two));
        Box::pin(async move { has_two.store(is_held.await, Ordering::Relaxed) })
    }

    fn resumed(&self, on_new: bool) {
        if self.has_two.swap(false, Ordering::Relaxed) {
            self.keeper.release(if on_new { Release::Older } else { Release::Newest });
        }
    }

    fn linked(&self, socket: BorrowedFd<'_>, word: [u8; 32], is_first: bool) {
        // The nursery uses a duplicate of the socket to announce this agent's death to the peer. If the socket cannot
        // be duplicated, the supervisor reports an error, and the peer waits until the lease expires.
        self.keeper.hold_link(socket, word, is_first);
    }

    fn says_words(&self) -> bool {
        true
    }

    fn deadline(&self, boot_ns: u64) {
        // Ignore the result, because a deadline that has already passed is reported by the event `Fenced`.
        let _ = self.keeper.fence(Some(boot_ns));
    }

    fn closed(&self) {
        self.keeper.release(Release::All);
        let _ = self.keeper.fence(None);
    }
}

/// Returns a guard that lets the nursery keep a client's socket open. Without a supervisor, returns [`NoGuard`].
pub(crate) fn guard(supervisor: Option<&Py<Supervisor>>) -> Box<dyn Guard> {
    match supervisor {
        Some(supervisor) => Box::new(NurseryGuard { keeper: supervisor.get().inner.keeper(), has_two: Arc::default() }),
        None => Box::new(NoGuard),
    }
}
