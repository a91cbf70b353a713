//! Commands of the test worker that write output.

use std::io::{self, Write};

use crate::{Problem, Request, ready};

/// `lines N BYTES`: prints N lines of BYTES bytes each, including the newline. Each line starts with its number.
pub fn lines(request: &mut Request) -> Result<(), Problem> {
    let (count, bytes): (u64, usize) = (request.number()?, request.number()?);
    ready()?;
    let mut out = io::BufWriter::with_capacity(64 * 1024, io::stdout().lock());
    for number in 0..count {
        let number = number.to_string();
        let padding = bytes.saturating_sub(number.len() + 1);
        writeln!(out, "{number}{}", ".".repeat(padding))?;
    }
    out.flush()?;
    Ok(())
}
