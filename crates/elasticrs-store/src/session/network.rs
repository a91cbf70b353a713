//! Name resolution and TCP connections, for the clients of the coordination store and of etcd. [`is_tcp_store`]
//! recognizes a port that belongs to torch's `TCPStore`, which users may name by mistake.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::time::Duration;

use elasticrs_runtime::blocking::BlockingCalls;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::error::StoreError;
use crate::types::LostKind;

/// Formats host and port as `HOST:PORT`, with brackets around an IPv6 address.
pub(crate) fn endpoint(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

thread_local! {
    /// Name lookups in progress, by host name.
    static LOOK_UPS: Rc<BlockingCalls<String, Result<Vec<IpAddr>, String>>> = Rc::default();
}

/// Returns all addresses of the host. The lookup runs on its own thread, because a resolver may hang for longer than
/// the caller is willing to wait.
pub(crate) async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, StoreError> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let unresolved =
        |why: String| StoreError::new(LostKind::Resolve, format!("could not resolve the name `{host}`: {why}"));
    let name = host.to_owned();
    #[allow(clippy::disallowed_methods, reason = "runs on the thread of its own that `run` starts")]
    let look_up = move || {
        let found = (&*name, 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect());
        found.map_err(|error| error.to_string().replace("failed to lookup address information: ", ""))
    };
    let found = LOOK_UPS.with(Rc::clone).run("elasticrs-dns", host.to_owned(), look_up).await;
    match found.map_err(|error| unresolved(error.to_string()))?.map_err(unresolved)? {
        addresses if addresses.is_empty() => Err(unresolved("it has no address".into())),
        addresses => Ok(addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect()),
    }
}

/// Connects to the first address that accepts a connection, and calls `begun` before each attempt. Several addresses
/// share `patience` equally. A single address has no time limit, because all callers limit the total time.
pub(crate) async fn connect(
    at: &str,
    addresses: &[SocketAddr],
    patience: Duration,
    begun: impl Fn(SocketAddr),
) -> Result<(TcpStream, SocketAddr), StoreError> {
    // Limit the time for each address, so that an address that does not answer leaves time for the others.
    let share = patience / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
    let share = if addresses.len() == 1 { Duration::MAX } else { share };
    let mut kinds = Vec::new();
    let mut said = Vec::new();
    for address in addresses {
        begun(*address);
        let (kind, why) = match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok((stream, *address)),
            Ok(Err(error)) => (kind_of(&error), plain(&error)),
            Err(_) => (LostKind::Timeout, "no answer".to_owned()),
        };
        kinds.push(kind);
        said.push(format!("{}: {why}", address.ip()));
    }
    // Prefer a refusal over other errors, because it shows that the host is up.
    let kind = kinds.iter().find(|kind| **kind == LostKind::Refused).or(kinds.first()).copied();
    let message = format!("could not connect to {at} ({})", said.join("; "));
    Err(StoreError::new(kind.unwrap_or(LostKind::Resolve), message))
}

fn kind_of(error: &io::Error) -> LostKind {
    if matches!(error.raw_os_error(), Some(nix::libc::EMFILE | nix::libc::ENFILE)) {
        return LostKind::Limit;
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => LostKind::Refused,
        io::ErrorKind::TimedOut => LostKind::Timeout,
        _ => LostKind::Unreachable,
    }
}

/// Returns the kernel's error message without the error number.
pub(crate) fn plain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(errno) => nix::errno::Errno::from_raw(errno).desc().to_lowercase(),
        None => error.to_string(),
    }
}

/// Magic bytes that each side of a connection to a coordination store sends first. They start with a non-ASCII byte to
/// rule out text protocols.
pub const MAGIC: [u8; 8] = *b"\x93ERS\r\n\x1a\n";
/// Handshake of a `TCPStore` client, followed by a request for the number of keys. All releases of torch understand
/// both. They are sent in one write, because some releases close the connection if the handshake arrives in pieces.
pub(crate) const QUESTION: [u8; 6] = [0, 0xce, 0xf7, 0x85, 0x3c, 7];
/// Time limit for the answer of a peer that may be a `TCPStore`.
const PATIENCE: Duration = Duration::from_secs(1);

/// Returns true if a `TCPStore` of torch listens on this address. Also returns true for an agent's worker store,
/// because it uses the same protocol.
pub(crate) async fn is_tcp_store(address: SocketAddr) -> bool {
    answer(address, &QUESTION, 8).await.is_some_and(|keys| u32::try_from(u64::from_le_bytes(keys)).is_ok())
}

/// Connects to a peer, sends `question`, and returns the first bytes of the answer. Returns `None` if fewer than
/// `least` bytes arrive.
pub(crate) async fn answer(peer: SocketAddr, question: &[u8], least: usize) -> Option<[u8; 8]> {
    timeout(PATIENCE, ask(peer, question, least)).await.ok()?.ok()
}

async fn ask(peer: SocketAddr, question: &[u8], least: usize) -> io::Result<[u8; 8]> {
    let mut stream = TcpStream::connect(peer).await?;
    stream.write_all(question).await?;
    let mut answer = [0; 8];
    let mut length = 0;
    while length < least {
        match stream.read(&mut answer[length..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => length += more,
        }
    }
    Ok(answer)
}
