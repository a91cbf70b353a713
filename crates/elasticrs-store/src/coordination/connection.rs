//! Server side of a connection: the handshake, then the requests until the connection is closed.

use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use elasticrs_runtime::door::part;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::access::{self, Direction, allows, scoped_token};
use super::hub::{Hub, Refusal, Slot};
use super::leases::Leases;
use super::outbox::Outbox;
use super::protocol::{Answer, Hello, Request, VERSION};
use super::relay::{Caller, Target, descends, recognise};
use super::state::SessionId;
use super::turns::Turn;
use super::wire::{Broken, Frames, MAGIC, MAX_REQUEST, MAX_UNPROVEN, Malformed};
use crate::secrets;
use crate::session::network::QUESTION;
use crate::types::{LostKind, Scope};

/// Time limit for the handshake of a client.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a refused connection stays open, so that the client can read the reason.
const PARTING: Duration = Duration::from_secs(2);

/// Maximum number of bytes that the store reads and discards from a refused client. The client may have sent them
/// before it was refused.
const MAX_DROPPED: usize = 4 * MAX_REQUEST;

/// Reason why the store stops serving a connection.
enum Disconnect {
    /// The peer closed the connection, or the store has already queued its last message for the peer.
    Gone,
    /// The connection was reset or timed out, so it is unknown whether the peer is still running.
    Broken,
    /// The first bytes are not those of this protocol, so the peer is not a client of this store.
    Foreign,
    /// The store will send this reason to the client and then close the connection.
    Refused(Refusal),
}

impl From<io::Error> for Disconnect {
    fn from(_: io::Error) -> Self {
        Self::Broken
    }
}

impl From<Malformed> for Disconnect {
    fn from(error: Malformed) -> Self {
        Self::Refused((LostKind::Protocol, format!("the store does not understand a message: {error}")))
    }
}

impl From<Broken> for Disconnect {
    fn from(error: Broken) -> Self {
        match error {
            Broken::Foreign => Self::Foreign,
            Broken::Length(_) => Self::Refused((LostKind::Limit, format!("the store does not take {error}"))),
        }
    }
}

/// Deadline for receiving the rest of an incomplete request.
#[derive(Clone, Copy)]
struct Begun {
    until: Instant,
    is_second_half: bool,
}

struct Connection {
    hub: Rc<Hub>,
    stream: TcpStream,
    frames: Frames,
    outbox: Rc<Outbox>,
    /// Keys that the client is allowed to access.
    scope: Scope,
}

/// Serves one client until its connection is closed.
pub(super) async fn serve(hub: Rc<Hub>, stream: TcpStream, outbox: Rc<Outbox>, mut slot: Slot) {
    // Without `TCP_NODELAY`, small messages would be delayed. If setting it fails, serve the client anyway.
    let _ = stream.set_nodelay(true);
    let mut connection = Connection { hub, stream, frames: Frames::new(MAX_UNPROVEN), outbox, scope: None };
    let met = timeout(HANDSHAKE, Box::pin(connection.handshake())).await;
    let session = match met {
        Ok(Ok(session)) => session,
        // Box this future, because few connections need it. The task of every connection would reserve memory for an
        // unboxed future.
        Ok(Err(Disconnect::Foreign)) => return Box::pin(connection.lead_on()).await,
        Ok(Err(end)) => return connection.part(end).await,
        Err(_) => {
            let said = format!("no handshake within {} s", HANDSHAKE.as_secs());
            return connection.part(Disconnect::Refused((LostKind::Timeout, said))).await;
        }
    };
    slot.prove();
    connection.frames.set_limit(MAX_REQUEST);
    let (hub, outbox) = (Rc::clone(&connection.hub), Rc::clone(&connection.outbox));
    let mut user = User { hub, outbox, session, is_broken: false };
    let end = connection.converse(session).await;
    user.is_broken = matches!(end, Disconnect::Broken);
    drop(user);
    connection.part(end).await;
}

/// Guard whose `drop` notifies the hub, so that the hub learns of every closed connection.
struct User {
    hub: Rc<Hub>,
    outbox: Rc<Outbox>,
    session: SessionId,
    is_broken: bool,
}

impl Drop for User {
    fn drop(&mut self) {
        self.hub.leave(self.session, &self.outbox, self.is_broken);
    }
}

impl Connection {
    /// Carries out the handshake: authenticates both sides and opens or resumes the session.
    async fn handshake(&mut self) -> Result<SessionId, Disconnect> {
        let hello = loop {
            if let Some(frame) = self.frames.cut()? {
                let version = Request::version_of(frame)?;
                if version.0 != VERSION.0 {
                    let (ours, theirs) = (VERSION.0, version.0);
                    let said = format!("the store speaks version {ours} of its protocol, this client version {theirs}");
                    return Err(Disconnect::Refused((LostKind::Version, said)));
                }
                match Request::decode(frame)? {
                    Request::Hello(hello) => break hello,
                    _ => return Err(Malformed("the first message is no hello").into()),
                }
            }
            self.read().await?;
        };
        let run_id = self.check(&hello)?;
        let Some(token) = self.hub.config.token.clone() else {
            self.welcome(run_id, None);
            return self.ready(&hello, None);
        };
        let challenge = secrets::random()?;
        self.welcome(run_id.clone(), Some(challenge));
        let (answer, scope) = loop {
            if let Some(frame) = self.frames.cut()? {
                match Request::decode(frame)? {
                    Request::Prove { proof, scope } => break (proof, scope),
                    _ => return Err(Disconnect::Refused((LostKind::Token, "the store requires a token".into()))),
                }
            }
            self.read().await?;
        };
        let token = match &scope {
            Some(scope) => scoped_token(&token, scope).into_bytes(),
            None => token,
        };
        if !access::is_proof(&answer, &token, &challenge, &run_id, Direction::Client) {
            return Err(Disconnect::Refused((LostKind::Token, "the client's token differs from the store's".into())));
        }
        let own = access::proof(&token, &hello.challenge, &run_id, Direction::Store);
        self.scope = scope;
        self.ready(&hello, Some(own))
    }

    /// Returns the ID of the client's run, or the reason to refuse the client.
    fn check(&self, hello: &Hello) -> Result<String, Disconnect> {
        if !Leases::is_allowed(hello.interval_ms, hello.attempts) {
            let (interval, attempts) = (hello.interval_ms, hello.attempts);
            let said = format!("the store does not accept keep-alives of {interval} ms x {attempts}");
            return Err(Disconnect::Refused((LostKind::Limit, said)));
        }
        match &self.hub.config.run_id {
            // An agent sends an empty run ID to find out whether this store serves all jobs. This store serves a single
            // job, so close the connection. Report no error, because the agent expects that this may happen.
            Some(_) if hello.run_id.is_empty() => Err(Disconnect::Gone),
            Some(served) if *served != hello.run_id => {
                let said = format!("this endpoint serves run {served}, not {}", hello.run_id);
                Err(Disconnect::Refused((LostKind::Run, said)))
            }
            Some(_) | None => Ok(hello.run_id.clone()),
        }
    }

    fn welcome(&self, run_id: String, challenge: Option<[u8; 32]>) {
        self.tell(MAGIC.to_vec());
        self.tell(Answer::Welcome { version: VERSION, run_id, challenge }.encode());
    }

    fn ready(&self, hello: &Hello, proof: Option<[u8; 32]>) -> Result<SessionId, Disconnect> {
        let limit = self.hub.config.max_connections;
        if self.hub.proven.get() >= limit {
            let said = format!("the store has reached its limit of {limit} connections");
            return Err(Disconnect::Refused((LostKind::Limit, said)));
        }
        let (session, answer) = self.hub.enter(&self.outbox, hello, proof).map_err(Disconnect::Refused)?;
        self.tell(answer.encode());
        Ok(session)
    }

    fn tell(&self, message: Vec<u8>) {
        self.outbox.push(self.outbox.message(message));
    }

    /// Executes requests and sends answers until the connection is closed.
    async fn converse(&mut self, session: SessionId) -> Disconnect {
        let hub = Rc::clone(&self.hub);
        let mut begun = None;
        loop {
            let mut turn = Turn::new();
            while !self.outbox.is_closing() {
                match self.frames.cut() {
                    Ok(Some(frame)) => {
                        begun = None;
                        // Reset the count of unparsed bytes, because the request is complete.
                        self.outbox.set_unparsed(0);
                        let request = match Request::decode(frame) {
                            Ok(request) => request,
                            Err(malformed) => return malformed.into(),
                        };
                        if !allows(self.scope.as_deref(), &request) {
                            let said = "the token of this client does not allow access to these keys";
                            return Disconnect::Refused((LostKind::Denied, said.into()));
                        }
                        if !turn.takes(hub.steps(&request)) {
                            Box::pin(self.wait_for_turn(&mut turn, &hub.turns)).await;
                            if self.outbox.is_closing() {
                                break;
                            }
                        }
                        if let Err(refusal) = hub.request(session, request, &self.outbox) {
                            return Disconnect::Refused(refusal);
                        }
                    }
                    Ok(None) => break,
                    Err(broken) => return broken.into(),
                }
            }
            turn.end().await;
            if self.outbox.is_closing() {
                return Disconnect::Gone;
            }
            if let Err(end) = self.read_on(&mut begun).await {
                return end;
            }
        }
    }

    /// Waits for this connection's next turn to execute requests. First sends the queued answers, because the client
    /// may be waiting for them.
    async fn wait_for_turn<'a>(&self, turn: &mut Turn<'a>, turns: &'a Semaphore) {
        // Ignore an error, because the next read reports it. The requests that have already arrived are executed first.
        let _ = self.flush().await;
        self.hub.hold(&self.outbox, self.frames.capacity());
        self.outbox.waits.set(true);
        turn.renew(turns).await;
        self.outbox.waits.set(false);
    }

    /// Sends queued messages until the socket would block. Returns true if all queued messages were sent.
    async fn flush(&self) -> Result<bool, Disconnect> {
        // Send only the messages queued before the call of `settled`, because `settled` does not wait until later
        // changes are on disk.
        let pushed = self.outbox.pushed();
        self.hub.settled().await;
        match self.outbox.flush(&self.stream, pushed) {
            // A broken pipe means that the client has closed the connection. Continue, because the client's last
            // requests can still be read.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(true),
            result => Ok(result?),
        }
    }

    /// Waits for more bytes. If a request is incomplete, the remaining bytes must arrive within the request timeout.
    ///
    /// The timeout is split into two timers, and the second starts after the first has expired. A pause of this process
    /// can therefore use up only one timer, which leaves the client half of the timeout.
    async fn read_on(&mut self, begun: &mut Option<Begun>) -> Result<(), Disconnect> {
        self.frames.rest();
        self.hub.hold(&self.outbox, self.frames.capacity());
        if self.outbox.is_closing() {
            return Ok(());
        }
        if self.frames.unread().is_empty() {
            return self.read().await;
        }
        let limit = self.hub.config.request_timeout;
        let half = || Instant::now() + limit / 2;
        let Begun { until, is_second_half } =
            *begun.get_or_insert_with(|| Begun { until: half(), is_second_half: false });
        match timeout_at(until, self.read()).await {
            Ok(read) => read,
            Err(_) if is_second_half => {
                let said = format!("a request did not arrive whole within {} s", limit.as_secs_f32());
                Err(Disconnect::Refused((LostKind::Timeout, said)))
            }
            Err(_) => {
                *begun = Some(Begun { until: half(), is_second_half: true });
                Ok(())
            }
        }
    }

    /// Waits for more bytes from the client. Meanwhile sends the messages that are queued for it.
    async fn read(&mut self) -> Result<(), Disconnect> {
        self.frames.rest();
        loop {
            let interest =
                if self.flush().await? { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
            tokio::select! {
                ready = self.stream.ready(interest) => { ready?; }
                () = self.outbox.wake.notified() => {
                    if self.outbox.is_closing() { return Ok(()) }
                    continue;
                }
            }
            if let Some(is_more) = self.receive()? {
                if is_more {
                    // Yield, because a client that sends without a pause would otherwise keep the other clients
                    // waiting.
                    yield_now().await;
                }
                return Ok(());
            }
        }
    }

    /// Reads the bytes that have arrived. Returns true if there may be more, and `None` if nothing has arrived.
    fn receive(&mut self) -> Result<Option<bool>, Disconnect> {
        let mut scratch = self.hub.scratch.borrow_mut();
        match self.stream.try_read(&mut scratch) {
            Ok(0) => Err(Disconnect::Gone),
            Ok(length) => {
                self.frames.feed(&scratch[..length]);
                Ok(Some(length == scratch.len()))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Forwards the connection to the workers' store if the peer is a worker. Otherwise closes the connection.
    async fn lead_on(mut self) {
        let led = timeout(HANDSHAKE, Box::pin(self.find_workers_store())).await;
        let why = match led {
            Ok(Ok((host, port))) => {
                let Self { hub, stream, frames, outbox, .. } = self;
                match hub.relay.pass_on(stream, frames.unread().to_vec(), host, port) {
                    Ok(()) => return,
                    Err(error) => return tell_of_worker(&hub, &outbox, &error.to_string()),
                }
            }
            Ok(Err(None)) => return self.part(Disconnect::Foreign).await,
            Ok(Err(Some(why))) => why,
            Err(_) => "no round of this job is running",
        };
        tell_of_worker(&self.hub, &self.outbox, why);
    }

    /// Waits until a round is running, and returns the host and port of its workers' store. If the peer is not served,
    /// returns the reason as an error, or `None` if the peer is not a worker.
    async fn find_workers_store(&mut self) -> Result<(String, u16), Option<&'static str>> {
        let hub = Rc::clone(&self.hub);
        let mut target = hub.relay.target.clone();
        let (peer, own) = (self.outbox.peer.ip(), self.stream.local_addr().map_err(|_| None)?.ip().to_canonical());
        let is_local = |address: IpAddr| address.is_loopback() || address == own;
        let mut announced = Vec::new();
        if *target.borrow() == Target::Nowhere {
            announced = hub.announced(|other| other == peer || (is_local(other) && is_local(peer)));
            if announced.is_empty() {
                return Err(None);
            }
        }
        let pid = loop {
            match recognise(self.frames.unread()) {
                Caller::Unknown => self.read().await.map_err(|_| None)?,
                Caller::Worker(pid) => break pid,
                Caller::Stranger => return Err(None),
            }
        };
        match announced.pop() {
            Some(only) if announced.is_empty() => return Ok(only),
            Some(_) => return Err(Some("agents of several jobs are connected from that address")),
            None if !is_local(peer) && !hub.has_client_at(peer) => {
                return Err(Some("no agent of this job is connected from that address"));
            }
            None => {}
        }
        loop {
            if let Target::At { host, port, agent } = &*target.borrow_and_update() {
                if agent.zip(pid).is_some_and(|(agent, pid)| !descends(pid, agent)) {
                    return Err(Some("it is no worker of this job"));
                }
                return Ok((host.clone(), *port));
            }
            target.changed().await.map_err(|_| None)?;
        }
    }

    /// Closes the connection. If the client was refused, first sends the reason and gives the client time to read it.
    async fn part(mut self, end: Disconnect) {
        match end {
            Disconnect::Gone | Disconnect::Broken => {}
            // Do not report a peer that sent the probe for a `TCPStore`, because only clients of this store send it.
            // Clients send the probe if the store does not answer in time, for example after a pause.
            Disconnect::Foreign if self.frames.unread() == QUESTION => {}
            Disconnect::Foreign => {
                let what = describe(self.frames.unread());
                return self.hub.notices.say(format!("closed a connection from {}: {what}", self.outbox.peer));
            }
            Disconnect::Refused((kind, message)) => {
                let todo = if kind == LostKind::Run {
                    "; if that agent belongs to this job, start it with the same --rdzv-id"
                } else {
                    ""
                };
                self.hub.notices.say(format!("refused {}: {message}{todo}", self.outbox.peer));
                self.outbox.refuse(kind, message);
            }
        }
        if self.outbox.is_closing() {
            self.frames = Frames::new(0);
            // Wait at most `PARTING` for the client to read why it was disconnected. Then close the connection.
            let _ = timeout(PARTING, self.say_why()).await;
        }
    }

    async fn say_why(&mut self) -> io::Result<()> {
        while !self.outbox.flush(&self.stream, u64::MAX)? {
            self.stream.ready(Interest::WRITABLE).await?;
        }
        part(&mut self.stream, MAX_DROPPED).await
    }
}

/// Notifies the user of a worker that is not served. Sends only one notice, because the worker retries repeatedly.
fn tell_of_worker(hub: &Hub, outbox: &Outbox, why: &str) {
    if !hub.has_told_of_worker.replace(true) {
        hub.notices.say(format!(
            "a worker at {} looks for the store of its process group at the port of the rendezvous, and is not served: {why}. Leave MASTER_ADDR and MASTER_PORT in the script as the launcher sets them",
            outbox.peer
        ));
    }
}

/// Describes a foreign program, based on the first bytes that it sent.
fn describe(bytes: &[u8]) -> &'static str {
    const HTTP: [&[u8]; 7] = [b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PRI "];
    if HTTP.iter().any(|method| bytes.starts_with(method)) {
        "it is an HTTP request"
    } else if bytes.starts_with(&[0, 0xce, 0xf7, 0x85, 0x3c]) {
        "it is a client of torch's TCPStore"
    } else if bytes.starts_with(&[0x16, 3]) {
        "it is a TLS client"
    } else {
        "it does not speak the protocol of this store"
    }
}
