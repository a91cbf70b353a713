//! Tests for a session that outlives its connections. A proxy breaks the connections, stops forwarding, or leads
//! to another store.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use common::{HANG, is_change, is_lost, is_reply, lease, options, put, serve, until, watch};
use elasticrs_runtime::runtime::Runtime;
use elasticrs_store::coordination::client::{self, Options};
use elasticrs_store::coordination::server::Server;
use elasticrs_store::session::client::{Client, Guard, NoGuard};
use elasticrs_store::session::events::Event;
use elasticrs_store::types::{LostKind, Op, OpResult, Txn, Watch};
use elasticrs_testkit::wait_until;
use nix::libc::linger;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::sync::Notify;

const LOOK: Duration = Duration::from_millis(2);

/// A connection through the proxy.
#[derive(Default)]
struct Way {
    /// The proxy does not forward requests (`holds_requests`) or answers (`holds_answers`).
    holds_requests: AtomicBool,
    holds_answers: AtomicBool,
    /// The proxy resets the connections on both sides (`is_reset`), or closes only the one to the store
    /// (`is_finished`).
    is_reset: AtomicBool,
    is_finished: AtomicBool,
    /// Number of bytes received from the client.
    requested: AtomicUsize,
}

impl Way {
    fn pass(&self, from: &TcpStream, to: &TcpStream, held: &AtomicBool, is_request: bool) {
        let mut chunk = [0; 4096];
        let (mut from, mut to) = (from, to);
        loop {
            if self.is_reset.load(Ordering::SeqCst) {
                return;
            }
            if is_request && self.is_finished.load(Ordering::SeqCst) {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            if held.load(Ordering::SeqCst) {
                self.wait_for(held);
                continue;
            }
            match from.read(&mut chunk) {
                Ok(0) => {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                Ok(length) => {
                    if is_request {
                        self.requested.fetch_add(length, Ordering::SeqCst);
                    }
                    self.wait_for(held);
                    if self.is_reset.load(Ordering::SeqCst) || to.write_all(&chunk[..length]).is_err() {
                        return;
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return,
            }
        }
    }

    fn wait_for(&self, held: &AtomicBool) {
        let ends = || self.is_reset.load(Ordering::SeqCst) || self.is_finished.load(Ordering::SeqCst);
        wait_until("the way to be free", || !held.load(Ordering::SeqCst) || ends());
    }

    fn serve(&self, client: &TcpStream, store: &TcpStream) {
        for stream in [client, store] {
            stream.set_read_timeout(Some(LOOK)).unwrap();
        }
        thread::scope(|scope| {
            scope.spawn(|| self.pass(client, store, &self.holds_requests, true));
            self.pass(store, client, &self.holds_answers, false);
        });
        if self.is_reset.load(Ordering::SeqCst) {
            for stream in [client, store] {
                setsockopt(stream, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 }).unwrap();
            }
        }
    }
}

type Ways = Arc<Mutex<Vec<(Arc<Way>, JoinHandle<()>)>>>;

/// Proxy between a client and a store.
struct Proxy {
    port: u16,
    target: Arc<AtomicU16>,
    ways: Ways,
    listening: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

impl Proxy {
    fn new(target: u16) -> Self {
        let mut proxy = Self { port: 0, target: Arc::new(target.into()), ways: Arc::default(), listening: None };
        proxy.listen();
        proxy
    }

    fn listen(&mut self) {
        let listener = TcpListener::bind(("127.0.0.1", self.port)).unwrap();
        self.port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let (is_over, target, ways) = (Arc::clone(&ends), Arc::clone(&self.target), Arc::clone(&self.ways));
        let thread = thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                let mut polled = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
                poll(&mut polled, PollTimeout::from(5_u8)).unwrap();
                let Ok((client, _)) = listener.accept() else { continue };
                client.set_nonblocking(false).unwrap();
                let store = TcpStream::connect(("127.0.0.1", target.load(Ordering::SeqCst))).unwrap();
                let way = Arc::<Way>::default();
                let served = Arc::clone(&way);
                let thread = thread::spawn(move || served.serve(&client, &store));
                ways.lock().unwrap().push((way, thread));
            }
        });
        self.listening = Some((ends, thread));
    }

    /// Stops accepting connections. Existing connections stay open.
    fn stop_listening(&mut self) {
        if let Some((ends, thread)) = self.listening.take() {
            ends.store(true, Ordering::SeqCst);
            thread.join().unwrap();
        }
    }

    /// Returns the most recent connection.
    fn way(&self) -> Arc<Way> {
        Arc::clone(&self.ways.lock().unwrap().last().unwrap().0)
    }

    fn count(&self) -> usize {
        self.ways.lock().unwrap().len()
    }

    /// Resets all connections, on both sides.
    fn reset(&self) {
        let ways = std::mem::take(&mut *self.ways.lock().unwrap());
        for (way, _) in &ways {
            way.is_reset.store(true, Ordering::SeqCst);
        }
        for (_, thread) in ways {
            thread.join().unwrap();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop_listening();
        self.reset();
    }
}

/// A store, a client that reaches it through a proxy, and another client that is connected directly.
struct Scene {
    // Fields are dropped in this order. Those that use the runtime must be dropped before it.
    client: Client,
    other: Client,
    proxy: Proxy,
    server: Server,
    runtime: Runtime,
}

impl Scene {
    fn new() -> Self {
        Self::with(Duration::from_millis(100), 300, NoGuard)
    }

    fn with(interval: Duration, attempts: u16, guard: impl Guard + 'static) -> Self {
        let runtime = Runtime::new("elasticrs-store").unwrap();
        let server = serve(&runtime);
        let proxy = Proxy::new(server.port());
        let resuming = Options { attempts, resume: true, ..options(proxy.port, interval) };
        let client = client::connect(&runtime, resuming, Box::new(guard)).unwrap();
        until(&client, |event| matches!(event, Event::Connected { .. }));
        let other = client::connect(&runtime, options(server.port(), HANG), Box::new(NoGuard)).unwrap();
        watch(&other);
        Self { client, other, proxy, server, runtime }
    }

    /// Executes a transaction, to check that the client's session is in use again.
    fn is_there(&self) {
        self.client.txn(99, put("there", false)).unwrap();
        until(&self.client, |event| matches!(event, Event::Reply { tag: 99, .. }));
    }

    /// Checks that no change of the leased key has been reported since it was put.
    fn is_registered(&self) {
        self.other.txn(7, Txn { then: vec![Op::Get("member".into())], ..Txn::default() }).unwrap();
        let event = until(&self.other, |event| is_reply(event) || is_change(event));
        let Event::Reply { results, .. } = event else { panic!("{event:?}") };
        let [OpResult::Entry(Some(entry))] = &results[..] else { panic!("{results:?}") };
        assert_eq!(entry.create_revision, 1);
    }

    fn register(&self) {
        lease(&self.client);
        until(&self.other, is_change);
    }
}

fn lost(client: &Client) -> (LostKind, String) {
    match until(client, is_lost) {
        Event::ConnectionLost { kind, message } => (kind, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_session_and_its_leased_key_survive_connection_resets() {
    let scene = Scene::new();
    scene.register();
    for _ in 0..5 {
        scene.proxy.reset();
        scene.is_there();
    }
    scene.is_registered();
    assert_eq!(scene.server.sessions(), 2);
    // Closing the session is reported immediately, as usual.
    scene.client.close();
    until(&scene.other, is_change);
}

#[test]
fn requests_pending_at_a_disconnect_are_answered_once_and_in_order() {
    let scene = Scene::new();
    scene.other.watch(2, Watch { prefix: "asked".into(), exact: false }, false).unwrap();
    until(&scene.other, is_reply);
    scene.proxy.way().holds_answers.store(true, Ordering::SeqCst);
    scene.client.txn(10, put("asked", false)).unwrap();
    // The store has executed the transaction, and the reply is on its way.
    until(&scene.other, is_change);
    scene.proxy.way().holds_requests.store(true, Ordering::SeqCst);
    scene.client.txn(11, put("then", false)).unwrap();
    scene.proxy.reset();
    let mut tags = Vec::new();
    until(&scene.client, |event| {
        if let Event::Reply { tag, .. } = event {
            tags.push(*tag);
        }
        tags.len() == 2
    });
    assert_eq!(tags, [10, 11]);
    // The second transaction is executed at least once. Clients must tolerate that a transaction is executed twice.
    until(&scene.other, is_change);
    scene.is_there();
}

#[test]
fn a_watch_reports_all_missed_changes_together_after_a_reconnect() {
    let mut scene = Scene::new();
    for (tag, key) in [(1, "w/stays"), (2, "w/goes")] {
        scene.other.txn(tag, put(key, false)).unwrap();
        until(&scene.other, is_reply);
    }
    scene.client.watch(1, Watch { prefix: "w/".into(), exact: false }, true).unwrap();
    until(&scene.client, is_reply);
    scene.proxy.stop_listening();
    scene.proxy.reset();
    let then = vec![Op::Delete("w/goes".into())];
    scene.other.txn(3, Txn { then, ..Txn::default() }).unwrap();
    scene.other.txn(4, put("w/comes", false)).unwrap();
    until(&scene.other, |event| matches!(event, Event::Reply { tag: 4, .. }));
    scene.proxy.listen();
    let Event::Changes { revision, changes } = until(&scene.client, is_change) else { unreachable!() };
    let told: Vec<_> = changes.iter().map(|change| (&*change.key, change.value.is_some())).collect();
    assert_eq!((revision, told), (4, vec![("w/goes", false), ("w/comes", true)]));
}

#[test]
fn a_session_moves_away_from_a_silent_connection_and_survives_its_end() {
    let scene = Scene::with(Duration::from_millis(10), 1000, NoGuard);
    scene.register();
    let way = scene.proxy.way();
    way.holds_requests.store(true, Ordering::SeqCst);
    way.holds_answers.store(true, Ordering::SeqCst);
    wait_until("another connection", || scene.proxy.count() >= 2);
    scene.is_there();
    // Only now does the store see that the first connection is closed.
    way.is_finished.store(true, Ordering::SeqCst);
    scene.is_there();
    scene.is_registered();
    assert_eq!(scene.server.sessions(), 2);
}

#[test]
fn a_client_cannot_resume_a_session_that_the_store_has_ended() {
    let scene = Scene::new();
    scene.register();
    // Close the connection to the store, as the kernel does when a process dies.
    scene.proxy.way().is_finished.store(true, Ordering::SeqCst);
    until(&scene.other, is_change);
    let (kind, message) = lost(&scene.client);
    assert_eq!(kind, LostKind::Gone, "{message}");
}

#[test]
fn a_client_refuses_an_empty_store_after_it_has_used_another_store() {
    let scene = Scene::new();
    let empty = serve(&scene.runtime);
    let met = scene.client.events().met();
    scene.proxy.target.store(empty.port(), Ordering::SeqCst);
    scene.proxy.reset();
    let (kind, message) = lost(&scene.client);
    assert_eq!(kind, LostKind::Other, "{message}");
    assert!(message.contains("is not the store that this node has met before"), "{message}");
    let again = Options { met, ..options(empty.port(), HANG) };
    let again = client::connect(&scene.runtime, again, Box::new(NoGuard)).unwrap();
    assert_eq!(lost(&again).0, LostKind::Other);
    let fresh = client::connect(&scene.runtime, options(empty.port(), HANG), Box::new(NoGuard)).unwrap();
    until(&fresh, |event| matches!(event, Event::Connected { .. }));
}

#[test]
fn an_unreachable_store_is_reported_before_the_connection_is_lost() {
    let mut scene = Scene::with(Duration::from_millis(500), 8, NoGuard);
    scene.proxy.stop_listening();
    scene.proxy.reset();
    let mut notices = Vec::new();
    let event = until(&scene.client, |event| {
        if let Event::Notice { message } = event {
            notices.push(message.clone());
        }
        is_lost(event)
    });
    let Event::ConnectionLost { kind, message } = event else { unreachable!() };
    assert_eq!(kind, LostKind::Refused, "{message}");
    assert!(message.contains("has not answered for") && message.contains("connection refused"), "{message}");
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].contains("does not answer (could not connect to"), "{notices:?}");
    assert!(notices[0].contains("nothing is stopped for up to "), "{notices:?}");
}

#[test]
fn a_store_that_is_reachable_again_is_reported() {
    let mut scene = Scene::new();
    scene.register();
    scene.proxy.stop_listening();
    scene.proxy.reset();
    until(&scene.client, |event| matches!(event, Event::Notice { .. }));
    scene.proxy.listen();
    let event = until(&scene.client, |event| matches!(event, Event::Notice { .. }));
    let Event::Notice { message } = event else { unreachable!() };
    assert!(message.contains("answers again after") && message.ends_with("nothing was restarted"), "{message}");
    scene.is_registered();
}

#[test]
fn a_client_can_be_closed_while_its_store_is_unreachable() {
    let mut scene = Scene::new();
    scene.proxy.stop_listening();
    scene.proxy.reset();
    scene.client.close();
    assert!(scene.client.events().has_nothing_to_come());
}

/// A guard that behaves like a slow nursery.
#[derive(Clone, Default)]
struct Slow(Arc<Mutex<Vec<&'static str>>>, Arc<Notify>);

impl Slow {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    fn has_noted(&self, what: &[&str]) -> bool {
        *self.0.lock().unwrap() == what
    }
}

impl Guard for Slow {
    fn connected(&self, _socket: BorrowedFd<'_>) {
        self.note("connected");
    }

    fn resuming(&self, _socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        self.note("resuming");
        let is_held = Arc::clone(&self.1);
        Box::pin(async move { is_held.notified().await })
    }

    fn resumed(&self, on_new: bool) {
        self.note(if on_new { "resumed" } else { "not resumed" });
    }

    fn closed(&self) {
        self.note("closed");
    }
}

#[test]
fn a_resuming_client_sends_nothing_until_the_nursery_holds_the_connection() {
    let guard = Slow::default();
    let scene = Scene::with(Duration::from_millis(100), 300, guard.clone());
    scene.proxy.reset();
    wait_until("the nursery is asked", || guard.has_noted(&["connected", "resuming"]));
    wait_until("the connection is there", || scene.proxy.count() == 1);
    assert_eq!(scene.proxy.way().requested.load(Ordering::SeqCst), 0);
    guard.1.notify_one();
    scene.is_there();
    assert!(guard.has_noted(&["connected", "resuming", "resumed"]));
    scene.client.close();
    assert!(guard.has_noted(&["connected", "resuming", "resumed", "closed"]));
}

#[test]
fn the_guard_is_notified_if_a_session_does_not_move_to_a_new_connection() {
    let guard = Slow::default();
    guard.1.notify_one();
    let scene = Scene::with(Duration::from_millis(100), 300, guard.clone());
    let empty = serve(&scene.runtime);
    scene.proxy.target.store(empty.port(), Ordering::SeqCst);
    scene.proxy.reset();
    assert_eq!(lost(&scene.client).0, LostKind::Other);
    assert!(guard.has_noted(&["connected", "resuming", "not resumed"]), "{:?}", guard.0);
}
