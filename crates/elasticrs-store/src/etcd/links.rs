//! Links are connections between the sessions of a job. They detect a killed agent before its lease expires.
//!
//! Each session listens for connections and connects to the session that opened before it, which connects back. A
//! caller stays connected, and reconnects when the connection ends. The agent's nursery holds a duplicate of each
//! connection on which a caller waits. After the agent's death, the nursery cleans up the agent's processes and then
//! sends the session's last word on these connections. The session's card has a hash of the word, so the caller
//! recognizes it and revokes the lease.
//!
//! A session without a nursery (of a worker, or of a plain program) has no last word. It counts as ended when it
//! refuses a connection at an address at which it has answered before.
//!
//! - **LINK-1** the lease of a session with a nursery is revoked only after the last word was received;
//! - **LINK-2** a link that cannot be made, or that the network breaks, does no harm, because the lease still expires;
//! - **LINK-3** a peer is trusted only if it sends the nonce from its card in etcd.

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
use super::dial::{Link, Trouble};
use super::grpc::Channel;
use super::mapping::{Keys, unsigned};
use super::messages as pb;
use super::open::RANGE;
use super::options::Site;
use crate::coordination::connect::resolve;
use crate::coordination::guard::Guard;

/// Time limit for a connection attempt, and for the first message on a connection.
const LIMIT: Duration = Duration::from_secs(5);
/// Shortest and longest pause between two connection attempts to a session.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(10));
/// Interval at which a caller checks whether the session's card still exists.
const LOOK: Duration = Duration::from_secs(60);
/// Maximum number of incoming links at the same time. A session expects two.
const CALLERS: usize = 64;

/// The links of one session, to and from other sessions.
pub(super) struct Links {
    keys: Rc<Keys>,
    scope: String,
    own: Card,
    channel: watch::Receiver<Option<Channel>>,
    /// Leases of the sessions that this session connects to.
    called: RefCell<BTreeSet<i64>>,
    guard: Rc<dyn Guard>,
    /// This session's last word. `None` if the guard would not send it.
    word: Option<LastWord>,
    /// True if the guard has received a link of this session.
    is_guarded: Cell<bool>,
}

impl Links {
    /// Starts to listen for links. `link` is a connection with etcd; `channel` always has the connection in use.
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
        let mut nonce = Nonce::default();
        let mut word = LastWord::default();
        getrandom::fill(&mut nonce).and_then(|()| getrandom::fill(&mut word)).map_err(io::Error::other)?;
        let word = guard.says_words().then_some(word);
        let hosts = [Some(link.local.ip().to_string()), site.host.clone()].into_iter().flatten().collect();
        let seal = word.as_ref().map(seal_of);
        let own = Card { lease: keys.lease, nonce, port: listener.local_addr()?.port(), seal, hosts };
        let (scope, called, is_guarded) = (site.scope.clone(), RefCell::default(), Cell::default());
        Ok((Self { keys, scope, own, channel, called, guard, word, is_guarded }, listener))
    }

    /// Maintains the links for as long as the future is polled.
    pub(super) async fn run(self, listener: TcpListener) -> Infallible {
        let links = Rc::new(self);
        let mut tasks = JoinSet::new();
        tasks.spawn_local(Rc::clone(&links).follow());
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) if tasks.len() < CALLERS => {
                        tasks.spawn_local(Rc::clone(&links).answer(stream));
                    }
                    Ok(_) => {}
                    // Wait after an error, for example if there are no free file descriptors, because retrying at once
                    // would be a busy loop.
                    Err(_) => sleep(LIMIT).await,
                },
                Some(_) = tasks.join_next() => {}
            }
        }
    }

    /// Publishes this session's card, then stays linked to the session that opened before this one. When that session
    /// is gone, continues with the session that opened before it.
    async fn follow(self: Rc<Self>) {
        let _: pb::PutResponse = self.ask("/etcdserverpb.KV/Put", &self.keys.put_card(&self.scope, &self.own)).await;
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
        let Some(hello) = Hello::decode(&bytes) else { return };
        let Some(caller) = self.card(hello.lease).await.filter(|card| card.nonce == hello.nonce) else { return };
        if stream.write_all(&self.own.nonce).await.is_ok() {
            if let Some(word) = self.word {
                self.guard.linked(stream.as_fd(), word, !self.is_guarded.replace(true));
            }
            tokio::join!(ended(&mut stream), self.stay_linked(&caller));
        }
    }

    /// Stays connected to a session until its card is gone. Revokes the session's lease when no process of the session
    /// is running anymore.
    async fn stay_linked(&self, peer: &Card) {
        if !self.called.borrow_mut().insert(peer.lease) {
            return;
        }
        tokio::select! {
            () = self.until_over(peer) => {
                // A session that was closed properly has revoked its lease itself.
                let revoke = pb::LeaseRevokeRequest { id: peer.lease };
                let _: pb::LeaseRevokeResponse = self.ask("/etcdserverpb.Lease/LeaseRevoke", &revoke).await;
            }
            () = self.gone(peer) => {}
        }
        self.called.borrow_mut().remove(&peer.lease);
    }

    /// Connects to a session again and again until it has ended: until its last word arrives or, if it has none, until
    /// it refuses a connection at an address at which it has answered before.
    async fn until_over(&self, peer: &Card) {
        let mut met = None;
        let mut pause = PAUSES.0;
        loop {
            for address in addresses(peer, met).await {
                match timeout(LIMIT, TcpStream::connect(address)).await {
                    Ok(Ok(mut stream)) => {
                        if self.meet(&mut stream, peer, met.is_some()).await {
                            (met, pause) = (Some(address), PAUSES.0);
                            if says_last_word(&mut stream, peer).await {
                                return;
                            }
                        }
                    }
                    // Accept a refused connection as the end only of a session without a last word, because a firewall
                    // refuses connections, too.
                    Ok(Err(error)) if is_end(&error, peer, met) => return,
                    // The peer is unreachable or does not exist. Its lease expires if it has ended.
                    Ok(Err(_)) | Err(_) => {}
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Waits until the session's card is gone. Needed for a session that cannot be reached.
    async fn gone(&self, peer: &Card) {
        loop {
            sleep(LOOK).await;
            if self.card(peer.lease).await.is_none() {
                return;
            }
        }
    }

    /// Exchanges greetings on a new link. Returns true if the peer answered with the nonce from its card. After the death
    /// of the peer's agent its port may still accept connections, until the nursery exits, but nothing answers.
    async fn meet(&self, stream: &mut TcpStream, peer: &Card, is_known: bool) -> bool {
        let hello = Hello { lease: self.own.lease, nonce: self.own.nonce };
        let mut nonce = Nonce::default();
        let answer = async {
            stream.write_all(&hello.encode()).await?;
            stream.read_exact(&mut nonce).await
        };
        let patience = if is_known { Duration::MAX } else { LIMIT };
        matches!(timeout(patience, answer).await, Ok(Ok(_))) && nonce == peer.nonce
    }

    async fn card(&self, lease: i64) -> Option<Card> {
        let answer = self.ask(RANGE, &self.keys.get_card(&self.scope, lease)).await;
        self.keys.card_of(&self.scope, &answer)
    }

    /// Sends a request to etcd and returns the answer. After a connection error, retries, if possible on the session's
    /// next connection. Returns the default value if etcd refuses the request.
    async fn ask<A: Message + Default>(&self, path: &str, question: &impl Message) -> A {
        let mut channel = self.channel.clone();
        loop {
            let current = channel.borrow_and_update().clone();
            if let Some(current) = current {
                match current.call(path, question).await.map_err(|error| Trouble::of(error, "")) {
                    Ok(answer) => return answer,
                    Err(Trouble::Again(_)) => {}
                    Err(Trouble::Fatal(_)) => return A::default(),
                }
            }
            // Retry on the session's next connection or, after `LIMIT`, on the same one.
            let _ = timeout(LIMIT, channel.changed()).await;
        }
    }
}

/// Returns the address at which the session has answered before, otherwise all addresses of its machine.
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

fn is_end(error: &io::Error, peer: &Card, met: Option<SocketAddr>) -> bool {
    peer.seal.is_none() && met.is_some() && error.kind() == io::ErrorKind::ConnectionRefused
}

/// Reads from a link until the peer's nursery sends the secret [`LastWord`] or the link closes. Returns true if the
/// secret was received.
async fn says_last_word(stream: &mut TcpStream, peer: &Card) -> bool {
    let mut word = LastWord::default();
    let came = stream.read_exact(&mut word).await.is_ok();
    came && peer.seal == Some(seal_of(&word))
}

/// Waits until the other side closes the connection. Ignores any bytes that arrive.
async fn ended(stream: &mut TcpStream) {
    let mut byte = [0];
    while let Ok(1..) = stream.read(&mut byte).await {}
}
