//! Functions of the Python extension module that can be called without a supervisor.

use std::os::fd::IntoRawFd;
use std::path::PathBuf;

use elasticrs_core::timer::pages::HeartbeatPage;
use elasticrs_core::{limits, logs};
use elasticrs_nursery::cleaner;
use elasticrs_nursery::start;
use elasticrs_nursery::tree::{self, Target};
use elasticrs_store::coordination;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::stop;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::os_error;

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 hands out owned paths")]
#[pyo3(signature = (path, count, max_bytes=65536))]
pub(crate) fn last_lines(py: Python<'_>, path: PathBuf, count: usize, max_bytes: u64) -> PyResult<Vec<Vec<u8>>> {
    py.detach(|| logs::last_lines(&path, count, max_bytes))
        .map_err(|error| os_error(&error, &format!("read {}", path.display())))
}

#[pyfunction]
#[pyo3(signature = (processes, files=0, others=0))]
pub(crate) fn check_limits(processes: u64, files: u64, others: u64) -> PyResult<()> {
    limits::check(processes, files, others).map_err(|error| PyValueError::new_err(error.to_string()))
}

#[pyfunction]
pub(crate) fn raise_descriptor_limit() -> u64 {
    start::raise_descriptor_limit()
}

#[pyfunction]
pub(crate) fn heartbeat_page() -> PyResult<(i32, String)> {
    let made = HeartbeatPage::new(Stamp::now().0).and_then(|page| page.share(None));
    let (descriptor, name) = made.map_err(|error| os_error(&error, "could not make a page for heartbeats"))?;
    Ok((descriptor.into_raw_fd(), name))
}

#[pyfunction]
pub(crate) fn stop_unless_continued() -> PyResult<()> {
    stop::stop_unless_continued().map_err(|errno| os_error(&errno.into(), "stop"))
}

#[pyfunction]
pub(crate) fn scoped_token(token: &[u8], scope: &str) -> String {
    coordination::access::scoped_token(token, scope)
}

#[pyfunction]
pub(crate) fn children() -> Vec<i32> {
    tree::children_of_self()
}

#[pyfunction]
pub(crate) fn name_of(pid: i32) -> String {
    tree::describe(pid).command
}

#[pyfunction]
pub(crate) fn patience_with(pid: i32) -> Option<f64> {
    Target::open_any(pid).as_ref().and_then(cleaner::patience_with).map(|patience| patience.as_secs_f64())
}

#[pyfunction]
pub(crate) fn order_stop_signals() -> PyResult<()> {
    stop::order_signals().map_err(|errno| os_error(&errno.into(), "order signals"))
}
