//! Converts the Python descriptions of processes, groups and log streams to the core's types.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use elasticrs_core::logs;
use elasticrs_core::spec as core;
use elasticrs_nursery::spec as nursery;
use elasticrs_runtime::readings::Dest;
use elasticrs_sys::fds::duplicate;
use elasticrs_sys::signal::Signal;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::error::os_error;

/// Converts seconds to a duration. `name` is used in the error message.
pub(crate) fn duration(seconds: f64, name: &str) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("{name} must be a finite number of seconds >= 0, got {seconds}")))
}

/// Converts a signal number. Raises `ValueError` if it is invalid.
pub(crate) fn signal(number: i32) -> PyResult<Signal> {
    Signal::new(number).ok_or_else(|| PyValueError::new_err(format!("{number} is not a signal number")))
}

/// Converts a text for the kernel. Raises `ValueError` if it contains a NUL byte. `what` is used in the error message.
pub(crate) fn c_string(text: OsString, what: &str) -> PyResult<CString> {
    CString::new(text.into_vec()).map_err(|error| {
        let text = OsString::from_vec(error.into_vec());
        PyValueError::new_err(format!("{what} contains a NUL byte: {}", text.display()))
    })
}

/// A command-line argument: text, which is encoded for the file system, or bytes.
#[derive(FromPyObject)]
pub(crate) enum Argument {
    Text(OsString),
    Bytes(Vec<u8>),
}

impl Argument {
    fn into_os(self) -> OsString {
        match self {
            Self::Text(text) => text,
            Self::Bytes(bytes) => OsString::from_vec(bytes),
        }
    }
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct ProcessSpec {
    pub inner: nursery::ProcessSpec,
    /// Descriptors that the new process inherits, given by their numbers in this process. They are duplicated when
    /// the group is started.
    pass_fds: Vec<RawFd>,
}

#[pymethods]
impl ProcessSpec {
    #[new]
    #[pyo3(signature = (local_rank, argv, *, env, cwd=None, stdin=None, stdout=None, stderr=None, pass_fds=Vec::new(), cpus=None, warm=false))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        local_rank: u32,
        argv: Vec<Argument>,
        env: &Bound<'_, PyMapping>,
        cwd: Option<PathBuf>,
        stdin: Option<PathBuf>,
        stdout: Option<PathBuf>,
        stderr: Option<PathBuf>,
        pass_fds: Vec<RawFd>,
        cpus: Option<Vec<usize>>,
        warm: bool,
    ) -> PyResult<Self> {
        if argv.is_empty() {
            return Err(PyValueError::new_err("argv is empty"));
        }
        let argv = argv.into_iter().map(|a| c_string(a.into_os(), "an argument")).collect::<PyResult<_>>()?;
        let cpus =
            cpus.map(|cpus| nursery::CpuSet::new(&cpus).ok_or_else(|| PyValueError::new_err("cpus names no CPU")));
        let cpus = cpus.transpose()?;
        let path = |path: Option<PathBuf>| path.map(|path| c_string(path.into(), "a path")).transpose();
        let inner = nursery::ProcessSpec {
            local_rank,
            cwd: path(cwd)?,
            stdio: [path(stdin)?, path(stdout)?, path(stderr)?],
            cpus,
            warm,
            ..nursery::ProcessSpec::new(argv, environment(env)?)
        };
        Ok(Self { inner, pass_fds })
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.inner.local_rank
    }
}

impl ProcessSpec {
    /// Converts the spec to the core's type. Appends duplicates of the inherited descriptors to `descriptors`.
    pub(crate) fn to_core(&self, descriptors: &mut Vec<OwnedFd>) -> PyResult<nursery::ProcessSpec> {
        let mut spec = self.inner.clone();
        for &number in &self.pass_fds {
            let own = duplicate(number).map_err(|error| os_error(&error, &format!("pass descriptor {number}")))?;
            let source = u32::try_from(descriptors.len()).map_err(PyValueError::new_err)?;
            spec.pass_fds.push(nursery::PassedFd { source, target: number });
            descriptors.push(own);
        }
        Ok(spec)
    }
}

fn environment(env: &Bound<'_, PyMapping>) -> PyResult<Vec<CString>> {
    let variable = |name: OsString, value: OsString| {
        if name.is_empty() || name.as_bytes().contains(&b'=') {
            return Err(PyValueError::new_err(format!("`{}` cannot name a variable", name.display())));
        }
        let mut entry = name;
        entry.push(OsStr::new("="));
        entry.push(value);
        c_string(entry, "a variable")
    };
    if let Ok(dict) = env.cast::<PyDict>() {
        return dict.iter().map(|(name, value)| variable(name.extract()?, value.extract()?)).collect();
    }
    env.items()?.iter().map(|item| item.extract().and_then(|(name, value)| variable(name, value))).collect()
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct StopPolicy {
    pub inner: core::StopPolicy,
}

#[pymethods]
impl StopPolicy {
    #[new]
    fn new(signal: i32, grace: f64) -> PyResult<Self> {
        let inner = core::StopPolicy { signal: self::signal(signal)?, grace: duration(grace, "grace")? };
        Ok(Self { inner })
    }

    #[getter]
    fn signal(&self) -> i32 {
        self.inner.signal.number()
    }

    #[getter]
    fn grace(&self) -> f64 {
        self.inner.grace.as_secs_f64()
    }
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct GroupSpec {
    processes: Vec<Py<ProcessSpec>>,
    policy: core::GroupPolicy,
}

/// Time limit for starting all workers of a group, and for starting a replacement.
const START_DEADLINE: Duration = Duration::from_secs(30);

#[pymethods]
impl GroupSpec {
    #[new]
    #[pyo3(signature = (processes, *, on_failure, stop_scope="group", linger=Some(5.0), keep_ignored=Vec::new(), replaces=false, keep_grace=0.0))]
    fn new(
        processes: Vec<Py<ProcessSpec>>,
        on_failure: &StopPolicy,
        stop_scope: &str,
        linger: Option<f64>,
        keep_ignored: Vec<i32>,
        replaces: bool,
        keep_grace: f64,
    ) -> PyResult<Self> {
        for (expected, process) in (0..).zip(&processes) {
            let local_rank = process.get().inner.local_rank;
            if local_rank != expected {
                let text = format!("local ranks must be 0..n in order, got {local_rank} at place {expected}");
                return Err(PyValueError::new_err(text));
            }
        }
        let linger = linger.map(|seconds| duration(seconds, "linger")).transpose()?;
        let wrong_scope = || PyValueError::new_err(format!("stop_scope must be worker or group, got {stop_scope:?}"));
        let policy = core::GroupPolicy {
            on_failure: on_failure.inner,
            stop_scope: core::StopScope::of_name(stop_scope).ok_or_else(wrong_scope)?,
            on_success: linger.map_or(core::Descendants::Keep, core::Descendants::Linger),
            start_deadline: START_DEADLINE,
            keep_ignored: keep_ignored.into_iter().map(signal).collect::<PyResult<_>>()?,
            replaces,
            keep_grace: duration(keep_grace, "keep_grace")?,
        };
        Ok(Self { processes, policy })
    }
}

impl GroupSpec {
    /// Converts this Python object to the `GroupSpec` of `elasticrs_core`. Duplicates the inherited descriptors.
    pub(crate) fn to_core(&self) -> PyResult<core::GroupSpec> {
        let mut descriptors = Vec::new();
        let processes = self.processes.iter().map(|process| process.get().to_core(&mut descriptors));
        Ok(core::GroupSpec { processes: processes.collect::<PyResult<_>>()?, descriptors, policy: self.policy.clone() })
    }
}

/// Destination of a log stream: a descriptor of the agent (1 or 2), or a file.
#[derive(FromPyObject)]
pub(crate) enum LogDestination {
    Console(u8),
    File(PathBuf),
}

#[pyclass(frozen, from_py_object, module = "elasticrs._core")]
#[derive(Clone)]
pub(crate) struct LogStream {
    pub inner: logs::LogStream,
}

#[pymethods]
impl LogStream {
    #[new]
    #[pyo3(signature = (local_rank, path, to, prefix, *, contains=Vec::new()))]
    fn new(
        local_rank: u32,
        path: PathBuf,
        to: Option<LogDestination>,
        prefix: Vec<u8>,
        contains: Vec<Vec<u8>>,
    ) -> PyResult<Self> {
        let to = match to {
            None => logs::To::Nowhere,
            Some(LogDestination::Console(1)) => logs::To::Console(Dest::Stdout),
            Some(LogDestination::Console(2)) => logs::To::Console(Dest::Stderr),
            Some(LogDestination::Console(other)) => {
                return Err(PyValueError::new_err(format!("to must be 1, 2, a path or None, got {other}")));
            }
            Some(LogDestination::File(path)) => logs::To::File(logs::MatchingLines { path, contains }),
        };
        Ok(Self { inner: logs::LogStream { local_rank, path, to, prefix } })
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.inner.local_rank
    }

    #[getter]
    fn path(&self) -> &OsStr {
        self.inner.path.as_os_str()
    }
}
