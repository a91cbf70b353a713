//! Converts errors of the core to Python exceptions. All choices of exception types are made here.

use std::error::Error as _;

use elasticrs_core::supervisor::SupervisorError as CoreError;
use elasticrs_runtime::listen::ListenError;
use pyo3::exceptions::{PyException, PyOSError, PyProcessLookupError};
use pyo3::prelude::*;

pyo3::create_exception!(_core, SupervisorError, PyException, "The supervisor cannot do what was asked.");

/// Wraps a [`CoreError`], so that `?` converts it to a Python exception.
pub(crate) struct Error(pub CoreError);

impl From<Error> for PyErr {
    fn from(Error(error): Error) -> Self {
        match &error {
            CoreError::Adopt { source, .. } if source.raw_os_error() == Some(nix::libc::ESRCH) => {
                PyProcessLookupError::new_err((nix::libc::ESRCH, error.to_string()))
            }
            CoreError::Resources(source)
            | CoreError::Heartbeats(source)
            | CoreError::Adopt { source, .. }
            | CoreError::Page { source, .. }
            | CoreError::Timers { source, .. } => os_error(source, &error.to_string()),
            CoreError::Nursery(_)
            | CoreError::Busy
            | CoreError::Idle
            | CoreError::Replace { .. }
            | CoreError::Closed
            | CoreError::Forked { .. } => SupervisorError::new_err(chain(&error)),
        }
    }
}

/// Converts an OS error to `OSError` and keeps its error number, from which Python chooses the subclass.
/// `PyErr::from(io::Error)` would lose the number.
pub(crate) fn os_error(error: &std::io::Error, doing: &str) -> PyErr {
    match error.raw_os_error() {
        Some(errno) => PyOSError::new_err((errno, format!("{doing}: {}", nix::errno::Errno::from_raw(errno).desc()))),
        None => SupervisorError::new_err(format!("{doing}: {error}")),
    }
}

/// Converts an error from binding or resolving an address. Resolver errors have no error number.
pub(crate) fn listen_error(error: &ListenError) -> PyErr {
    match error.source.raw_os_error() {
        Some(_) => os_error(&error.source, &error.to_string()),
        None => PyOSError::new_err(format!("{error}: {}", error.source)),
    }
}

fn chain(error: &CoreError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
