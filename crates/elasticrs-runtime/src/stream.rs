//! Bytes of a connection, without a buffer that idle connections would hold.

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::TcpStream;
use tokio::task::yield_now;

/// Waits for bytes; 0: the other side has closed.
pub async fn read(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

/// Sends all of it.
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

/// Says that nothing more comes, and reads away up to `most` bytes that the other side still sends, until it closes:
/// closing a socket with unread bytes would reset the connection, and what was sent last might be lost with it.
pub async fn part(stream: &TcpStream, most: usize) -> io::Result<()> {
    shutdown(stream.as_raw_fd(), Shutdown::Write)?;
    let mut block = vec![0; 4096];
    let mut left = most;
    while left > 0 {
        match read(stream, &mut block).await? {
            0 => break,
            count => left = left.saturating_sub(count),
        }
        // There may be more at once, always: others, and a time limit, get their turn all the same.
        yield_now().await;
    }
    Ok(())
}
