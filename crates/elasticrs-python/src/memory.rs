//! Copies between addresses that come from Python: the only `unsafe` code of this crate, in a file of its own.

use elasticrs_sys::copy::{self, Block, Incomplete};
use pyo3::exceptions::{PyChildProcessError, PyValueError};
use pyo3::prelude::*;

#[pyfunction]
pub(crate) fn copy_and_sum(
    py: Python<'_>,
    sources: Vec<usize>,
    targets: Vec<usize>,
    lengths: Vec<usize>,
) -> PyResult<Option<u64>> {
    if sources.len() != targets.len() || sources.len() != lengths.len() {
        return Err(PyValueError::new_err("the lists have different lengths"));
    }
    let blocks: Vec<Block> = std::iter::zip(sources, targets)
        .zip(lengths)
        .map(|((source, target), length)| Block { source, target, length })
        .collect();
    // SAFETY: the caller in Python guarantees that the addresses and lengths are right, as for `ctypes.memmove`, except
    // that another thread may free a source.
    match py.detach(|| unsafe { copy::copy_in_helper(&blocks) }) {
        Ok(sum) => Ok(Some(sum)),
        Err(Incomplete::Unreadable) => Ok(None),
        Err(Incomplete::Killed) => Err(PyChildProcessError::new_err("the process that made the copy was killed")),
    }
}
