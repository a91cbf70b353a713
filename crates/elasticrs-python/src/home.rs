//! Chooses the thread on which a store client runs, and the destination of its messages to the user.
//!
//! An agent's client runs on the supervisor's thread. Other clients share a thread with the agents' stores of this
//! process. The supervisor has its own thread, because a busy store could delay its signals and keep-alives.

use std::sync::Arc;

use elasticrs_runtime::notices::{List, Tell};
use elasticrs_runtime::runtime::{Spawn, Task};
use pyo3::prelude::*;

use crate::error::Error;
use crate::stores::{Entered, Of};
use crate::supervisor::Supervisor;

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

    /// Same as [`Stores::close`](crate::stores::Stores::close).
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
