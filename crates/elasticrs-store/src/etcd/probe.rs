//! Who is it that closes the connection without a word? Asked only then.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elasticrs_runtime::stream;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::coordination::wire::MAGIC;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether TLS is spoken there: an empty greeting of a client is answered by an alert.
pub(super) async fn speaks_tls(peer: SocketAddr) -> bool {
    matches!(answer(peer, &[0x16, 3, 1, 0, 4, 1, 0, 0, 0]).await, Some([0x15 | 0x16, 3, ..]))
}

/// Whether HTTP/2 is spoken there without TLS: the first frame has settings.
pub(super) async fn speaks_plainly(peer: SocketAddr) -> bool {
    let greeting = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    matches!(answer(peer, &greeting).await, Some([_, _, _, 4, ..]))
}

/// Whether a store of ours is there: it refuses a message without a length in its own words.
pub(super) async fn is_own_store(peer: SocketAddr) -> bool {
    answer(peer, &[&MAGIC[..], &[0; 4]].concat()).await == Some(MAGIC)
}

/// The first bytes of the answer.
async fn answer(peer: SocketAddr, question: &[u8]) -> Option<[u8; 8]> {
    timeout(PATIENCE, ask(peer, question)).await.ok()?.ok()
}

async fn ask(peer: SocketAddr, question: &[u8]) -> io::Result<[u8; 8]> {
    let stream = TcpStream::connect(peer).await?;
    stream::write_all(&stream, question).await?;
    let mut answer = [0; 8];
    let mut length = 0;
    // An alert has seven bytes, and the end of the connection behind it.
    while length < answer.len() - 1 {
        match stream::read(&stream, &mut answer[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
    }
    Ok(answer)
}
