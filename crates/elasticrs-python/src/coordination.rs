//! The Python classes `_core.CoordinationServer` and `_core.CoordinationClient`.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_runtime::notices::List;
use elasticrs_runtime::runtime::Spawn;
use elasticrs_store::coordination::client::{self, Options};
use elasticrs_store::coordination::leases::Leases;
use elasticrs_store::coordination::relay::Target;
use elasticrs_store::coordination::server::{
    Config, Durable, MAX_BYTES, MAX_CONNECTIONS, REQUEST_TIMEOUT, Server, ServerError,
};
use elasticrs_store::etcd::{client as etcd, tls};
use elasticrs_store::session::client::Client;
use elasticrs_store::session::events::Event;
use elasticrs_store::types::StoreId;
use elasticrs_store::types::{self, MAX_KEY, MAX_RUN_ID, MAX_STEPS, OpResult, Txn, Watch};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{SupervisorError, listen_error, os_error};
use crate::event::{object, records};
use crate::home::{Home, guard, teller};
use crate::spec::duration;
use crate::stores::{Entered, Of, Stores, end_detached};
use crate::supervisor::{LOOK, Supervisor};

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct CoordinationServer {
    inner: Server,
    home: Entered,
    /// Reference to the thread of the workers' stores. Acquired when a worker connects to this store.
    workers: Arc<Stores>,
    notices: Arc<List>,
}

#[pymethods]
impl CoordinationServer {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 hands out owned values")]
    #[pyo3(signature = (
        addresses, *, run_id, token=None, max_connections=MAX_CONNECTIONS, max_bytes=MAX_BYTES,
        request_timeout=REQUEST_TIMEOUT.as_secs_f64(), state=None, grace=0.0, supervisor=None
    ))]
    fn new(
        py: Python<'_>,
        addresses: Vec<(String, u16)>,
        run_id: Option<String>,
        token: Option<Vec<u8>>,
        max_connections: usize,
        max_bytes: usize,
        request_timeout: f64,
        state: Option<PathBuf>,
        grace: f64,
        supervisor: Option<Py<Supervisor>>,
    ) -> PyResult<Self> {
        if addresses.is_empty() {
            return Err(PyValueError::new_err("at least one address is needed"));
        }
        if let Some(run_id) = &run_id {
            check_run_id(run_id)?;
        }
        let request_timeout = match duration(request_timeout, "request_timeout")? {
            Duration::ZERO => return Err(PyValueError::new_err("request_timeout must be more than 0 seconds")),
            limit => limit,
        };
        let grace = duration(grace, "grace")?;
        let state = state.map(|file| Durable { file, grace });
        let home = Entered::new(Of::Agents)?;
        let config =
            Config { run_id, token: checked_token(token)?, max_connections, max_bytes, request_timeout, state };
        let notices = Arc::<List>::default();
        let tell = teller(supervisor.as_ref(), &notices);
        let workers = Arc::new(Stores::new(Of::Workers));
        let on_workers_thread = {
            let workers = Arc::clone(&workers);
            Box::new(move |task| workers.enter().is_ok() && workers.spawn(task))
        };
        let inner = py.detach(|| Server::start(&*home, &addresses, config, on_workers_thread, tell));
        Ok(Self { inner: inner.map_err(|error| server_error(&error))?, home, workers, notices })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.inner.port()
    }

    #[getter]
    fn fd(&self) -> PyResult<i32> {
        let fd = self.notices.fd().map_err(|error| os_error(&error, "make a descriptor for notices"))?;
        Ok(fd.as_raw_fd())
    }

    #[getter]
    fn has_ended(&self) -> bool {
        self.inner.has_ended()
    }

    fn sessions(&self) -> usize {
        self.inner.sessions()
    }

    fn take_notices(&self) -> Vec<String> {
        self.notices.take()
    }

    #[pyo3(signature = (address, agent=None))]
    fn lead_workers(&self, address: Option<(String, u16)>, agent: Option<u32>) {
        self.inner.lead_workers(address.map_or(Target::Later, |(host, port)| Target::At { host, port, agent }));
    }

    fn stop_listening(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check_owner()?;
        py.detach(|| self.inner.stop_listening());
        Ok(())
    }

    fn listen_again(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check_owner()?;
        py.detach(|| self.inner.listen_again()).map_err(|error| server_error(&error))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.close(py, || {
            self.inner.close();
            self.workers.leave();
        })
    }
}

impl Drop for CoordinationServer {
    fn drop(&mut self) {
        end_detached(|| self.workers.leave());
    }
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct CoordinationClient {
    inner: Client,
    home: Home,
}

#[pymethods]
impl CoordinationClient {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    #[pyo3(signature = (
        host, port, *, run_id, token=None, scope=None, interval=1.0, attempts=5, connect_timeout=5.0, stall_timeout=Some(60.0),
        supervisor=None, resume=false, met=None
    ))]
    fn new(
        py: Python<'_>,
        host: String,
        port: u16,
        run_id: String,
        token: Option<Vec<u8>>,
        scope: Option<&str>,
        interval: f64,
        attempts: u16,
        connect_timeout: f64,
        stall_timeout: Option<f64>,
        supervisor: Option<Py<Supervisor>>,
        resume: bool,
        met: Option<(StoreId, u64)>,
    ) -> PyResult<Self> {
        check_run_id(&run_id)?;
        let interval = duration(interval, "interval")?;
        let milliseconds = u32::try_from(interval.as_millis()).unwrap_or(u32::MAX);
        if !Leases::is_allowed(milliseconds, attempts) {
            let allowed = "interval must be between 0.01 and 3600 seconds, attempts between 3 and 1000";
            return Err(PyValueError::new_err(format!("{allowed}, got {} x {attempts}", interval.as_secs_f64())));
        }
        let options = Options {
            host,
            port,
            run_id,
            token: checked_token(token)?,
            scope: scope.map(key).transpose()?,
            interval,
            attempts,
            connect_timeout: duration(connect_timeout, "connect_timeout")?,
            stall_timeout: stall_timeout.map(|seconds| duration(seconds, "stall_timeout")).transpose()?,
            resume,
            met,
        };
        let (guard, home) = (guard(supervisor.as_ref()), Home::new(supervisor)?);
        let inner = py
            .detach(|| client::connect(&home, options, guard))
            .map_err(|error| os_error(&error, "make a client of the store"))?;
        Ok(Self { inner, home })
    }

    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    #[pyo3(signature = (
        endpoints, *, prefix, ca_cert, cert, key, is_tls, user, password, ttl, job_lease, connect_timeout, read_timeout,
        stall_timeout, supervisor, links=None
    ))]
    fn etcd(
        py: Python<'_>,
        endpoints: Vec<(String, u16)>,
        prefix: String,
        ca_cert: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        is_tls: bool,
        user: Option<String>,
        password: Option<String>,
        ttl: f64,
        job_lease: Option<(i64, f64)>,
        connect_timeout: f64,
        read_timeout: f64,
        stall_timeout: Option<f64>,
        supervisor: Option<Py<Supervisor>>,
        links: Option<(String, Option<String>)>,
    ) -> PyResult<Self> {
        if endpoints.is_empty() {
            return Err(PyValueError::new_err("at least one endpoint is needed"));
        }
        let options = etcd::Options {
            endpoints,
            prefix,
            tls: if is_tls { Some(tls::Files { ca_cert, client: both((cert, key), "cert", "key")? }) } else { None },
            user: both((user, password), "user", "password")?,
            ttl: at_least(ttl, 2.0, "ttl")?,
            job_lease: job_lease.map(|(id, ttl)| Ok::<_, PyErr>((id, at_least(ttl, 2.0, "ttl")?))).transpose()?,
            connect_timeout: duration(connect_timeout, "connect_timeout")?,
            read_timeout: duration(read_timeout, "read_timeout")?,
            stall_timeout: stall_timeout.map(|seconds| duration(seconds, "stall_timeout")).transpose()?,
            links: links.map(|(scope, host)| etcd::Site { scope, host }),
        };
        let (guard, home) = (guard(supervisor.as_ref()), Home::new(supervisor)?);
        let inner = py
            .detach(|| etcd::connect(&home, options, guard))
            .map_err(|error| os_error(&error, "make a client of etcd"))?;
        Ok(Self { inner, home })
    }

    #[getter]
    fn fd(&self) -> i32 {
        self.inner.events().fd().as_raw_fd()
    }

    #[getter]
    fn met<'py>(&self, py: Python<'py>) -> Option<(Bound<'py, PyBytes>, u64)> {
        self.inner.events().met().map(|(store, revision)| (PyBytes::new(py, &store), revision))
    }

    fn take(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        self.inner.events().take().into_iter().map(|event| to_python(py, event)).collect()
    }

    #[pyo3(signature = (timeout))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.home.check_owner()?;
        let timeout = timeout.map(|seconds| duration(seconds.max(0.0), "timeout")).transpose()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            match py.detach(|| self.inner.events().wait(Some(left.min(LOOK)))) {
                Ok(true) => return Ok(true),
                Ok(false) if left <= LOOK || self.inner.events().has_nothing_to_come() => return Ok(false),
                Ok(false) => py.check_signals()?,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => py.check_signals()?,
                Err(error) => return Err(os_error(&error, "wait for the store")),
            }
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "PyO3 hands out owned values")]
    #[pyo3(signature = (tag, compares, then, otherwise=Vec::new()))]
    fn txn(&self, tag: u64, compares: Vec<Py<Compare>>, then: Vec<Py<Op>>, otherwise: Vec<Py<Op>>) -> PyResult<()> {
        self.home.check_owner()?;
        if compares.len().max(then.len()).max(otherwise.len()) > MAX_STEPS {
            return Err(PyValueError::new_err(format!("a transaction has at most {MAX_STEPS} compares, and ops")));
        }
        let ops = |ops: Vec<Py<Op>>| ops.iter().map(|op| op.get().0.clone()).collect();
        let compares = compares.iter().map(|compare| compare.get().0.clone()).collect();
        let txn = Txn { compares, then: ops(then), otherwise: ops(otherwise) };
        self.inner.txn(tag, txn).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    #[pyo3(signature = (tag, prefix, *, exact=false, snapshot=false))]
    fn watch(&self, tag: u64, prefix: &str, exact: bool, snapshot: bool) -> PyResult<()> {
        self.home.check_owner()?;
        let watch = Watch { prefix: key(prefix)?, exact };
        self.inner.watch(tag, watch, snapshot).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    #[pyo3(signature = (prefix, *, exact=false))]
    fn unwatch(&self, prefix: &str, exact: bool) -> PyResult<()> {
        self.home.check_owner()?;
        let watch = Watch { prefix: key(prefix)?, exact };
        self.inner.unwatch(watch).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn clock(&self) -> Option<(i64, u64)> {
        self.inner.events().clock()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.close(py, || self.inner.close())
    }
}

/// Combines two values that may only be given together. Raises an exception if only one of them is given.
fn both<A, B>(values: (Option<A>, Option<B>), one: &str, other: &str) -> PyResult<Option<(A, B)>> {
    match values {
        (Some(a), Some(b)) => Ok(Some((a, b))),
        (None, None) => Ok(None),
        _ => Err(PyValueError::new_err(format!("{one} and {other} go together: one of them is missing"))),
    }
}

fn at_least(seconds: f64, least: f64, name: &str) -> PyResult<Duration> {
    if seconds < least {
        return Err(PyValueError::new_err(format!("{name} must be at least {least} seconds, got {seconds}")));
    }
    duration(seconds, name)
}

fn server_error(error: &ServerError) -> PyErr {
    match error {
        ServerError::Listen(error) => listen_error(error),
        ServerError::Resources(source) => os_error(source, "start the store"),
        ServerError::State(error) => PyRuntimeError::new_err(error.to_string()),
        ServerError::Stopped => SupervisorError::new_err("the supervisor has ended"),
    }
}

fn check_run_id(run_id: &str) -> PyResult<()> {
    if run_id.len() <= MAX_RUN_ID {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("a run id has at most {MAX_RUN_ID} bytes, this one has {}", run_id.len())))
}

fn checked_token(token: Option<Vec<u8>>) -> PyResult<Option<Vec<u8>>> {
    if token.as_ref().is_some_and(Vec::is_empty) {
        return Err(PyValueError::new_err("the token is empty"));
    }
    Ok(token)
}

fn key(text: &str) -> PyResult<Arc<str>> {
    if text.len() > MAX_KEY {
        return Err(PyValueError::new_err(format!("a key has at most {MAX_KEY} bytes, this one has {}", text.len())));
    }
    Ok(text.into())
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct Compare(types::Compare);

#[pymethods]
impl Compare {
    #[staticmethod]
    fn exists(name: &str) -> PyResult<Self> {
        Ok(Self(types::Compare::Exists(key(name)?)))
    }

    #[staticmethod]
    fn missing(name: &str) -> PyResult<Self> {
        Ok(Self(types::Compare::Missing(key(name)?)))
    }

    #[staticmethod]
    fn created_at(name: &str, revision: u64) -> PyResult<Self> {
        Ok(Self(types::Compare::Create(key(name)?, revision)))
    }

    #[staticmethod]
    fn modified_at(name: &str, revision: u64) -> PyResult<Self> {
        Ok(Self(types::Compare::Mod(key(name)?, revision)))
    }

    #[staticmethod]
    fn has_value(name: &str, value: &[u8]) -> PyResult<Self> {
        Ok(Self(types::Compare::Value(key(name)?, value.to_vec())))
    }
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct Op(types::Op);

#[pymethods]
impl Op {
    #[staticmethod]
    fn put(name: &str, value: &[u8], leased: bool) -> PyResult<Self> {
        Ok(Self(types::Op::Put { key: key(name)?, value: value.into(), leased }))
    }

    #[staticmethod]
    fn delete(name: &str) -> PyResult<Self> {
        Ok(Self(types::Op::Delete(key(name)?)))
    }

    #[staticmethod]
    fn delete_prefix(prefix: &str) -> PyResult<Self> {
        Ok(Self(types::Op::DeletePrefix(key(prefix)?)))
    }

    #[staticmethod]
    fn get(name: &str) -> PyResult<Self> {
        Ok(Self(types::Op::Get(key(name)?)))
    }

    #[staticmethod]
    fn range(prefix: &str, limit: u32) -> PyResult<Self> {
        Ok(Self(types::Op::Range { prefix: key(prefix)?, limit }))
    }

    #[staticmethod]
    fn predecessor(prefix: &str, name: &str) -> PyResult<Self> {
        Ok(Self(types::Op::Predecessor { prefix: key(prefix)?, key: key(name)? }))
    }
}

records! {
    Connected {
        revision: u64,
        session: u64,
        ttl: f64,
        interval: f64,
        local_address: String,
    }

    Reply {
        tag: u64,
        ok: bool,
        revision: u64,
        results: Vec<Py<PyAny>>,
    }

    Changes {
        revision: u64,
        changes: Vec<Py<Change>>,
    }

    StoreNotice {
        message: String,
    }

    ConnectionLost {
        kind: &'static str,
        message: String,
    }

    Entry {
        key: String,
        value: Py<PyBytes>,
        create_revision: u64,
        mod_revision: u64,
    }

    Change {
        key: String,
        value: Option<Py<PyBytes>>,
        create_revision: u64,
        mod_revision: u64,
    }
}

fn to_python(py: Python<'_>, event: Event) -> PyResult<Py<PyAny>> {
    let seconds = |duration: Duration| duration.as_secs_f64();
    match event {
        Event::Connected { revision, session, ttl, interval, local_address } => {
            let (ttl, interval) = (seconds(ttl), seconds(interval));
            object(py, Connected { revision, session, ttl, interval, local_address })
        }
        Event::Reply { tag, ok, revision, results } => {
            let results = results.into_iter().map(|result| result_of(py, result)).collect::<PyResult<_>>()?;
            object(py, Reply { tag, ok, revision, results })
        }
        Event::Changes { revision, changes } => {
            let changes = changes.into_iter().map(|change| Py::new(py, change_of(py, &change)));
            object(py, Changes { revision, changes: changes.collect::<PyResult<_>>()? })
        }
        Event::Notice { message } => object(py, StoreNotice { message }),
        Event::ConnectionLost { kind, message } => object(py, ConnectionLost { kind: kind.name(), message }),
    }
}

fn result_of(py: Python<'_>, result: OpResult) -> PyResult<Py<PyAny>> {
    Ok(match result {
        OpResult::Count(count) => count.into_pyobject(py)?.into_any().unbind(),
        OpResult::Entry(None) => py.None(),
        OpResult::Entry(Some(entry)) => object(py, entry_of(py, &entry))?,
        OpResult::Entries(entries) => {
            let entries = entries.iter().map(|entry| object(py, entry_of(py, entry))).collect::<PyResult<Vec<_>>>()?;
            entries.into_pyobject(py)?.into_any().unbind()
        }
    })
}

fn entry_of(py: Python<'_>, entry: &types::Entry) -> Entry {
    Entry {
        key: entry.key.to_string(),
        value: PyBytes::new(py, &entry.value).unbind(),
        create_revision: entry.create_revision,
        mod_revision: entry.mod_revision,
    }
}

fn change_of(py: Python<'_>, change: &types::Change) -> Change {
    Change {
        key: change.key.to_string(),
        value: change.value.as_ref().map(|value| PyBytes::new(py, value).unbind()),
        create_revision: change.create_revision,
        mod_revision: change.mod_revision,
    }
}
