//! Who is it that does not answer as a store? Asked only then.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elasticrs_runtime::stream;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How a client of torch's `TCPStore` begins, and its question for the number of keys (every release knows both). In
/// one write: some releases drop a client whose greeting comes in pieces.
pub(super) const QUESTION: [u8; 6] = [0, 0xce, 0xf7, 0x85, 0x3c, 7];
/// How long the answer may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether a `TCPStore` of torch (or of an agent, for its workers) listens there.
pub(crate) async fn is_tcp_store(address: SocketAddr) -> bool {
    matches!(timeout(PATIENCE, number_of_keys(address)).await, Ok(Ok(0..=0xffff_ffff)))
}

async fn number_of_keys(address: SocketAddr) -> io::Result<u64> {
    let stream = TcpStream::connect(address).await?;
    stream::write_all(&stream, &QUESTION).await?;
    let mut answer = [0; 8];
    let mut length = 0;
    while length < answer.len() {
        match stream::read(&stream, &mut answer[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
    }
    Ok(u64::from_le_bytes(answer))
}
