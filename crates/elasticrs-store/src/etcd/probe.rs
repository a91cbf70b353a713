//! Identifies the program that listens on a port, after that program has closed a connection without an answer.

use std::net::SocketAddr;

use crate::coordination::probe::answer;
use crate::coordination::wire::MAGIC;

/// Number of bytes to wait for. A TLS alert has seven bytes, and the server then closes the connection.
const LEAST: usize = 7;

/// Returns true if the peer speaks TLS. Sends an empty client hello, which a TLS server answers with an alert.
pub(super) async fn speaks_tls(peer: SocketAddr) -> bool {
    matches!(answer(peer, &[0x16, 3, 1, 0, 4, 1, 0, 0, 0], LEAST).await, Some([0x15 | 0x16, 3, ..]))
}

/// Returns true if the peer speaks HTTP/2 without TLS. Such a server first sends a SETTINGS frame.
pub(super) async fn speaks_plainly(peer: SocketAddr) -> bool {
    let greeting = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    matches!(answer(peer, &greeting, LEAST).await, Some([_, _, _, 4, ..]))
}

/// Returns true if the peer is a coordination store of this project. Sends a frame of length zero, which makes
/// such a store answer with its magic bytes.
pub(super) async fn is_own_store(peer: SocketAddr) -> bool {
    answer(peer, &[&MAGIC[..], &[0; 4]].concat(), LEAST).await == Some(MAGIC)
}
