//! `_core.WorkerStore`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use elasticrs_core::supervisor as core;
use elasticrs_store::runtime::{Runtime, Spawn, Task};
use elasticrs_store::worker::{self, Limits, Port};
use pyo3::prelude::*;

use crate::error::{SupervisorError, os_error};
use crate::supervisor::Supervisor;

/// Lines that nobody takes are dropped, the oldest first.
const MAX_NOTICES: usize = 100;

#[derive(Clone, Copy, FromPyObject)]
enum PortOrRange {
    One(u16),
    Range((u16, u16)),
}

/// Runs the store on the supervisor's thread.
struct OnSupervisor<'a>(&'a core::Supervisor);

impl Spawn for OnSupervisor<'_> {
    fn spawn(&self, task: Task) -> bool {
        self.0.spawn(task).is_ok()
    }
}

#[pyclass(frozen, module = "elasticrs._core")]
pub struct WorkerStore {
    inner: worker::WorkerStore,
    /// Our own thread, when there is no supervisor.
    runtime: Mutex<Option<Runtime>>,
    notices: Arc<Mutex<VecDeque<String>>>,
}

#[pymethods]
impl WorkerStore {
    #[new]
    #[pyo3(signature = (host=None, port=PortOrRange::One(0)))]
    fn new(py: Python<'_>, host: Option<&str>, port: PortOrRange) -> PyResult<Self> {
        let (range, name) = match port {
            PortOrRange::One(0) => (Port::Any, "any free port".to_owned()),
            PortOrRange::One(port) => (Port::Range(port, port), format!("port {port}")),
            PortOrRange::Range((first, last)) => (Port::Range(first, last), format!("ports {first} to {last}")),
        };
        let inner = py
            .detach(|| worker::WorkerStore::new(host, range, Limits::default()))
            .map_err(|error| os_error(&error, &format!("listen on {} {name}", host.unwrap_or("all addresses,"))))?;
        Ok(Self { inner, runtime: Mutex::default(), notices: Arc::default() })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.inner.port()
    }

    #[pyo3(signature = (supervisor=None))]
    fn serve(&self, py: Python<'_>, supervisor: Option<&Supervisor>) -> PyResult<()> {
        let served = if let Some(supervisor) = supervisor {
            let supervisor = &supervisor.inner;
            py.detach(|| self.inner.serve(&OnSupervisor(supervisor), supervisor.teller()))
        } else {
            let runtime = Runtime::new().map_err(|error| os_error(&error, "start the thread of the store"))?;
            let notices = Arc::clone(&self.notices);
            let served = py.detach(|| self.inner.serve(&runtime, move |line| keep(&mut lock(&notices), line)));
            if served.is_ok() {
                *lock(&self.runtime) = Some(runtime);
            }
            served
        };
        served.map_err(|error| SupervisorError::new_err(error.to_string()))
    }

    fn waiting(&self, py: Python<'_>) -> BTreeMap<String, Vec<String>> {
        py.detach(|| self.inner.waiting())
    }

    fn take_notices(&self) -> Vec<String> {
        lock(&self.notices).drain(..).collect()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }
}

impl WorkerStore {
    fn end(&self) {
        self.inner.close();
        let runtime = lock(&self.runtime).take();
        if self.inner.is_ours() {
            drop(runtime);
        } else {
            // The thread is the parent's; waiting for it would never end.
            std::mem::forget(runtime);
        }
    }
}

impl Drop for WorkerStore {
    fn drop(&mut self) {
        self.end();
    }
}

fn keep(notices: &mut VecDeque<String>, line: String) {
    if notices.len() == MAX_NOTICES {
        notices.pop_front();
    }
    notices.push_back(line);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
