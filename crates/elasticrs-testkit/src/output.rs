//! Commands about what a worker writes.

use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd};

use crate::{Problem, Request, pause_for_ever};

/// `lines N BYTES`: N lines of BYTES bytes each, the newline included; every line begins with its number.
pub fn lines(request: &mut Request) -> Result<(), Problem> {
    let (count, bytes): (u64, usize) = (request.number()?, request.number()?);
    request.ready()?;
    let mut out = io::BufWriter::with_capacity(64 * 1024, io::stdout().lock());
    for number in 0..count {
        let number = number.to_string();
        let padding = bytes.saturating_sub(number.len() + 1);
        writeln!(out, "{number}{}", ".".repeat(padding))?;
    }
    out.flush()?;
    Ok(())
}

/// `half-line`: a line without its end, then nothing more.
pub fn half_line(request: &Request) -> Result<(), Problem> {
    request.ready()?;
    let mut out = io::stdout();
    out.write_all(b"half a line")?;
    out.flush()?;
    pause_for_ever();
}

/// `close-stdout`: closes standard output and goes on.
pub fn close(request: &Request) -> Result<(), Problem> {
    request.ready()?;
    io::stdout().flush()?;
    // SAFETY: standard output is not used again: nothing follows but the pause.
    drop(unsafe { OwnedFd::from_raw_fd(1) });
    pause_for_ever();
}
