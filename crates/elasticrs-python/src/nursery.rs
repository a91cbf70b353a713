//! Selects the program of the nursery, which is the process that starts and supervises the workers. Also contains the
//! entry points of a nursery that runs in a Python interpreter.

use std::ffi::{CStr, CString, OsString};
use std::sync::Arc;

use elasticrs_nursery::launch::{NurseryImage, Warm};
use elasticrs_nursery::server;
use elasticrs_sys::fds::duplicate;
use elasticrs_sys::fork::Forker;
use nix::errno::Errno;
use pyo3::exceptions::PySystemExit;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::os_error;
use crate::spec::{ProcessSpec, c_string, duration, signal};

/// The nursery's program. `build.rs` builds it, and it is executed from a memory file.
static IMAGE: &[u8] = include_bytes!(env!("ELASTICRS_NURSERY_IMAGE"));

/// Returns the programs to try for the nursery process, in order.
///
/// The first program is the one that is embedded in this extension; it is left out if `in_interpreter` is true. The
/// second is a plain Python interpreter, because some systems cannot execute a program from a file in memory, as the
/// first one is. The interpreter takes 10 ms instead of 1 ms to start, and uses 10 MB instead of 2 MB of memory.
pub(crate) fn images(py: Python<'_>, in_interpreter: bool) -> PyResult<Vec<NurseryImage>> {
    let embedded = (!in_interpreter).then_some(NurseryImage::Embedded(IMAGE));
    Ok(embedded.into_iter().chain(interpreter(py)?).collect())
}

/// Configuration of a warm nursery, which imports modules before its workers start.
#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct WarmNursery {
    pub inner: Arc<Warm>,
}

#[pymethods]
impl WarmNursery {
    #[new]
    #[pyo3(signature = (process, *, report_fd, limit, ignored=Vec::new()))]
    fn new(process: &ProcessSpec, report_fd: i32, limit: f64, ignored: Vec<i32>) -> PyResult<Self> {
        let report = duplicate(report_fd).map_err(|error| os_error(&error, "could not duplicate the report"))?;
        let ignored = ignored.into_iter().map(signal).collect::<PyResult<_>>()?;
        let limit = duration(limit, "limit")?;
        Ok(Self { inner: Arc::new(Warm { process: process.inner.clone(), ignored, report, limit }) })
    }
}

/// Returns the nursery program that runs in a Python interpreter. `None` if Python is embedded in another program,
/// because there is no interpreter to execute.
fn interpreter(py: Python<'_>) -> PyResult<Option<NurseryImage>> {
    let Some(path) = py.import("sys")?.getattr("executable")?.extract::<Option<OsString>>()? else { return Ok(None) };
    let extension: OsString = py.import("elasticrs._core")?.getattr("__file__")?.extract()?;
    // Use `-I -S`, so that the user's environment and the site packages do not affect the nursery. Load the extension
    // by its path, because the package cannot be found without the site packages.
    let code = c"import sys\n\
        from importlib.machinery import ExtensionFileLoader as Loader, ModuleSpec\n\
        loader = Loader('elasticrs._core', sys.argv[1])\n\
        core = loader.create_module(ModuleSpec('elasticrs._core', loader, origin=sys.argv[1]))\n\
        loader.exec_module(core)\n\
        sys.exit(core.nursery_main(sys.argv[2]))";
    // Pass the interpreter's own path as the first argument, because the interpreter uses this path to find its
    // library.
    let (path, extension) = (c_string(path, "sys.executable")?, c_string(extension, "__file__")?);
    let args = [&path, c"-I", c"-S", c"-c", code, &extension].map(CStr::to_owned).to_vec();
    Ok((!path.is_empty()).then(|| NurseryImage::Program { path, args }))
}

/// Runs a nursery in this process, which must have been started for that purpose only. Returns the exit code.
#[pyfunction]
pub(crate) fn nursery_main(py: Python<'_>, start: &str) -> u8 {
    py.detach(|| server::run(Some(start)))
}

/// Marks this process and its future children as part of the job. Must be called before modules are imported.
#[pyfunction]
pub(crate) fn warm_nursery_begin(start: &str) {
    server::begin_warm(start);
}

type Strings = Vec<Py<PyBytes>>;

/// Runs a warm nursery, in an interpreter that has already imported the modules that the workers need. Forks the
/// workers from this process. Returns only in the workers, with their arguments and environment.
#[pyfunction]
pub(crate) fn warm_nursery_main(py: Python<'_>, start: &str) -> PyResult<(Strings, Strings)> {
    let os = py.import("os")?;
    let fork = os.getattr("fork")?.unbind();
    // Forking is safe, because this thread is the only thread of the process and is attached to the interpreter.
    let forker: Forker = Box::new(move || {
        Python::attach(|py| {
            let forked = fork.call0(py).and_then(|pid| pid.extract::<i32>(py));
            forked.map_err(|error| {
                let errno = error.value(py).getattr("errno").and_then(|errno| errno.extract());
                // Use `ECANCELED` if the exception has no error number, for example because an audit hook raised it.
                Errno::from_raw(errno.unwrap_or(Errno::ECANCELED as i32))
            })
        })
    });
    match server::run_warm(Some(start), Some(forker)) {
        Ok(worker) => {
            let bytes = |strings: Vec<CString>| {
                strings.into_iter().map(|text| PyBytes::new(py, text.to_bytes()).unbind()).collect()
            };
            Ok((bytes(worker.argv), bytes(worker.env)))
        }
        // Exit without running the exit handlers of the imported libraries, because those handlers may run only in the
        // workers.
        Err(code) => Err(os.call_method1("_exit", (code,)).err().unwrap_or_else(|| PySystemExit::new_err(code))),
    }
}
