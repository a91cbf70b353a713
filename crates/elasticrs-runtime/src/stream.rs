//! Reads from and writes to a connection. A connection has no buffer of its own, so idle connections need little
//! memory.

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::TcpStream;
use tokio::task::yield_now;

/// Reads the next bytes into `buffer`. Returns the number of bytes read, or 0 if the peer has closed the
/// connection.
pub async fn read(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

/// Sends all bytes.
pub async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Shuts down the sending side, then reads and discards up to `most` bytes until the peer closes the connection.
/// Without this, closing a socket that has unread bytes would reset the connection, and the peer could lose the
/// last bytes sent to it.
pub async fn part(stream: &TcpStream, most: usize) -> io::Result<()> {
    shutdown(stream.as_raw_fd(), Shutdown::Write)?;
    let mut block = vec![0; 4096];
    let mut left = most;
    while left > 0 {
        match read(stream, &mut block).await? {
            0 => break,
            count => left = left.saturating_sub(count),
        }
        // Yield after each read. The peer may never stop sending, and other tasks and the caller's timeout need their
        // turn.
        yield_now().await;
    }
    Ok(())
}
