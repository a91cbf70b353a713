//! Tests for the guard, through which the nursery holds a duplicate of the connection. The session stays open
//! until the duplicate is closed.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{HANG, is_change, is_lost, is_reply, lease, options, put, serve, until, watch};
use elasticrs_runtime::runtime::Runtime;
use elasticrs_store::coordination::client;
use elasticrs_store::coordination::server::Server;
use elasticrs_store::session::client::{Client, Guard, NoGuard};

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

    fn resuming(&self, _socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        unreachable!("no session of these tests is taken up again");
    }

    fn deadline(&self, boot_ns: u64) {
        self.0.lock().unwrap().deadlines.push(boot_ns);
    }

    fn closed(&self) {
        self.0.lock().unwrap().closed += 1;
    }
}

fn connect(runtime: &Runtime, server: &Server, interval: Duration, guard: impl Guard + 'static) -> Client {
    client::connect(runtime, options(server.port(), interval), Box::new(guard)).unwrap()
}

#[test]
fn the_session_of_a_dead_client_lasts_until_the_duplicate_socket_closes() {
    let runtime = Runtime::new("elasticrs-store").unwrap();
    let server = serve(&runtime);
    let watcher = connect(&runtime, &server, HANG, NoGuard);
    watch(&watcher);
    let guard = Recorder::default();
    let doomed = Runtime::new("elasticrs-store").unwrap();
    let client = connect(&doomed, &server, HANG, guard.clone());
    lease(&client);
    until(&watcher, is_change);
    // Drop the client's runtime. Nothing has closed the session.
    drop(doomed);
    until(&client, is_lost);
    watcher.txn(2, put("other", false)).unwrap();
    until(&watcher, is_reply);
    assert_eq!(server.sessions(), 2);
    drop(guard.0.lock().unwrap().duplicate.take());
    until(&watcher, is_change);
    assert_eq!(server.sessions(), 1);
}

#[test]
fn close_ends_the_session_even_if_a_duplicate_socket_is_held() {
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
    // The deadline is 100 intervals of 10 ms ahead, less one interval by which the client's deadline is earlier.
    let now = elasticrs_sys::clock::boot_now();
    assert!(*deadlines.last().unwrap() <= now + 990_000_000);
    // If the session ends by itself, the guard keeps the last deadline and the duplicate. Its owner has to act
    // before the deadline.
    drop(server);
    until(&client, is_lost);
    let seen = guard.0.lock().unwrap();
    assert_eq!((seen.closed, seen.duplicate.is_some()), (0, true));
}
