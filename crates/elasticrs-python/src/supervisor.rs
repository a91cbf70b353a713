//! `_core.Supervisor`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_core::supervisor::evidence::EvidenceFiles;
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{self as core, Config};
use elasticrs_core::timer::hang::{LEAST_LEARNED, Limits, RemoteHang, StepLimit};
use elasticrs_nursery::launch::NurseryImage;
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::fds::duplicate;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{Error, os_error};
use crate::event::{FdReady, Heartbeat, heartbeat, object, to_python};
use crate::nursery::{self, WarmNursery};
use crate::spec::{GroupSpec, LogStream, ProcessSpec, StopPolicy, duration, signal};
use crate::stores::{Of, Stores, end_detached};

/// Maximum time to wait before checking for Python's signals again. The check is needed because two kinds of signals do
/// not interrupt the wait: those that arrive between the last check and the system call, and those that the kernel
/// delivers to another thread. The value equals the agent's own safety interval, so that the check causes no extra
/// wake-ups.
pub(crate) const LOOK: Duration = Duration::from_secs(5);

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct Supervisor {
    pub(crate) inner: core::Supervisor,
    /// Reference to the thread of the workers' stores. Acquired when the first store is used.
    pub(crate) stores: Arc<Stores>,
}

#[pymethods]
impl Supervisor {
    #[new]
    #[pyo3(signature = (*, owns_process=false, in_interpreter=false, warm=None))]
    fn new(py: Python<'_>, owns_process: bool, in_interpreter: bool, warm: Option<&WarmNursery>) -> PyResult<Self> {
        let warm = warm.map(|warm| NurseryImage::Warm(Arc::clone(&warm.inner)));
        let nursery = warm.into_iter().chain(nursery::images(py, in_interpreter)?).collect();
        let config = Config { nursery, owns_process };
        let inner = py.detach(|| core::Supervisor::new(config)).map_err(Error)?;
        Ok(Self { inner, stores: Arc::new(Stores::new(Of::Workers)) })
    }

    #[getter]
    fn nursery_pid(&self) -> Option<i32> {
        self.inner.nursery_pid()
    }

    fn start(&self, py: Python<'_>, group: &GroupSpec) -> PyResult<()> {
        let group = group.to_core()?;
        Ok(py.detach(|| self.inner.start(group)).map_err(Error)?)
    }

    fn replace(&self, py: Python<'_>, process: &ProcessSpec) -> PyResult<()> {
        let mut descriptors = Vec::new();
        let process = process.to_core(&mut descriptors)?;
        Ok(py.detach(|| self.inner.replace(process, descriptors)).map_err(Error)?)
    }

    #[pyo3(signature = (local_rank, pid, status_fd=None, page_fd=None))]
    fn adopt(
        &self,
        py: Python<'_>,
        local_rank: u32,
        pid: i32,
        status_fd: Option<i32>,
        page_fd: Option<i32>,
    ) -> PyResult<()> {
        let own = |fd: Option<i32>, what: &str| {
            let made = fd.map(duplicate).transpose();
            made.map_err(|error| os_error(&error, &format!("could not duplicate the {what}")))
        };
        let (status, page) = (own(status_fd, "status pipe")?, own(page_fd, "page for heartbeats")?);
        Ok(py.detach(|| self.inner.adopt(local_rank, pid, status, page)).map_err(Error)?)
    }

    #[pyo3(signature = (policy, *, hung_for=None, hung_step=None, hung_frame=None))]
    fn stop(
        &self,
        policy: &StopPolicy,
        hung_for: Option<f64>,
        hung_step: Option<u64>,
        hung_frame: Option<String>,
    ) -> PyResult<()> {
        Ok(match hung_for {
            Some(seconds) => {
                let silence = duration(seconds, "hung_for")?;
                let remote = RemoteHang { silence, step: hung_step, frame: hung_frame };
                self.inner.stop_for_hang(policy.inner, remote)
            }
            None => self.inner.stop(policy.inner),
        }
        .map_err(Error)?)
    }

    #[pyo3(signature = (signum, local_ranks=None))]
    fn signal(&self, signum: i32, local_ranks: Option<Vec<u32>>) -> PyResult<()> {
        Ok(self.inner.signal(signal(signum)?, local_ranks).map_err(Error)?)
    }

    fn forward(&self, signum: i32, local_ranks: Vec<u32>) -> PyResult<()> {
        Ok(self.inner.forward(signal(signum)?, local_ranks).map_err(Error)?)
    }

    fn suspend(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.inner.suspend()).map_err(Error)?)
    }

    fn resume(&self) -> PyResult<()> {
        Ok(self.inner.resume().map_err(Error)?)
    }

    fn renew_nursery(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.inner.renew_nursery()).map_err(Error)?)
    }

    fn guard_connection(&self, fd: i32) -> PyResult<()> {
        let connection = duplicate(fd).map_err(|error| os_error(&error, "could not duplicate the connection"))?;
        Ok(self.inner.guard_connection(connection).map_err(Error)?)
    }

    fn release_connection(&self) -> PyResult<()> {
        Ok(self.inner.release_connection().map_err(Error)?)
    }

    #[pyo3(signature = (path=None))]
    fn watch_timers(&self, py: Python<'_>, path: Option<PathBuf>) -> PyResult<OsString> {
        Ok(py.detach(move || self.inner.watch_timers(path.as_deref())).map_err(Error)?.into_os_string())
    }

    #[pyo3(signature = (limit, *, startup=None, exit_limit=None, least=None, stop_delay=0.0))]
    fn watch_hangs(
        &self,
        limit: Option<f64>,
        startup: Option<f64>,
        exit_limit: Option<f64>,
        least: Option<f64>,
        stop_delay: f64,
    ) -> PyResult<()> {
        let positive = |seconds: f64| match duration(seconds, "a limit")? {
            limit if limit.is_zero() => Err(PyValueError::new_err("a limit must be more than 0 seconds")),
            limit => Ok(limit),
        };
        let learned = StepLimit::Learned(least.map(positive).transpose()?.unwrap_or(LEAST_LEARNED));
        let step = limit.map(positive).transpose()?.map_or(learned, StepLimit::Fixed);
        let limits = Limits {
            step,
            startup: startup.map(positive).transpose()?,
            exit: exit_limit.map(positive).transpose()?,
            stop_delay: duration(stop_delay, "stop_delay")?,
        };
        Ok(self.inner.watch_hangs(limits).map_err(Error)?)
    }

    #[pyo3(signature = (files, *, py_spy=None))]
    fn keep_evidence(&self, files: Vec<(PathBuf, PathBuf)>, py_spy: Option<PathBuf>) -> PyResult<()> {
        let files = files.into_iter().map(|(stacks, report)| EvidenceFiles { stacks, report }).collect();
        Ok(self.inner.keep_evidence(files, py_spy).map_err(Error)?)
    }

    #[pyo3(signature = (limit=None))]
    fn watch_exits(&self, limit: Option<f64>) -> PyResult<String> {
        let limit = limit.map(|seconds| duration(seconds, "the limit")).transpose()?;
        Ok(self.inner.watch_exits(limit).map_err(Error)?)
    }

    fn heartbeats(&self, py: Python<'_>) -> PyResult<Vec<Heartbeat>> {
        let beats = py.detach(|| self.inner.heartbeats()).map_err(Error)?;
        Ok(beats.into_iter().map(heartbeat).collect())
    }

    fn fence_at(&self, from_now: Option<f64>) -> PyResult<bool> {
        let at = |from_now: f64| {
            // Do not use `max`, because it would turn NaN into 0, and NaN must be rejected.
            let from_now = if from_now < 0.0 { 0.0 } else { from_now };
            let nanoseconds = duration(from_now, "the deadline")?.as_nanos();
            Ok::<_, PyErr>(boot_now().saturating_add(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
        };
        let deadline = from_now.map(at).transpose()?;
        Ok(self.inner.fence().set(deadline))
    }

    #[pyo3(signature = (timeout=None))]
    fn next_event(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        let timeout = timeout.map(|seconds| duration(seconds.max(0.0), "timeout")).transpose()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            match py.detach(|| self.inner.next(Some(left.min(LOOK)))).map_err(Error)? {
                Next::Event(event) => return to_python(py, event).map(Some),
                Next::FdReady(fd) => return object(py, FdReady { fd }).map(Some),
                Next::TimedOut if left <= LOOK => return Ok(None),
                Next::TimedOut | Next::Interrupted => py.check_signals()?,
            }
        }
    }

    fn watch_fd(&self, fd: i32) -> PyResult<()> {
        self.inner.queue().map_err(Error)?.watch(fd);
        Ok(())
    }

    fn unwatch_fd(&self, fd: i32) -> PyResult<()> {
        self.inner.queue().map_err(Error)?.unwatch(fd);
        Ok(())
    }

    fn follow(&self, py: Python<'_>, streams: Vec<LogStream>) -> PyResult<()> {
        let streams = streams.into_iter().map(|stream| stream.inner).collect();
        Ok(py.detach(|| self.inner.follow(streams)).map_err(Error)?)
    }

    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<LogStream>> {
        let timeout = duration(timeout, "timeout")?;
        let left = py.detach(|| self.inner.drain(timeout)).map_err(Error)?;
        Ok(left.into_iter().map(|left| LogStream { inner: left }).collect())
    }

    #[pyo3(signature = (keep_descendants=false))]
    fn close(&self, py: Python<'_>, keep_descendants: bool) -> PyResult<()> {
        let closed = py.detach(|| {
            let closed = self.inner.close(keep_descendants);
            self.stores.leave();
            closed
        });
        Ok(closed.map_err(Error)?)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        end_detached(|| {
            // Ignore the error in a forked child, because a forked child cannot close the supervisor.
            let _ = self.inner.close(false);
            self.stores.leave();
        });
    }
}
