//! Identifies the program that listens on a port, after that program has closed a connection without an answer.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elasticrs_runtime::stream;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::coordination::wire::MAGIC;

/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns true if the peer speaks TLS. Sends an empty client hello, which a TLS server answers with an alert.
pub(super) async fn speaks_tls(peer: SocketAddr) -> bool {
    matches!(answer(peer, &[0x16, 3, 1, 0, 4, 1, 0, 0, 0]).await, Some([0x15 | 0x16, 3, ..]))
}

/// Returns true if the peer speaks HTTP/2 without TLS. Such a server first sends a SETTINGS frame.
pub(super) async fn speaks_plainly(peer: SocketAddr) -> bool {
    let greeting = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    matches!(answer(peer, &greeting).await, Some([_, _, _, 4, ..]))
}

/// Returns true if the peer is a coordination store of this project. Sends a frame of length zero, which makes
/// such a store answer with its magic bytes.
pub(super) async fn is_own_store(peer: SocketAddr) -> bool {
    answer(peer, &[&MAGIC[..], &[0; 4]].concat()).await == Some(MAGIC)
}

/// Connects, sends `question`, and returns the first bytes of the answer.
async fn answer(peer: SocketAddr, question: &[u8]) -> Option<[u8; 8]> {
    timeout(PATIENCE, ask(peer, question)).await.ok()?.ok()
}

async fn ask(peer: SocketAddr, question: &[u8]) -> io::Result<[u8; 8]> {
    let stream = TcpStream::connect(peer).await?;
    stream::write_all(&stream, question).await?;
    let mut answer = [0; 8];
    let mut length = 0;
    // Stop after seven bytes, because a TLS alert is seven bytes long and the server then closes the connection.
    while length < answer.len() - 1 {
        match stream::read(&stream, &mut answer[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
    }
    Ok(answer)
}
