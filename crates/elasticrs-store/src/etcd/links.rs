//! Links are connections between the sessions of a job. They allow a killed agent to be detected before its lease
//! expires.
//!
//! Each session connects to the session that was opened just before it, and that session connects back. The session
//! that opens a connection is the caller, and the other session is the peer. The caller waits on the connection for the
//! end of the peer, and reconnects when the connection closes. The peer's agent gives its nursery a duplicate of the
//! connection. When the agent dies, the nursery cleans up the agent's processes and then sends the peer's last word on
//! all duplicates. The peer's card in etcd contains a hash of the last word. The caller checks the word against this
//! hash and then revokes the peer's lease.
//!
//! The session of a worker or a plain program has no links, because it has no nursery that could send its last word. It
//! ends when its program closes it or when its lease expires.
//!
//! - **LINK-1** a session revokes the lease of another session only after it has received that session's last word. A
//!   refused or broken connection proves nothing, because a firewall or the network may be the cause;
//! - **LINK-2** a link that cannot be opened, or that the network breaks, does no harm, because the lease still
//!   expires;
//! - **LINK-3** a peer is trusted only if it sends the nonce from its card in etcd. A session looks up a caller's card
//!   in etcd only after the caller has proved that it has read the session's own card.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use elasticrs_runtime::listen::{Port, listen};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::cards::{Card, HELLO, Hello, LastWord, Nonce, seal_of};
use super::dial::{Link, Site};
use super::grpc::Channel;
use super::mapping::{Keys, unsigned};
use super::messages as pb;
use super::open::RANGE;
use crate::secrets::{is_same, random};
use crate::session::client::Guard;
use crate::session::error::Failure;
use crate::session::network::resolve;

/// Time limit for a connection attempt, and for the first message on a new connection.
const LIMIT: Duration = Duration::from_secs(5);
/// Shortest and longest pause between attempts to connect to a session. The shortest pause is also used before
/// the first retry of a request to etcd.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(10));
/// Interval between two reads of a peer's entry in etcd. A missing entry means that the peer's session has ended.
const LOOK: Duration = Duration::from_secs(60);
/// Maximum number of simultaneous incoming links. Normally there are at most two.
const CALLERS: usize = 64;

/// All links of one session, incoming and outgoing.
pub(super) struct Links {
    keys: Rc<Keys>,
    scope: String,
    own: Card,
    channel: watch::Receiver<Option<Channel>>,
    /// Lease IDs of the sessions to which this session keeps a connection. Prevents a second connection to the same
    /// session.
    called: RefCell<BTreeSet<i64>>,
    guard: Rc<dyn Guard>,
    /// Secret that the nursery sends on this session's links once the agent has died and its processes have been
    /// cleaned up.
    word: LastWord,
    /// True once [`Guard::linked`] has been called for a connection of this session.
    is_guarded: Cell<bool>,
}

impl Links {
    /// Starts to listen for connections from other sessions.
    ///
    /// `link` is the first connection to etcd. Its local address is published in etcd as an address of this machine.
    /// `channel` contains the current connection, which changes after a reconnect, or `None` during an outage.
    pub(super) fn open(
        site: &Site,
        keys: Rc<Keys>,
        link: &Link,
        channel: watch::Receiver<Option<Channel>>,
        guard: Rc<dyn Guard>,
    ) -> io::Result<(Self, TcpListener)> {
        let listener = listen(None, Port::Any).map_err(|error| error.source)?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let (nonce, word): (Nonce, LastWord) = (random()?, random()?);
        let hosts = [Some(link.local.ip().to_string()), site.host.clone()].into_iter().flatten().collect();
        let own = Card { lease: keys.lease, nonce, port: listener.local_addr()?.port(), seal: seal_of(&word), hosts };
        let (scope, called, is_guarded) = (site.scope.clone(), RefCell::default(), Cell::default());
        Ok((Self { keys, scope, own, channel, called, guard, word, is_guarded }, listener))
    }

    /// Accepts and opens connections to other sessions until the future is dropped.
    pub(super) async fn run(self, listener: TcpListener) -> Infallible {
        let links = Rc::new(self);
        tokio::join!(Box::pin(Rc::clone(&links).follow()), links.accept(listener)).1
    }

    /// Accepts connections from other sessions, and serves up to [`CALLERS`] of them at the same time.
    async fn accept(self: Rc<Self>, listener: TcpListener) -> Infallible {
        let mut callers = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) if callers.len() < CALLERS => {
                        callers.spawn_local(Rc::clone(&self).answer(stream));
                    }
                    // Close the connection, because too many connections are open. Until the peer's next attempt
                    // succeeds, the peer notices the end of this session only when the lease of this session expires
                    // (LINK-2).
                    Ok(_) => {}
                    // Wait before retrying, because an error such as running out of file descriptors would otherwise
                    // cause a busy loop.
                    Err(_) => sleep(LIMIT).await,
                },
                Some(_) = callers.join_next() => {}
            }
        }
    }

    /// Publishes this session's address in etcd ([`Card`]). Then stays connected to the next older session, to detect
    /// the end of that session. Repeats this until no older session is left.
    async fn follow(self: Rc<Self>) {
        let () = self.ask("/etcdserverpb.KV/Put", &self.keys.put_card(&self.scope, &self.own)).await;
        let own: pb::RangeResponse = self.ask(RANGE, &self.keys.get_card(&self.scope, self.own.lease)).await;
        let Some(created) = own.kvs.first().map(|kv| unsigned(kv.create_revision)) else { return };
        loop {
            let older = self.ask(RANGE, &self.keys.card_before(&self.scope, created)).await;
            let Some(card) = self.keys.card_of(&self.scope, &older) else { return };
            self.stay_linked(&card).await;
        }
    }

    /// Answers an incoming link and connects back to the caller.
    async fn answer(self: Rc<Self>, mut stream: TcpStream) {
        let mut bytes = [0; HELLO];
        let Ok(Ok(_)) = timeout(LIMIT, stream.read_exact(&mut bytes)).await else { return };
        // `decode` checks the proof before the request to etcd, because any program could otherwise make this session
        // send requests.
        let Some(hello) = Hello::decode(&bytes, &self.own.nonce) else { return };
        let caller = self.card(hello.lease).await.filter(|card| is_same(&card.nonce, &hello.nonce));
        let Some(caller) = caller else { return };
        if stream.write_all(&self.own.nonce).await.is_ok() {
            self.guard.linked(stream.as_fd(), self.word, !self.is_guarded.replace(true));
            tokio::join!(ended(&mut stream), self.stay_linked(&caller));
        }
    }

    /// Stays connected to the session `peer` until its entry is deleted from etcd. If `peer` sends the secret
    /// [`LastWord`], revokes the lease of `peer`, because the secret means that all its processes have exited.
    async fn stay_linked(&self, peer: &Card) {
        if !self.called.borrow_mut().insert(peer.lease) {
            return;
        }
        tokio::select! {
            () = self.until_over(peer) => {
                // Ignore a refusal. It means that the lease no longer exists, for example because the session was
                // closed normally.
                let revoke = pb::LeaseRevokeRequest { id: peer.lease };
                let () = self.ask("/etcdserverpb.Lease/LeaseRevoke", &revoke).await;
            }
            () = self.gone(peer) => {}
        }
        self.called.borrow_mut().remove(&peer.lease);
    }

    /// Stays connected to another session (the peer) until the peer announces its end with its [`LastWord`]. Reconnects
    /// if the connection breaks.
    async fn until_over(&self, peer: &Card) {
        let mut met = None;
        let mut pause = PAUSES.0;
        loop {
            for address in addresses(peer, met).await {
                // Ignore a failed connection attempt, because it does not prove that the peer's session has ended. If
                // the session has ended, its lease will expire.
                let Ok(Ok(mut stream)) = timeout(LIMIT, TcpStream::connect(address)).await else { continue };
                if self.meet(&mut stream, peer, met.is_some()).await {
                    (met, pause) = (Some(address), PAUSES.0);
                    if says_last_word(&mut stream, peer).await {
                        return;
                    }
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Waits until the contact entry of the session `peer` is deleted from etcd. The deletion is the only sign that the
    /// session of an unreachable peer has ended.
    async fn gone(&self, peer: &Card) {
        loop {
            sleep(LOOK).await;
            if self.card(peer.lease).await.is_none() {
                return;
            }
        }
    }

    /// Performs the handshake on a new connection. Returns true if the peer answers with the nonce from its entry in
    /// etcd.
    ///
    /// If `is_known`, the peer has answered an earlier handshake, and there is no time limit. If the peer's agent has
    /// died since then, the port stays open until the peer's nursery process exits, but no process answers.
    async fn meet(&self, stream: &mut TcpStream, peer: &Card, is_known: bool) -> bool {
        let hello = Hello { lease: self.own.lease, nonce: self.own.nonce };
        let mut nonce = Nonce::default();
        let answer = async {
            stream.write_all(&hello.encode(&peer.nonce)).await?;
            stream.read_exact(&mut nonce).await
        };
        let patience = if is_known { Duration::MAX } else { LIMIT };
        matches!(timeout(patience, answer).await, Ok(Ok(_))) && is_same(&nonce, &peer.nonce)
    }

    async fn card(&self, lease: i64) -> Option<Card> {
        let answer = self.ask(RANGE, &self.keys.get_card(&self.scope, lease)).await;
        self.keys.card_of(&self.scope, &answer)
    }

    /// Sends a request to etcd and returns the answer. Retries after temporary errors, such as a missing leader or a
    /// broken connection. If etcd rejects the request, returns the default value of the answer's type.
    async fn ask<A: Message + Default>(&self, path: &str, question: &impl Message) -> A {
        let mut channel = self.channel.clone();
        let mut pause = PAUSES.0;
        loop {
            let current = channel.borrow_and_update().clone();
            if let Some(current) = current {
                match current.call(path, question).await.map_err(|error| Failure::of(error, "")) {
                    Ok(answer) => return answer,
                    Err(Failure::Retryable(_)) => {}
                    Err(Failure::Fatal(_)) => return A::default(),
                }
            }
            // Retry when the session opens a new connection, or after `pause` on the current one.
            //
            // The first pauses are short, because etcd usually elects a new leader quickly, and because other sessions
            // may be waiting for this request to revoke a killed agent's lease.
            let _ = timeout(pause, channel.changed()).await;
            pause = (pause * 2).min(LIMIT);
        }
    }
}

/// Returns the address at which the peer answered before. If it has never answered, returns all addresses of its
/// machine.
async fn addresses(peer: &Card, met: Option<SocketAddr>) -> Vec<SocketAddr> {
    if let Some(met) = met {
        return vec![met];
    }
    let mut found = Vec::new();
    for host in &peer.hosts {
        if let Ok(Ok(addresses)) = timeout(LIMIT, resolve(host, peer.port)).await {
            found.extend(addresses);
        }
    }
    found
}

/// Waits until the peer sends its [`LastWord`] (the secret that announces its end) or closes the connection. Returns
/// true if the peer sent the correct secret.
async fn says_last_word(stream: &mut TcpStream, peer: &Card) -> bool {
    let mut word = LastWord::default();
    let came = stream.read_exact(&mut word).await.is_ok();
    came && peer.seal == seal_of(&word)
}

/// Waits until the other side closes the connection. Ignores all bytes that arrive.
async fn ended(stream: &mut TcpStream) {
    let mut byte = [0];
    while let Ok(1..) = stream.read(&mut byte).await {}
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream as Caller;

    use super::super::cards::Seal;
    use super::*;
    use crate::session::client::NoGuard;

    fn links(channel: watch::Receiver<Option<Channel>>) -> Links {
        let keys = Rc::new(Keys { prefix: "/test/".to_owned(), lease: 7, job_lease: 0 });
        let own = Card { lease: 7, nonce: Nonce::default(), port: 0, seal: Seal::default(), hosts: Vec::new() };
        let (called, is_guarded) = (RefCell::default(), Cell::default());
        let (scope, guard, word) = ("run".to_owned(), Rc::new(NoGuard), LastWord::default());
        Links { keys, scope, own, channel, called, guard, word, is_guarded }
    }

    /// Serves one connection. Answers the first call with the error "no leader", and all further calls with an empty
    /// message.
    async fn serve_after_an_election(stream: tokio::io::DuplexStream) {
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut has_leader = false;
        while let Some(call) = connection.accept().await {
            let (_, mut answer) = call.unwrap();
            let head = http::Response::builder().header("content-type", "application/grpc");
            if has_leader {
                let mut body = answer.send_response(head.body(()).unwrap(), false).unwrap();
                body.send_data(bytes::Bytes::from_static(&[0; 5]), false).unwrap();
                let status = (http::HeaderName::from_static("grpc-status"), http::HeaderValue::from_static("0"));
                body.send_trailers([status].into_iter().collect()).unwrap();
            } else {
                has_leader = true;
                let head = head.header("grpc-status", "14").header("grpc-message", "etcdserver: no leader");
                answer.send_response(head.body(()).unwrap(), true).unwrap();
            }
        }
    }

    #[test]
    fn a_request_is_retried_soon_on_the_same_connection_if_etcd_has_no_leader() {
        // The clock of this runtime advances only while all tasks are waiting, so `elapsed` measures only waiting time.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let (own, other) = tokio::io::duplex(1 << 16);
            let server = tokio::task::spawn_local(serve_after_an_election(other));
            let (requests, connection) = h2::client::handshake(own).await.unwrap();
            let driver = tokio::task::spawn_local(connection);
            let (_connections, channel) = watch::channel(Some(Channel::new(requests, "http://etcd:2379".to_owned())));
            let begun = tokio::time::Instant::now();
            let revoke = pb::LeaseRevokeRequest { id: 7 };
            let links = links(channel);
            let asking = links.ask::<()>("/etcdserverpb.Lease/LeaseRevoke", &revoke);
            timeout(2 * LIMIT, asking).await.expect("the second attempt is answered");
            assert_eq!(begun.elapsed(), PAUSES.0);
            driver.abort();
            server.abort();
        });
    }

    #[test]
    fn callers_beyond_the_limit_are_disconnected() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            // Keep all calls unanswered by providing no connection to etcd, which the server needs to verify a caller.
            let (_connections, channel) = watch::channel(None);
            let answering = tokio::task::spawn_local(links(channel).run(listener));
            let calls = tokio::task::spawn_blocking(move || {
                let call = || {
                    let mut caller = Caller::connect(address).unwrap();
                    caller.write_all(&Hello { lease: 8, nonce: Nonce::default() }.encode(&Nonce::default())).unwrap();
                    caller
                };
                let mut callers: Vec<Caller> = (0..CALLERS).map(|_| call()).collect();
                let mut further = Caller::connect(address).unwrap();
                further.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                assert!(further.read(&mut [0]).is_ok_and(|read| read == 0), "it is closed");
                for caller in &mut callers {
                    caller.set_nonblocking(true).unwrap();
                    assert_eq!(caller.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "it is answered");
                }
            });
            calls.await.unwrap();
            answering.abort();
            assert!(answering.await.unwrap_err().is_cancelled());
        });
    }

    /// Checks invariant LINK-3.
    #[test]
    fn a_stranger_is_disconnected_without_a_request_to_etcd() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            // There is no connection to etcd, so a request to etcd would wait, and the stranger would stay connected.
            let (_connections, channel) = watch::channel(None);
            let answering = tokio::task::spawn_local(links(channel).run(listener));
            let call = tokio::task::spawn_blocking(move || {
                let mut stranger = Caller::connect(address).unwrap();
                stranger.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                stranger.write_all(&Hello { lease: 8, nonce: Nonce::default() }.encode(&[1; 16])).unwrap();
                assert_eq!(stranger.read(&mut [0]).unwrap(), 0);
            });
            call.await.unwrap();
            answering.abort();
        });
    }
}
