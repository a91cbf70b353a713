//! `_core.WorkerStore`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use elasticrs_runtime::listen::Port;
use elasticrs_runtime::lock;
use elasticrs_runtime::notices::List;
use elasticrs_runtime::runtime::Spawn;
use elasticrs_store::worker::{self, Limits};
use pyo3::prelude::*;

use crate::error::{SupervisorError, listen_error};
use crate::home::teller;
use crate::stores::{Entered, Of, end_detached};
use crate::supervisor::Supervisor;

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct WorkerStore {
    inner: worker::WorkerStore,
    /// Reference to the stores' thread. `None` if no store is served, or if a supervisor holds the reference instead.
    home: Mutex<Option<Entered>>,
    notices: Arc<List>,
}

#[pymethods]
impl WorkerStore {
    #[new]
    #[pyo3(signature = (host=None, ports=None))]
    fn new(py: Python<'_>, host: Option<&str>, ports: Option<(u16, u16)>) -> PyResult<Self> {
        let port = ports.map_or(Port::Any, |(first, last)| Port::Range(first, last));
        let inner = py.detach(|| worker::WorkerStore::new(host, port, Limits::default()));
        Ok(Self {
            inner: inner.map_err(|error| listen_error(&error))?,
            home: Mutex::default(),
            notices: Arc::default(),
        })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.inner.port()
    }

    #[pyo3(signature = (supervisor=None))]
    fn serve(&self, py: Python<'_>, supervisor: Option<Py<Supervisor>>) -> PyResult<()> {
        let tell = teller(supervisor.as_ref(), &self.notices);
        let served = if let Some(supervisor) = supervisor {
            let Supervisor { inner, stores } = supervisor.get();
            let (stores, say) = (Arc::clone(stores), inner.teller());
            let hand_over = Box::new(move |task| match stores.enter() {
                Ok(()) => stores.spawn(task),
                Err(error) => {
                    say(format!("cannot start the thread of the stores: {error}"));
                    false
                }
            });
            self.inner.serve_elsewhere(inner, hand_over, tell)
        } else {
            let home = Entered::new(Of::Workers)?;
            let served = py.detach(|| self.inner.serve(&*home, tell));
            if served.is_ok() {
                *lock(&self.home) = Some(home);
            }
            served
        };
        served.map_err(|error| SupervisorError::new_err(error.to_string()))
    }

    fn waiting(&self, py: Python<'_>) -> BTreeMap<String, Vec<String>> {
        py.detach(|| self.inner.waiting())
    }

    fn take_notices(&self) -> Vec<String> {
        self.notices.take()
    }

    /// Closes the store. Does nothing in a forked child, because the store belongs to the parent.
    fn close(&self, py: Python<'_>) {
        let home = lock(&self.home).take();
        py.detach(|| {
            self.inner.close();
            if let Some(home) = &home {
                home.leave();
            }
        });
    }
}

impl Drop for WorkerStore {
    /// Closes the store before `home` is dropped, because dropping `home` waits for the stores' thread.
    fn drop(&mut self) {
        end_detached(|| self.inner.close());
    }
}
