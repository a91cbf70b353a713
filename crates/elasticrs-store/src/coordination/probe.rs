//! Checks whether a port belongs to a `TCPStore` of torch instead of to a coordination store.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elasticrs_runtime::stream;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Handshake of a `TCPStore` client, followed by a request for the number of keys. All releases of torch understand
/// both. They are sent in one write, because some releases close the connection if the handshake arrives in pieces.
pub(super) const QUESTION: [u8; 6] = [0, 0xce, 0xf7, 0x85, 0x3c, 7];
/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns true if a `TCPStore` of torch listens on this address. Also returns true for an agent's worker store,
/// because it uses the same protocol.
pub(crate) async fn is_tcp_store(address: SocketAddr) -> bool {
    answer(address, &QUESTION, 8).await.is_some_and(|keys| u32::try_from(u64::from_le_bytes(keys)).is_ok())
}

/// Connects, sends `question`, and returns the first bytes of the answer. `None` if fewer than `least` bytes arrive.
pub(crate) async fn answer(peer: SocketAddr, question: &[u8], least: usize) -> Option<[u8; 8]> {
    timeout(PATIENCE, ask(peer, question, least)).await.ok()?.ok()
}

async fn ask(peer: SocketAddr, question: &[u8], least: usize) -> io::Result<[u8; 8]> {
    let stream = TcpStream::connect(peer).await?;
    stream::write_all(&stream, question).await?;
    let mut answer = [0; 8];
    let mut length = 0;
    while length < least {
        match stream::read(&stream, &mut answer[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
    }
    Ok(answer)
}
