//! Where the nursery's program comes from.

use std::ffi::{OsStr, OsString};

use elasticrs_core::nursery::launch::NurseryImage;
use elasticrs_core::nursery::server;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Built by `build.rs`; runs from a memory file.
static IMAGE: &[u8] = include_bytes!(env!("ELASTICRS_NURSERY_IMAGE"));

/// What to try, in order: the embedded program, then a bare interpreter that loads this extension by its path, for
/// systems where memory files cannot be executed. It starts in 10 ms instead of 1 and weighs 10 MB instead of 2.
pub fn images(py: Python<'_>, kind: &str) -> PyResult<Vec<NurseryImage>> {
    let embedded = || NurseryImage::Embedded(IMAGE);
    match kind {
        "auto" => Ok([Some(embedded()), interpreter(py)?].into_iter().flatten().collect()),
        "embedded" => Ok(vec![embedded()]),
        "interpreter" => Ok(interpreter(py)?.into_iter().collect()),
        other => {
            let text = format!("nursery must be 'auto', 'embedded' or 'interpreter', got '{other}'");
            Err(PyValueError::new_err(text))
        }
    }
}

/// `None` where Python is embedded in another program, and has no executable.
fn interpreter(py: Python<'_>) -> PyResult<Option<NurseryImage>> {
    let Some(path) = py.import("sys")?.getattr("executable")?.extract::<Option<OsString>>()? else { return Ok(None) };
    let extension: OsString = py.import("elasticrs._core")?.getattr("__file__")?.extract()?;
    // `-I -S`: nothing of the user's environment or site is run in the nursery. The extension is loaded by its path,
    // because without site there is no path to find packages on.
    let code = "import sys\n\
        from importlib.machinery import ExtensionFileLoader as Loader, ModuleSpec\n\
        loader = Loader('elasticrs._core', sys.argv[1])\n\
        core = loader.create_module(ModuleSpec('elasticrs._core', loader, origin=sys.argv[1]))\n\
        loader.exec_module(core)\n\
        sys.exit(core.nursery_main(sys.argv[2]))";
    // Its own name stays the first argument: by it an interpreter finds its library.
    let args = [path.as_os_str(), "-I".as_ref(), "-S".as_ref(), "-c".as_ref(), code.as_ref(), extension.as_os_str()];
    let args = args.map(OsStr::to_owned).to_vec();
    Ok((!path.is_empty()).then(|| NurseryImage::Program { path: path.into(), args }))
}

/// The nursery's program, for a process that was started for it alone; returns its exit code.
#[pyfunction]
pub fn nursery_main(py: Python<'_>, start: &str) -> u8 {
    py.detach(|| server::run(Some(start)))
}
