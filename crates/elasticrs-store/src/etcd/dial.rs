//! Connects to an endpoint and authenticates, so that calls can be made.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::Error as TlsError;
use tokio_rustls::rustls::pki_types::ServerName;

use super::errors::{EtcdError, Status, code};
use super::grpc::{CallError, Channel};
use super::messages::{AuthenticateRequest, AuthenticateResponse};
use super::tls::{self, Files, Identity, explain};
use crate::session::error::{Failure, StoreError};
use crate::session::network::{MAGIC, answer, connect, endpoint, is_tcp_store, plain, resolve};
use crate::types::{LostKind, MAX_ANSWER};

/// Number of bytes to read before the answer is examined. A TLS alert has seven bytes, and the server closes the
/// connection after the alert.
const LEAST: usize = 7;

/// Options of an etcd client: endpoints, credentials and time limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Hosts and ports of the etcd members.
    pub endpoints: Vec<(String, u16)>,
    /// Prefix that is added to each key.
    pub prefix: String,
    /// Certificate files for TLS. `None` to connect without TLS. The files are read again for each connection, because
    /// certificates are renewed in place.
    pub tls: Option<Files>,
    /// Name and password of the etcd user. `None` to connect without authentication.
    pub user: Option<(String, String)>,
    /// Time to live of the session's lease, as requested. etcd may grant a longer one.
    pub ttl: Duration,
    /// ID and time to live of the lease for keys that outlive the session. `None` to put these keys without a lease.
    pub job_lease: Option<(i64, Duration)>,
    /// Time limit for opening the session. It includes name lookups, and covers all endpoints together.
    pub connect_timeout: Duration,
    /// Time limit for a request, including all its retries.
    pub read_timeout: Duration,
    /// Time after which the client stops its keep-alives if the user of the session fetches no events. `None` if it
    /// never does.
    pub stall_timeout: Option<Duration>,
    /// Settings for links. Links are connections between sessions, through which a session notices the end of another
    /// one before its lease expires. `None` to disable links.
    ///
    /// Ignored if no other process can announce the end of this session after this process has died.
    pub links: Option<Site>,
}

/// Settings for the links of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Name of a group of sessions. Only sessions of the same group connect to each other.
    pub scope: String,
    /// Host name or address at which other sessions can reach this machine, or `None`. It is published in addition to
    /// the local address of the connection to etcd.
    pub host: Option<String>,
}

/// A connection to one member.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) channel: Channel,
    /// Host and port of the endpoint, for messages.
    pub(super) at: String,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    /// Task that runs the connection. It finishes when the connection ends. Dropping the `JoinSet` closes the
    /// connection.
    driver: JoinSet<Result<(), h2::Error>>,
    record: Rc<RefCell<PeerRecord>>,
    tls: Option<Arc<Identity>>,
}

impl Link {
    /// Waits until the connection ends, and returns the reason.
    pub(super) async fn ended(&mut self) -> StoreError {
        let why = match self.driver.join_next().await {
            Some(Ok(Err(error))) => {
                // Use the recorded TLS error, because the HTTP/2 library keeps only its text.
                if let (Some(error), Some(identity)) = (&self.record.borrow().tls, &self.tls) {
                    return tls_failure(&self.at, error, identity);
                }
                error.get_io().map_or_else(|| error.to_string(), plain)
            }
            Some(Ok(Ok(()))) | None => "it was closed".into(),
            Some(Err(error)) => error.to_string(),
        };
        // Prefer a recorded write error. The kernel reports a socket error only once, so if a write has failed, reads
        // do not see the cause.
        let why = self.record.borrow().unwritten.clone().unwrap_or(why);
        StoreError::new(LostKind::Closed, format!("the connection to etcd at {} broke: {why}", self.at))
    }

    /// Returns the connection's TLS error, or `error` if there is none. If the server rejects the client's certificate
    /// after the handshake, `error` reports only a broken connection.
    pub(super) async fn explain(&mut self, error: StoreError) -> StoreError {
        if error.kind != LostKind::Closed {
            return error;
        }
        match timeout(REASON_LIMIT, self.ended()).await {
            Ok(own) if own.kind == LostKind::Tls => own,
            _ => error,
        }
    }

    /// Closes the connection and waits until it is closed.
    pub(super) async fn close(&mut self) {
        self.driver.shutdown().await;
    }

    /// Determines why the first call on this connection failed. For example, the peer may be a different program.
    pub(super) async fn judge(&mut self, error: CallError) -> Failure {
        let CallError::Broken(_) = error else { return Failure::of(error, &self.at) };
        // Prefer the connection's error, because it is more specific than the call's.
        let own = timeout(REASON_LIMIT, self.ended()).await;
        let stranger = stranger(&self.record.borrow().opening);
        match (own, stranger) {
            (_, Some(why)) => Failure::Fatal(not_ours(&self.at, why)),
            (Ok(error), None) if error.kind == LostKind::Tls => Failure::Fatal(error),
            (Ok(_), None) if self.is_dumb() && speaks_tls(self.peer).await => {
                let why = format!("etcd at {} asks for TLS, and none was asked for here", self.at);
                Failure::fatal(LostKind::Tls, why)
            }
            (Ok(_), None) if self.is_dumb() && is_own_store(self.peer).await => {
                Failure::Fatal(not_ours(&self.at, "it is a store of elasticrs' own"))
            }
            (Ok(error), None) => Failure::Retryable(error),
            (Err(_), None) => Failure::of(error, &self.at),
        }
    }

    /// Returns true if the connection does not use TLS and no byte has been received on it.
    fn is_dumb(&self) -> bool {
        self.tls.is_none() && self.record.borrow().opening.is_empty()
    }
}

/// Hint that is appended to etcd's out-of-space error. The member that returns the error is not necessarily the
/// one that is out of space.
const NO_SPACE: &str = ". One of the members has raised this alarm (`etcdctl alarm list`), and all refuse writes until it is \
                        disarmed: free space there (compact, defrag), then `etcdctl alarm disarm`";

/// Timeout for reading the error reason from a broken connection.
const REASON_LIMIT: Duration = Duration::from_millis(200);

impl Failure {
    /// Converts the error of a call to a `Failure`, which says whether a retry can succeed.
    pub(super) fn of(error: CallError, at: &str) -> Self {
        let Status { code, error, message } = match error {
            CallError::Broken(why) | CallError::Reset(why) => {
                return Self::retryable(LostKind::Closed, format!("the connection to etcd at {at} broke: {why}"));
            }
            // Retry, because a proxy may send a response that is not from etcd while the etcd member is down.
            CallError::Foreign(why) => return Self::Retryable(not_ours(at, &why)),
            // Do not retry, because the answer would be too large again.
            CallError::TooLarge(length) => {
                let why = format!("etcd at {at} sent an answer of {length} bytes; the limit is {MAX_ANSWER}");
                return Self::fatal(LostKind::Limit, why);
            }
            CallError::Status(status) => status,
        };
        let hint = if error == Some(EtcdError::NoSpace) { NO_SPACE } else { "" };
        let kind = match code {
            _ if matches!(error, Some(EtcdError::AuthRevisionOld | EtcdError::TooManyRequests)) => LostKind::Timeout,
            _ if matches!(error, Some(EtcdError::AuthFailed | EtcdError::UserEmpty)) => LostKind::Denied,
            _ if matches!(error, Some(EtcdError::RequestTooLarge | EtcdError::TooManyOps)) => LostKind::Limit,
            code::PERMISSION_DENIED | code::UNAUTHENTICATED => LostKind::Denied,
            code::RESOURCE_EXHAUSTED => LostKind::Limit,
            code::UNIMPLEMENTED => return Self::Retryable(not_ours(at, "it does not know etcd's API v3")),
            code::INVALID_ARGUMENT | code::NOT_FOUND | code::FAILED_PRECONDITION | code::OUT_OF_RANGE => {
                LostKind::Protocol
            }
            // Retry after any other code, including unknown ones, because etcd may be electing a leader, or the member
            // may be slow or stopping.
            _ => LostKind::Timeout,
        };
        let error = StoreError::new(kind, format!("etcd at {at}: {message}{hint}"));
        // Retry `UNAUTHENTICATED`, because the token may have expired and a new connection gets a new token.
        if kind == LostKind::Timeout || code == code::UNAUTHENTICATED {
            Self::Retryable(error)
        } else {
            Self::Fatal(error)
        }
    }
}

/// Progress of a connection attempt, for the error message after a timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Reading the TLS certificate files.
    Files,
    Resolve,
    Connect,
    Tls(SocketAddr),
    /// The connection is open, and the first calls on it are in progress.
    Calls(SocketAddr),
}

/// Connects to an endpoint and authenticates. If the endpoint has several addresses, each gets an equal share of
/// `patience`. The caller must limit the total time.
pub(super) async fn dial(
    options: &Options,
    member: usize,
    patience: Duration,
    stage: &Cell<Stage>,
) -> Result<Link, Failure> {
    let (host, port) = &options.endpoints[member];
    let at = endpoint(host, *port);
    stage.set(Stage::Files);
    let identity = match &options.tls {
        // Retry, because another program may be replacing the files right now.
        Some(files) => Some(tls::load(files).await.map_err(|why| Failure::retryable(LostKind::Tls, why))?),
        None => None,
    };
    stage.set(Stage::Resolve);
    let addresses = resolve(host, *port).await.map_err(Failure::Retryable)?;
    stage.set(Stage::Connect);
    let connected = connect(&at, &addresses, patience, |_| ()).await;
    let (stream, peer) = connected.map_err(Failure::Retryable)?;
    let broken = |error: &io::Error| Failure::retryable(LostKind::Closed, format!("lost {at}: {}", plain(error)));
    // Without `TCP_NODELAY`, small messages would be delayed. If setting it fails, use the connection anyway.
    let _ = stream.set_nodelay(true);
    let local = stream.local_addr().map_err(|error| broken(&error))?;
    let record = Rc::<RefCell<PeerRecord>>::default();
    let (requests, driver) = match &identity {
        None => start(Recorder { stream, record: Rc::clone(&record) }).await,
        Some(identity) => {
            stage.set(Stage::Tls(peer));
            let stream = match encrypted(&at, host, identity, stream).await {
                Err(Failure::Retryable(_)) if speaks_plainly(peer).await => {
                    let why = format!("etcd at {at} does not speak TLS, which was asked for here");
                    return Err(Failure::fatal(LostKind::Tls, why));
                }
                stream => stream?,
            };
            start(Recorder { stream, record: Rc::clone(&record) }).await
        }
    }
    .map_err(|error| Failure::retryable(LostKind::Closed, format!("lost {at}: {error}")))?;
    stage.set(Stage::Calls(peer));
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let channel = Channel::new(requests, format!("{scheme}://{at}"));
    let mut link = Link { channel, at, local, peer, driver, record, tls: identity };
    authenticate(&mut link, options).await?;
    Ok(link)
}

type Started = (SendRequest<Bytes>, JoinSet<Result<(), h2::Error>>);

/// Flow-control window of an HTTP/2 stream, in bytes.
const WINDOW: u32 = 1 << 20;

async fn start<S: AsyncRead + AsyncWrite + Unpin + 'static>(stream: S) -> Result<Started, h2::Error> {
    let mut builder = Builder::new();
    builder.enable_push(false).initial_window_size(WINDOW).initial_connection_window_size(4 * WINDOW);
    let (requests, connection) = builder.handshake(stream).await?;
    let mut driver = JoinSet::new();
    driver.spawn_local(connection);
    Ok((requests, driver))
}

async fn encrypted(
    at: &str,
    host: &str,
    identity: &Identity,
    stream: TcpStream,
) -> Result<tokio_rustls::client::TlsStream<TcpStream>, Failure> {
    let name = ServerName::try_from(host.to_owned());
    let name = name.map_err(|error| Failure::fatal(LostKind::Tls, format!("`{host}`: {error}")))?;
    TlsConnector::from(Arc::clone(&identity.config)).connect(name, stream).await.map_err(|error| {
        match tls_error(&error) {
            Some(error) => Failure::Fatal(tls_failure(at, error, identity)),
            // Retry, because this error does not prove that the peer lacks TLS. A member that is shutting down causes
            // the same error.
            None => Failure::retryable(
                LostKind::Closed,
                format!("etcd at {at} broke off the TLS handshake: {}", plain(&error)),
            ),
        }
    })
}

fn tls_error(error: &io::Error) -> Option<&TlsError> {
    error.get_ref()?.downcast_ref()
}

fn tls_failure(at: &str, error: &TlsError, identity: &Identity) -> StoreError {
    StoreError::new(LostKind::Tls, format!("no TLS connection with etcd at {at}: {}", explain(error, identity)))
}

async fn authenticate(link: &mut Link, options: &Options) -> Result<(), Failure> {
    let Some((name, password)) = options.user.clone() else { return Ok(()) };
    let asked = AuthenticateRequest { name, password };
    match link.channel.call::<AuthenticateResponse>("/etcdserverpb.Auth/Authenticate", &asked).await {
        Ok(answer) => link.channel.set_token(&answer.token).map_err(|error| Failure::of(error, &link.at)),
        // Authentication is disabled in this etcd, so no token is needed.
        Err(error) if error.is(EtcdError::AuthDisabled) => Ok(()),
        Err(error) => Err(link.judge(error).await),
    }
}

/// Returns the error for certificate files that could not be read within `patience`.
pub(super) fn unread(files: &Files, patience: Duration) -> StoreError {
    let seconds = patience.as_secs_f64();
    let why = format!("could not read {files} within {seconds} s: their file system does not answer");
    StoreError::new(LostKind::Timeout, why)
}

/// Returns the error for a connection attempt that timed out in `stage`.
pub(super) async fn too_late(options: &Options, member: usize, stage: Stage, patience: Duration) -> StoreError {
    let (host, port) = &options.endpoints[member];
    let (at, seconds) = (endpoint(host, *port), patience.as_secs_f64());
    let (kind, message) = match stage {
        Stage::Files => return unread(&options.tls.clone().unwrap_or_default(), patience),
        Stage::Resolve => (LostKind::Resolve, format!("the name `{host}` was not resolved within {seconds} s")),
        Stage::Connect => {
            (LostKind::Timeout, format!("no answer from {at} within {seconds} s: host down, or a firewall"))
        }
        Stage::Tls(peer) | Stage::Calls(peer) if is_tcp_store(peer).await => {
            return not_ours(&at, "it is a TCPStore of torch");
        }
        Stage::Tls(_) => {
            (LostKind::Timeout, format!("{at} accepted the connection, but there was no TLS within {seconds} s"))
        }
        Stage::Calls(_) => {
            (LostKind::Timeout, format!("{at} accepted the connection, but etcd did not answer within {seconds} s"))
        }
    };
    StoreError::new(kind, message)
}

fn not_ours(at: &str, why: &str) -> StoreError {
    StoreError::new(LostKind::NotOurs, format!("no etcd with API v3 at {at}: {why}"))
}

/// Describes the program that sent the bytes in `opening`. Returns `None` if there are no bytes or if the program
/// may be an HTTP/2 server.
fn stranger(opening: &[u8]) -> Option<&'static str> {
    match opening {
        [] => None,
        _ if opening.starts_with(b"HTTP/") => Some("an HTTP server, or an etcd that only knows API v2"),
        [0x15, 3, ..] => Some("it asks for TLS"),
        // This is the start of an HTTP/2 SETTINGS frame: three bytes of length, followed by the frame type 4.
        [_, _, _, 4, ..] => None,
        _ => Some("another program uses the port"),
    }
}

/// Details of a connection, recorded for error messages because the HTTP/2 library's own messages are not
/// specific enough.
#[derive(Debug, Default)]
struct PeerRecord {
    /// The first bytes that the peer sent.
    opening: Vec<u8>,
    tls: Option<TlsError>,
    /// Text of the first write error.
    unwritten: Option<String>,
}

/// Stream wrapper that fills a [`PeerRecord`] with the peer's first bytes and the I/O errors.
struct Recorder<S> {
    stream: S,
    record: Rc<RefCell<PeerRecord>>,
}

/// Number of initial bytes to record. It is the length of an HTTP/2 frame header.
const OPENING: usize = 9;

impl<S: AsyncRead + Unpin> AsyncRead for Recorder<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let mut record = self.record.borrow_mut();
        let left = OPENING.saturating_sub(record.opening.len());
        record.opening.extend(buffer.filled()[before..].iter().take(left));
        if let Poll::Ready(Err(error)) = &read {
            record.tls = tls_error(error).cloned();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Recorder<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, bytes) {
            // Pretend that the write succeeded, so that the HTTP/2 library continues to read. The peer may still send
            // its reason for closing the connection.
            Poll::Ready(Err(error)) => {
                self.record.borrow_mut().unwritten.get_or_insert_with(|| plain(&error));
                Poll::Ready(Ok(bytes.len()))
            }
            written => written,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx).map(|_| Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

// --- protocol of a server that has closed a connection without an answer -------------------------------------

/// Returns true if the peer speaks TLS. Sends an empty client hello, which a TLS server answers with an alert.
async fn speaks_tls(peer: SocketAddr) -> bool {
    matches!(answer(peer, &[0x16, 3, 1, 0, 4, 1, 0, 0, 0], LEAST).await, Some([0x15 | 0x16, 3, ..]))
}

/// Returns true if the peer speaks HTTP/2 without TLS. An HTTP/2 server first sends a SETTINGS frame.
async fn speaks_plainly(peer: SocketAddr) -> bool {
    let greeting = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    matches!(answer(peer, &greeting, LEAST).await, Some([_, _, _, 4, ..]))
}

/// Returns true if the peer is a coordination store of this project. Sends a frame of length zero, which makes
/// such a store answer with its magic bytes.
async fn is_own_store(peer: SocketAddr) -> bool {
    answer(peer, &[&MAGIC[..], &[0; 4]].concat(), LEAST).await == Some(MAGIC)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use super::*;

    #[test]
    fn the_error_of_a_failed_write_is_recorded() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let (stream, peer) = UnixStream::pair().unwrap();
            drop(peer);
            let record = Rc::<RefCell<PeerRecord>>::default();
            let mut stream = Recorder { stream, record: Rc::clone(&record) };
            stream.write_all(b"lost").await.unwrap();
            assert_eq!(record.borrow().unwritten.as_deref(), Some("broken pipe"));
        });
    }

    fn failure(code: u32, text: &str) -> Failure {
        Failure::of(CallError::Status(Status::new(code, text)), "host:2379")
    }

    #[test]
    fn a_full_etcd_database_is_reported_with_a_hint_about_etcdctl_alarm() {
        let error = failure(code::RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded").into_error();
        assert_eq!((error.kind, error.message.contains("etcdctl alarm")), (LostKind::Limit, true));
    }

    #[test]
    fn the_kind_of_an_error_depends_on_its_text_or_else_on_its_code() {
        let cases = [
            (3, "etcdserver: revision of auth store is old", LostKind::Timeout, true),
            (8, "etcdserver: too many requests", LostKind::Timeout, true),
            (3, "etcdserver: user name is empty", LostKind::Denied, false),
            (3, "etcdserver: authentication failed, invalid user ID or password", LostKind::Denied, false),
            (3, "etcdserver: request is too large", LostKind::Limit, false),
            (3, "etcdserver: too many operations in txn request", LostKind::Limit, false),
            (3, "etcdserver: too many users of this, and too large", LostKind::Protocol, false),
            (7, "no text of etcd", LostKind::Denied, false),
            (16, "etcdserver: invalid auth token", LostKind::Denied, true),
            (8, "grpc: received message larger than max", LostKind::Limit, false),
            (12, "unknown service", LostKind::NotOurs, true),
            (14, "etcdserver: no leader", LostKind::Timeout, true),
            (2, "no code of etcd", LostKind::Timeout, true),
        ];
        for (code, text, kind, is_retried) in cases {
            let failure = failure(code, text);
            assert_eq!(
                (matches!(failure, Failure::Retryable(_)), failure.into_error().kind),
                (is_retried, kind),
                "{text}"
            );
        }
    }
}
