//! Connects to a store and opens a session: resolves the host name, connects, and carries out the handshake.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use elasticrs_sys::clock::boot_now;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::access::{self, Direction};
use super::protocol::{Answer, Digest, Hello, Pace, Request, Secret, VERSION};
use super::wire::{Broken, Frames, MAGIC, MAX_ANSWER, Malformed};
use crate::secrets;
use crate::session::client::Guard;
use crate::session::error::StoreError;
use crate::session::events::MetStore;
use crate::session::network::{self, endpoint, is_tcp_store, plain, resolve};
use crate::types::{LostKind, Scope, StoreId};

/// Endpoint, credentials and timeouts of a client.
#[derive(Debug, Clone)]
pub struct Options {
    pub host: String,
    pub port: u16,
    pub run_id: String,
    /// The token of `scope`, or the store's token if `scope` is `None`.
    pub token: Option<Vec<u8>>,
    /// Keys that the client may use. Sent to the store together with the proof that the client knows the token.
    pub scope: Scope,
    pub interval: Duration,
    /// Number of intervals without a keep-alive after which the session ends.
    pub attempts: u16,
    /// Total time limit for name lookup, connection and handshake.
    pub connect_timeout: Duration,
    /// Time after which keep-alives stop if the user does not fetch events. `None` if they never stop.
    pub stall_timeout: Option<Duration>,
    /// True if the session survives a broken connection. In that case, the client reconnects until the lease expires,
    /// and may send a request twice.
    pub resume: bool,
    /// Store that the caller expects, because an earlier client was connected to it. `None` to accept any store.
    ///
    /// Connecting to a different store fails, unless the different store has restored the state of the expected one.
    pub met: Option<MetStore>,
}

impl From<Malformed> for StoreError {
    fn from(error: Malformed) -> Self {
        Self::new(LostKind::Protocol, format!("the store sent an invalid message: {error}"))
    }
}

/// An open session.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) stream: TcpStream,
    pub(super) frames: Frames,
    pub(super) local: SocketAddr,
    pub(super) met: Met,
}

/// Result of the handshake.
#[derive(Debug)]
pub(super) struct Met {
    pub(super) session: u64,
    pub(super) secret: Secret,
    pub(super) store: StoreId,
    pub(super) revision: u64,
    pub(super) pace: Pace,
    /// Time at which the client sent its hello, in nanoseconds on the boot clock. The session lasts at least until
    /// `sent` plus its time to live, because the store receives the hello after `sent`.
    pub(super) sent: u64,
}

/// Current step of opening a session, for the error message after a timeout.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Resolve,
    Connect(SocketAddr),
    Handshake(SocketAddr),
}

impl Options {
    pub(super) fn endpoint(&self) -> String {
        endpoint(&self.host, self.port)
    }
}

/// Opens a session.
pub(super) async fn open(options: &Options) -> Result<Opened, StoreError> {
    let stage = Cell::new(Stage::Resolve);
    let opened = timeout(options.connect_timeout, open_within(options, &stage)).await;
    opened.unwrap_or_else(|_| {
        let (at, seconds) = (options.endpoint(), options.connect_timeout.as_secs_f64());
        Err(match stage.get() {
            Stage::Resolve => StoreError::new(
                LostKind::Resolve,
                format!("the name `{}` was not resolved within {seconds} s", options.host),
            ),
            Stage::Connect(address) => StoreError::new(
                LostKind::Timeout,
                format!("no answer from {at} ({}) within {seconds} s: host down, or a firewall", address.ip()),
            ),
            Stage::Handshake(address) => StoreError::new(
                LostKind::Timeout,
                format!(
                    "{at} ({}) accepted the connection, but no store answered within {seconds} s: it hangs, or another \
                     program uses the port",
                    address.ip()
                ),
            ),
        })
    })
}

async fn open_within(options: &Options, stage: &Cell<Stage>) -> Result<Opened, StoreError> {
    let addresses = resolve(&options.host, options.port).await?;
    let begun = |address| stage.set(Stage::Connect(address));
    let (stream, peer) = network::connect(&options.endpoint(), &addresses, options.connect_timeout, begun).await?;
    stage.set(Stage::Handshake(peer));
    let broken = |error: &io::Error| StoreError::new(LostKind::Closed, format!("lost {}: {error}", options.endpoint()));
    // Disable Nagle's algorithm, because it would delay small messages. Ignore an error, which only costs latency.
    let _ = stream.set_nodelay(true);
    let local = stream.local_addr().map_err(|error| broken(&error))?;
    let mut greeter = Greeter { options, resume: None, met: options.met, stream, frames: Frames::new(MAX_ANSWER) };
    let met = tokio::select! {
        met = greeter.meet() => met,
        () = until_suspicious(options, peer) => return Err(not_ours(options, TCP_STORE)),
    };
    let met = match met {
        Ok(met) => met,
        // The server has closed the connection without answering. It is either a torch `TCPStore` or an agent that is
        // exiting, so probe the port to find out.
        Err(error) if error.kind == LostKind::Closed && greeter.frames.is_untouched() => {
            return Err(if is_tcp_store(peer).await { not_ours(options, TCP_STORE) } else { error });
        }
        Err(error) => return Err(error),
    };
    let Greeter { stream, frames, .. } = greeter;
    Ok(Opened { stream, frames, local, met })
}

/// Resumes a session on a new connection to the store. `session` is its ID and its secret. Fails if that takes longer
/// than `patience`, or if it is another store than `met`, to which the client was connected before.
pub(super) async fn reopen(
    options: &Options,
    guard: &dyn Guard,
    session: (u64, Secret),
    met: Option<MetStore>,
    patience: Duration,
) -> Result<Opened, StoreError> {
    let end = Instant::now() + patience;
    let at = options.endpoint();
    let late =
        |_| StoreError::new(LostKind::Timeout, format!("no answer from {at} within {} s", patience.as_secs_f64()));
    let connected = async {
        let addresses = resolve(&options.host, options.port).await?;
        network::connect(&at, &addresses, patience, |_| ()).await
    };
    let (stream, peer) = timeout_at(end, connected).await.map_err(late)??;
    let _ = stream.set_nodelay(true);
    let local = stream.local_addr().unwrap_or(peer);
    guard.resuming(stream.as_fd()).await;
    let (resume, frames) = (Some(session), Frames::new(MAX_ANSWER));
    let mut greeter = Greeter { options, resume, met, stream, frames };
    let met = timeout_at(end, greeter.meet()).await.map_err(late);
    let Greeter { stream, frames, .. } = greeter;
    match met {
        Ok(Ok(met)) => Ok(Opened { stream, frames, local, met }),
        Ok(Err(error)) | Err(error) => {
            // Reset the connection, because the store may already use it for the session. After a normal close, the
            // store would conclude that the client has exited, and would end the session.
            let _ = stream.set_zero_linger();
            guard.resumed(false);
            Err(error)
        }
    }
}

struct Greeter<'a> {
    options: &'a Options,
    /// Session ID and secret to resume. `None` to open a new session.
    resume: Option<(u64, Secret)>,
    met: Option<MetStore>,
    stream: TcpStream,
    frames: Frames,
}

impl Greeter<'_> {
    async fn meet(&mut self) -> Result<Met, StoreError> {
        let nonce = secrets::random()
            .map_err(|error| StoreError::new(LostKind::Protocol, format!("no random bytes: {}", plain(&error))))?;
        let milliseconds = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let hello = Hello {
            version: VERSION,
            run_id: self.options.run_id.clone(),
            interval_ms: milliseconds(self.options.interval),
            attempts: self.options.attempts,
            challenge: nonce,
            resume: self.resume,
            confirmed: self.met.map(|(store, _)| store),
        };
        let sent = boot_now();
        self.send(&[&MAGIC[..], &Request::Hello(hello).encode()].concat()).await;
        let (run_id, challenge) = match self.answer().await? {
            Answer::Welcome { version, .. } if version.0 != VERSION.0 => {
                return Err(self.said(
                    LostKind::Version,
                    &format!("speaks protocol version {}, this agent version {}", version.0, VERSION.0),
                ));
            }
            Answer::Welcome { run_id, challenge, .. } => (run_id, challenge),
            _ => return Err(Malformed("no welcome").into()),
        };
        if run_id != self.options.run_id {
            return Err(self.said(LostKind::Run, &format!("serves run {run_id}, this is run {}", self.options.run_id)));
        }
        self.prove(challenge.as_ref()).await?;
        match self.answer().await? {
            Answer::Ready { session, revision, pace, proof, secret, ids } => {
                self.check(proof.as_ref(), &nonce)?;
                let Some(&store) = ids.first() else { return Err(Malformed("a store without a name").into()) };
                if let Some((_, seen)) = self.met.filter(|(_, seen)| revision < *seen) {
                    let what = format!(
                        "went back from revision {seen} to {revision}: it was started with an older copy of its state"
                    );
                    return Err(self.said(LostKind::Other, &what));
                }
                if !pace.is_valid() {
                    return Err(Malformed("no time to live").into());
                }
                Ok(Met { session, secret, store, revision, pace, sent })
            }
            _ => Err(Malformed("no session").into()),
        }
    }

    fn said(&self, kind: LostKind, what: &str) -> StoreError {
        StoreError::new(kind, format!("the store at {} {what}", self.options.endpoint()))
    }

    async fn prove(&mut self, challenge: Option<&Digest>) -> Result<(), StoreError> {
        match (challenge, &self.options.token) {
            (None, None) => Ok(()),
            (Some(challenge), Some(token)) => {
                let proof = access::proof(token, challenge, &self.options.run_id, Direction::Client);
                let scope = self.options.scope.clone();
                self.send(&Request::Prove { proof, scope }.encode()).await;
                Ok(())
            }
            (Some(_), None) => Err(self.said(LostKind::Token, "requires a token, and none was given here")),
            (None, Some(_)) => Err(self.said(LostKind::Token, "has no token, but one was given here")),
        }
    }

    fn check(&self, proof: Option<&Digest>, nonce: &Digest) -> Result<(), StoreError> {
        let Some(token) = &self.options.token else { return Ok(()) };
        let run_id = &self.options.run_id;
        if proof.is_some_and(|proof| access::is_proof(proof, token, nonce, run_id, Direction::Store)) {
            return Ok(());
        }
        Err(self.said(LostKind::Token, "did not prove that it knows the token"))
    }

    async fn send(&mut self, bytes: &[u8]) {
        // Ignore the error, because the next read reports why the connection broke.
        let _ = self.stream.write_all(bytes).await;
    }

    async fn answer(&mut self) -> Result<Answer, StoreError> {
        let mut chunk = [0; 4096];
        loop {
            match self.frames.cut() {
                Ok(Some(frame)) => match Answer::decode(frame)? {
                    Answer::Refused { kind, message } => return Err(self.said(kind, &format!("refused: {message}"))),
                    answer => return Ok(answer),
                },
                Ok(None) => {}
                Err(Broken::Foreign) => return Err(not_ours(self.options, what(self.frames.unread()))),
                Err(error @ Broken::Length(_)) => return Err(self.said(LostKind::Protocol, &format!("sent {error}"))),
            }
            match self.stream.read(&mut chunk).await {
                Ok(0) if self.frames.is_untouched() => {
                    // The peer may be another program, or a proxy whose store is not running yet. Report `Closed`,
                    // because a retry may succeed in the case of a proxy.
                    let what =
                        "closed the connection during the handshake: another program, or a proxy without a store";
                    return Err(StoreError::new(LostKind::Closed, format!("{} {what}", self.options.endpoint())));
                }
                Ok(0) => return Err(self.said(LostKind::Closed, "closed the connection")),
                Ok(length) => self.frames.feed(&chunk[..length]),
                Err(error) => {
                    return Err(self.said(LostKind::Closed, &format!("broke off the connection ({})", plain(&error))));
                }
            }
        }
    }
}

const TCP_STORE: &str = "it is a TCPStore of torch";

fn not_ours(options: &Options, why: &str) -> StoreError {
    let message = format!("port {} is used by another program, at {}: {why}", options.port, options.endpoint());
    StoreError::new(LostKind::NotOurs, message)
}

/// Returns once a probe finds that the peer is a `TCPStore`, which does not answer the client's hello in most releases
/// of torch. Probes repeatedly, because a busy `TCPStore` may not answer the first probe.
async fn until_suspicious(options: &Options, peer: SocketAddr) {
    loop {
        tokio::time::sleep((options.connect_timeout / 4).min(Duration::from_secs(1))).await;
        if is_tcp_store(peer).await {
            return;
        }
    }
}

fn what(bytes: &[u8]) -> &'static str {
    if bytes.starts_with(b"HTTP/") { "it is an HTTP server" } else { "it does not speak the protocol of this store" }
}
