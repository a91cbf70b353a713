//! `elasticrs._core`: the seam between Python and `elasticrs-core`.

pub mod nursery;

use pyo3::prelude::*;

/// The native part of elasticrs; private.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::nursery::nursery_main;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
