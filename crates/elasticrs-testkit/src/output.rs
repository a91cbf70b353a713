//! Commands of the test worker that write output.

use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::{Problem, Request, ready, say};

/// `lines N BYTES`: prints N lines. Each line starts with its number and is BYTES bytes long, including the
/// newline.
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

/// `notify NAME`: for each line on standard input, sends an empty datagram to the abstract socket NAME and prints
/// `SENT`.
pub fn notify(request: &mut Request) -> Result<(), Problem> {
    let address = SocketAddr::from_abstract_name(request.next()?)?;
    let socket = UnixDatagram::unbound()?;
    ready()?;
    for line in io::stdin().lines() {
        line?;
        socket.send_to_addr(&[], &address)?;
        say("SENT")?;
    }
    Ok(())
}
