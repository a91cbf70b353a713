//! Where the nursery's program comes from.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use elasticrs_core::nursery::launch::NurseryImage;
use elasticrs_core::nursery::server;
use pyo3::prelude::*;

/// Built by `build.rs`; runs from a memory file.
static IMAGE: &[u8] = include_bytes!(env!("ELASTICRS_NURSERY_IMAGE"));

/// What to try, in order: the embedded program, then a bare interpreter that loads this extension from `extension`,
/// for systems where memory files cannot be executed. It starts in 10 ms instead of 1 and weighs 10 MB instead of 2.
pub fn images(interpreter: PathBuf, extension: &OsStr) -> [NurseryImage; 2] {
    // `-I -S`: nothing of the user's environment or site is run in the nursery. The extension is loaded by its path,
    // because without site there is no path to find packages on.
    let code = "import sys\n\
        from importlib.machinery import ExtensionFileLoader as Loader, ModuleSpec\n\
        loader = Loader('elasticrs._core', sys.argv[1])\n\
        core = loader.create_module(ModuleSpec('elasticrs._core', loader, origin=sys.argv[1]))\n\
        loader.exec_module(core)\n\
        sys.exit(core.nursery_main(sys.argv[2]))";
    // Its own name stays the first argument: by it an interpreter finds its library.
    let args = [interpreter.as_os_str(), "-I".as_ref(), "-S".as_ref(), "-c".as_ref(), code.as_ref(), extension];
    let args = args.map(OsString::from).to_vec();
    let fallback = NurseryImage::Program { path: interpreter, args };
    [NurseryImage::Embedded(IMAGE), fallback]
}

/// The nursery's program, for a process that was started for it alone; returns its exit code.
#[pyfunction]
pub fn nursery_main(py: Python<'_>, token: &str) -> u8 {
    py.detach(|| server::run(Some(token)))
}
