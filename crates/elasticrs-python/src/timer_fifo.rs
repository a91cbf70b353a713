//! `_core.TimerFifo`.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use elasticrs_core::timer::fifo::{CAPACITY, Fifo};
use elasticrs_core::timer::record::{self, Complaints, Lines, Refusal, Request, excerpt};
use pyo3::prelude::*;

use crate::error::os_error;
use crate::stores::end_detached;

/// A timer record: pid, scope, expiration time (-1 to release the timer) and signal number (0 for none).
type Record = (i32, String, f64, i32);

struct Reader {
    _fifo: Fifo,
    input: File,
    lines: Lines,
    complaints: Complaints,
}

impl Reader {
    fn read(&mut self) -> std::io::Result<(Vec<Record>, Vec<String>)> {
        let Self { input, lines, complaints, .. } = self;
        let (mut records, mut told) = (Vec::new(), Vec::new());
        let mut refuse = |refusal: Refusal, line: &[u8]| {
            told.extend(complaints.add(refusal, Instant::now(), || excerpt(line)));
        };
        let mut buffer = vec![0; 1 << 16];
        let mut left = CAPACITY as usize;
        while left > 0 {
            let count = match input.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                read => read?,
            };
            left = left.saturating_sub(count.max(1));
            lines.feed(&buffer[..count], |line| match line {
                None => refuse(Refusal::TooLong, b""),
                Some(line) => record::read(line, |record| match record {
                    Err(refusal) => refuse(refusal, line),
                    Ok(record) => records.push(match record.request {
                        Request::Release => (record.pid, record.scope.into(), -1.0, 0),
                        Request::Acquire { expires, signal, .. } => (
                            record.pid,
                            record.scope.into(),
                            expires,
                            signal.map_or(0, elasticrs_sys::signal::Signal::number),
                        ),
                    }),
                }),
            });
        }
        Ok((records, told))
    }
}

#[pyclass(frozen, module = "elasticrs._core")]
pub(crate) struct TimerFifo {
    path: PathBuf,
    fd: i32,
    reader: Mutex<Option<Reader>>,
}

impl TimerFifo {
    fn reader(&self) -> MutexGuard<'_, Option<Reader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl TimerFifo {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let made = py.detach(|| {
            let fifo = Fifo::create(Some(&path))?;
            Ok::<_, std::io::Error>((File::from(fifo.descriptor()?), fifo))
        });
        let (input, fifo) = made.map_err(|error| {
            let is_read = error.kind() == ErrorKind::ResourceBusy;
            let doing = if is_read { "another timer server reads" } else { "could not make the FIFO" };
            os_error(&error, &format!("{doing} {}", path.display()))
        })?;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&input);
        let (lines, complaints) = (Lines::default(), Complaints::default());
        Ok(Self { path, fd, reader: Mutex::new(Some(Reader { _fifo: fifo, input, lines, complaints })) })
    }

    #[getter]
    fn fd(&self) -> i32 {
        self.fd
    }

    fn read(&self, py: Python<'_>) -> PyResult<(Vec<Record>, Vec<String>)> {
        py.detach(|| self.reader().as_mut().map_or_else(|| Ok((Vec::new(), Vec::new())), Reader::read))
            .map_err(|error| os_error(&error, &format!("read {}", self.path.display())))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.reader().take()));
    }
}

impl Drop for TimerFifo {
    fn drop(&mut self) {
        end_detached(|| drop(self.reader().take()));
    }
}
