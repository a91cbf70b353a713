//! The hook of the nursery: a duplicate of the connection keeps the session until it is closed.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticrs_runtime::runtime::Runtime;
use elasticrs_store::coordination::client::{Client, Options};
use elasticrs_store::coordination::events::Event;
use elasticrs_store::coordination::guard::{Guard, NoGuard};
use elasticrs_store::coordination::server::{Config, MAX_BYTES, REQUEST_TIMEOUT, Server};
use elasticrs_store::coordination::types::{Op, Txn, Watch};

const HANG: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Seen {
    duplicate: Option<OwnedFd>,
    deadlines: Vec<u64>,
    closed: usize,
}

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Seen>>);

impl Guard for Recorder {
    fn connected(&self, socket: BorrowedFd<'_>) {
        self.0.lock().unwrap().duplicate = Some(socket.try_clone_to_owned().unwrap());
    }

    fn deadline(&self, boot_ns: u64) {
        self.0.lock().unwrap().deadlines.push(boot_ns);
    }

    fn closed(&self) {
        self.0.lock().unwrap().closed += 1;
    }
}

fn serve(runtime: &Runtime) -> Server {
    let config = Config {
        run_id: None,
        token: None,
        max_connections: 100,
        max_bytes: MAX_BYTES,
        request_timeout: REQUEST_TIMEOUT,
    };
    Server::start(runtime, &[("127.0.0.1".into(), 0)], config, Box::new(drop)).unwrap()
}

fn connect(runtime: &Runtime, server: &Server, interval: Duration, guard: impl Guard + 'static) -> Client {
    let options = Options {
        host: "127.0.0.1".into(),
        port: server.port(),
        run_id: "run".into(),
        token: None,
        interval,
        attempts: 100,
        connect_timeout: HANG,
        stall_timeout: None,
    };
    Client::start(runtime, options, Box::new(guard)).unwrap()
}

/// Takes events until one is found.
fn until(client: &Client, mut found: impl FnMut(&Event) -> bool) {
    loop {
        assert!(client.events().wait(Some(HANG)).unwrap());
        if client.events().take().iter().any(&mut found) {
            return;
        }
    }
}

fn is_reply(event: &Event) -> bool {
    matches!(event, Event::Reply { .. })
}

fn is_change(event: &Event) -> bool {
    matches!(event, Event::Changes { .. })
}

fn lease(client: &Client) {
    let put = Op::Put { key: "member".into(), value: [].into(), leased: true };
    client.txn(1, Txn { then: vec![put], ..Txn::default() }).unwrap();
    until(client, is_reply);
}

fn watch(client: &Client) {
    client.watch(1, Watch { prefix: "member".into(), exact: true }, false, None).unwrap();
    until(client, is_reply);
}

#[test]
fn the_session_of_a_dead_process_lasts_until_the_duplicate_is_closed() {
    let runtime = Runtime::new("elasticrs-store").unwrap();
    let server = serve(&runtime);
    let watcher = connect(&runtime, &server, HANG, NoGuard);
    watch(&watcher);
    let guard = Recorder::default();
    let doomed = Runtime::new("elasticrs-store").unwrap();
    let client = connect(&doomed, &server, HANG, guard.clone());
    lease(&client);
    until(&watcher, is_change);
    // Whatever runs the client is gone; nothing of it has closed the session.
    drop(doomed);
    until(&client, |event| matches!(event, Event::Lost { .. }));
    let put = Op::Put { key: "other".into(), value: [].into(), leased: false };
    watcher.txn(2, Txn { then: vec![put], ..Txn::default() }).unwrap();
    until(&watcher, is_reply);
    assert_eq!(server.sessions(), 2);
    drop(guard.0.lock().unwrap().duplicate.take());
    until(&watcher, is_change);
    assert_eq!(server.sessions(), 1);
}

#[test]
fn close_ends_the_session_although_a_duplicate_is_held() {
    let runtime = Runtime::new("elasticrs-store").unwrap();
    let server = serve(&runtime);
    let watcher = connect(&runtime, &server, HANG, NoGuard);
    watch(&watcher);
    let guard = Recorder::default();
    let client = connect(&runtime, &server, HANG, guard.clone());
    lease(&client);
    until(&watcher, is_change);
    client.close();
    until(&watcher, is_change);
    let seen = guard.0.lock().unwrap();
    assert!(seen.duplicate.is_some());
    assert_eq!(seen.closed, 1);
}

#[test]
fn every_answered_keep_alive_moves_the_deadline() {
    let runtime = Runtime::new("elasticrs-store").unwrap();
    let server = serve(&runtime);
    let guard = Recorder::default();
    let client = connect(&runtime, &server, Duration::from_millis(10), guard.clone());
    let begun = std::time::Instant::now();
    while guard.0.lock().unwrap().deadlines.len() < 5 {
        assert!(begun.elapsed() < HANG);
        client.events().wait(Some(Duration::from_millis(5))).unwrap();
        client.events().take();
    }
    let deadlines: Vec<u64> = guard.0.lock().unwrap().deadlines.clone();
    assert!(deadlines.is_sorted(), "{deadlines:?}");
    // 10 ms x 100, less the interval by which this side is earlier.
    let now = elasticrs_runtime::clock::boot_now();
    assert!(*deadlines.last().unwrap() <= now + 990_000_000);
    // Its end by itself leaves the last deadline and the duplicate: its owner has to act before that.
    drop(server);
    until(&client, |event| matches!(event, Event::Lost { .. }));
    let seen = guard.0.lock().unwrap();
    assert_eq!((seen.closed, seen.duplicate.is_some()), (0, true));
}
