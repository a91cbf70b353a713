//! `_core.HealthServer`.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elasticrs_health::log_sizes::LogFile;
use elasticrs_health::outline::{AttemptOutline, JobOutline};
use elasticrs_health::{Activity, Cause, Handle, Job, Order, Outline, State, Worker};
use elasticrs_runtime::notices::List;
use elasticrs_runtime::readings::Dest;
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::fds::duplicate;
use nix::errno::Errno;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::error::listen_error;
use crate::home::teller;
use crate::spec::duration;
use crate::stores::end_detached;
use crate::supervisor::Supervisor;

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct HealthServer {
    handle: Handle,
    notices: Arc<List>,
}

#[pymethods]
impl HealthServer {
    #[new]
    #[pyo3(signature = (host, port, limit, age=0.0))]
    fn new(py: Python<'_>, host: &str, port: Option<u16>, limit: f64, age: f64) -> PyResult<Self> {
        let (limit, age) = (duration(limit, "limit")?, duration(age, "age")?);
        let notices = Arc::default();
        let tell = teller(None, &notices);
        let place = port.map(|port| (host, port));
        let handle = py.detach(|| Handle::start(place, limit, age, tell)).map_err(|error| listen_error(&error))?;
        Ok(Self { handle, notices })
    }

    fn open_control(&self, py: Python<'_>, folder: PathBuf, supervisor: &Supervisor) -> PyResult<()> {
        py.detach(move || self.handle.open_control(&folder, &supervisor.inner)).map_err(|error| control_error(&error))
    }

    fn close_control(&self) {
        self.handle.close_control();
    }

    #[pyo3(signature = (job, attempt=None))]
    fn outline(&self, job: JobFields, attempt: Option<AttemptFields>) {
        self.handle.outline(outline(job, attempt));
    }

    fn take_orders(&self) -> Vec<(u64, u32, Option<i32>, String)> {
        let orders = self.handle.take_orders().into_iter();
        orders.map(|Order { number, caller, text }| (number, caller.uid, caller.pid, text)).collect()
    }

    #[pyo3(signature = (number, line, *, is_last=false))]
    fn reply(&self, number: u64, line: String, is_last: bool) {
        self.handle.reply(number, line, is_last);
    }

    fn wants_page(&self) -> bool {
        self.handle.wants_page()
    }

    #[getter]
    fn viewers(&self) -> usize {
        self.handle.viewers()
    }

    fn tell_page(&self, text: &str) {
        self.handle.tell_page(text);
    }

    fn status(&self) -> String {
        self.handle.status()
    }

    #[getter]
    fn port(&self) -> u16 {
        self.handle.port()
    }

    #[getter]
    fn fd(&self) -> i32 {
        self.handle.fd().as_raw_fd()
    }

    #[pyo3(signature = (age, supervisor=None, doing=None))]
    fn answer(&self, age: f64, supervisor: Option<&Supervisor>, doing: Option<String>) -> PyResult<()> {
        // Do not use `max`, because it would turn NaN into 0, and NaN must be rejected.
        let age = duration(if age < 0.0 { 0.0 } else { age }, "age")?;
        match supervisor {
            Some(supervisor) => self.handle.answer_through(&supervisor.inner, age, doing),
            None => self.handle.answer(age, doing),
        }
        Ok(())
    }

    #[pyo3(signature = (supervisor, *, is_asked=false))]
    fn show(&self, supervisor: &Supervisor, is_asked: bool) {
        let source = Arc::new(supervisor.inner.counters());
        if is_asked {
            self.handle.watch_loop(source.clone());
        }
        self.handle.show(source);
    }

    fn watch_files(&self, files: Vec<(u32, u8, PathBuf)>, are_new: bool) -> PyResult<()> {
        let of = |(local_rank, descriptor, path)| {
            let output = match descriptor {
                1 => Dest::Stdout,
                2 => Dest::Stderr,
                other => return Err(PyValueError::new_err(format!("files: expected 1 or 2, got {other}"))),
            };
            Ok(LogFile { stream: (local_rank, output), path, is_new: are_new })
        };
        let files = files.into_iter().map(of).collect::<PyResult<_>>()?;
        Ok(self.handle.watch_files(files)?)
    }

    fn watch_steps(&self, fds: Vec<i32>) -> PyResult<()> {
        let files = fds.into_iter().map(|fd| duplicate(fd).map(File::from)).collect::<io::Result<_>>()?;
        self.handle.watch_steps(files);
        Ok(())
    }

    fn files_ended(&self) {
        self.handle.files_ended();
    }

    #[pyo3(signature = (state, status, workers=None))]
    fn publish(&self, state: &str, status: &str, workers: Option<Vec<(u32, u32, i32)>>) -> PyResult<()> {
        let status = elasticrs_health::parse_status(status).map_err(PyValueError::new_err)?;
        let of = |(rank, local_rank, pid)| Worker::new(rank, local_rank, pid);
        let workers = workers.map(|workers| workers.into_iter().map(of).collect());
        self.handle.publish(known(State::of_name, state)?, status, workers);
        Ok(())
    }

    #[pyo3(signature = (run_id, node, placed=None))]
    fn identify(&self, run_id: String, node: String, placed: Option<(u32, u32)>) {
        self.handle.count(|registry, _| registry.identify(Job { run_id, node, placed }));
    }

    fn enter(&self, activity: &str) -> PyResult<()> {
        let activity = known(Activity::of_name, activity)?;
        self.handle.count(|registry, now| registry.spans.enter(activity, now));
        Ok(())
    }

    fn was_hung(&self, seconds: f64) -> PyResult<()> {
        let span = duration(seconds, "seconds")?;
        self.handle.count(|registry, now| registry.spans.was_hung(span, now));
        Ok(())
    }

    fn restarted(&self, cause: &str) -> PyResult<()> {
        let cause = known(Cause::of_name, cause)?;
        self.handle.count(|registry, _| registry.restarted(cause));
        Ok(())
    }

    fn recovered(&self, seconds: f64) -> PyResult<()> {
        let span: Duration = duration(seconds, "seconds")?;
        self.handle.count(|registry, _| registry.recovered(span));
        Ok(())
    }

    fn put(&self, group: &str, name: &str, value: f64) {
        self.handle.count(|registry, _| registry.put(group, name, value));
    }

    fn take_notices(&self) -> Vec<String> {
        self.notices.take()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.handle.close());
    }
}

/// Facts about a job: run id, role, name, number of workers on this node, maximum number of restarts, and path of the
/// event log.
type JobFields = (OsString, OsString, OsString, u32, u32, Option<OsString>);

/// Facts about an attempt: name, round, number of restarts, [place of this node](AttemptOutline::placed), folder of the
/// log files, and [workers](AttemptOutline::workers).
type AttemptFields = (String, u64, u32, (u32, u32, u32), Option<OsString>, Vec<(Option<u32>, u32, i32)>);

fn outline((run_id, role, name, nproc, max_restarts, event_log): JobFields, attempt: Option<AttemptFields>) -> Outline {
    // Replace invalid UTF-8, which a path may contain, because JSON cannot represent it.
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let (run_id, role, name, event_log) = (text(run_id), text(role), text(name), event_log.map(text));
    let attempt = attempt.map(|(name, round, restarts, placed, log_folder, workers)| AttemptOutline {
        name,
        round,
        restarts,
        placed,
        log_folder: log_folder.map(text),
        workers,
        at: boot_now(),
    });
    Outline { job: JobOutline { run_id, role, name, nproc, max_restarts, event_log }, attempt }
}

/// Converts an error from opening the control socket to a Python exception. Its text is shown to the user.
fn control_error(error: &io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(errno) => PyOSError::new_err((errno, Errno::from_raw(errno).desc())),
        None => PyOSError::new_err(error.to_string()),
    }
}

impl Drop for HealthServer {
    fn drop(&mut self) {
        end_detached(|| self.handle.close());
    }
}

/// Looks up a value by its name. Raises `ValueError` if the name is unknown.
fn known<T>(of_name: fn(&str) -> Option<T>, name: &str) -> PyResult<T> {
    of_name(name).ok_or_else(|| PyValueError::new_err(name.to_owned()))
}
