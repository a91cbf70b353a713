//! Tests for the workers' store over real sockets, with clients that misbehave.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use elasticrs_runtime::listen::Port;
use elasticrs_runtime::runtime::Runtime;
use elasticrs_store::worker::wire::{put_bytes, put_number};
use elasticrs_store::worker::{Limits, ServeError, WorkerStore};

const GREETING: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];
/// Time limit that keeps a test from hanging. No operation here takes long.
const HANG: Duration = Duration::from_secs(20);

struct Served {
    store: WorkerStore,
    lines: Receiver<String>,
    // Dropped after the store, because the store waits for the runtime when it is closed.
    _runtime: Runtime,
}

fn served(limits: Limits) -> Served {
    let store = WorkerStore::new(None, Port::Any, limits).unwrap();
    let runtime = Runtime::new("elasticrs-store").unwrap();
    let (tell, lines) = channel();
    store.serve(&runtime, Box::new(move |line| drop(tell.send(line)))).unwrap();
    Served { store, lines, _runtime: runtime }
}

impl Served {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.store.port())).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    fn greeted(&self) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(&GREETING).unwrap();
        stream
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(HANG).unwrap()
    }
}

fn request(opcode: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut out = vec![opcode];
    for field in fields {
        put_bytes(&mut out, field);
    }
    out
}

fn get(stream: &mut TcpStream, key: &[u8]) -> Vec<u8> {
    stream.write_all(&request(3, &[key])).unwrap();
    let mut length = [0; 8];
    stream.read_exact(&mut length).unwrap();
    let mut value = vec![0; usize::try_from(u64::from_le_bytes(length)).unwrap()];
    stream.read_exact(&mut value).unwrap();
    value
}

/// Reads and discards data until the peer has closed the connection.
fn read_to_the_end(stream: &mut TcpStream) {
    let mut buffer = [0; 1 << 13];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            // The connection is reset if the peer closes it with unread data.
            Err(error) => return assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

#[test]
fn the_greeting_may_come_in_pieces() {
    let served = served(Limits::default());
    let mut stream = served.connect();
    for byte in GREETING.iter().chain(&[13, 1, 2, 3, 4]) {
        stream.write_all(&[*byte]).unwrap();
    }
    let mut nonce = [0; 4];
    stream.read_exact(&mut nonce).unwrap();
    assert_eq!(nonce, [1, 2, 3, 4]);
}

/// Checks WS-4.
#[test]
fn invalid_input_closes_only_its_own_connection_with_one_log_line() {
    let served = served(Limits::default());
    let mut other = served.greeted();
    other.write_all(&request(1, &[b"key", b"value"])).unwrap();
    let mut long = vec![1];
    put_number(&mut long, i64::MAX);
    let cases: [(&[u8], &str); 6] = [
        (b"GET / HTTP/1.1\r\n", "not a client of a TCPStore"),
        (&[&GREETING[..], &[99]].concat(), "unknown operation 99"),
        (&[&GREETING[..], &long].concat(), "a key of 9223372036854775807 bytes (the limit is 8192)"),
        (&[&GREETING[..], b"\x01\x02\0\0\0\0\0\0\0k"].concat(), "it ended within a request"),
        (&[&GREETING[..], &request(1, &[b"word", b"abc"]), &request(4, &[b"word"]), &[0; 8]].concat(), "\"word\""),
        (b"\0\xCE", "it ended within a request"),
    ];
    for (bytes, expected) in cases {
        let mut stream = served.connect();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        read_to_the_end(&mut stream);
        let line = served.line();
        assert!(line.contains(expected) && line.contains(&stream.local_addr().unwrap().to_string()), "{line}");
        assert_eq!(get(&mut other, b"key"), b"value");
    }
    assert!(served.lines.try_recv().is_err());
}

#[test]
fn a_connection_without_a_greeting_is_closed() {
    let served = served(Limits { greeting: Duration::from_millis(300), ..Limits::default() });
    let mut silent = served.connect();
    let mut half = served.connect();
    half.write_all(&GREETING[..3]).unwrap();
    read_to_the_end(&mut silent);
    read_to_the_end(&mut half);
    assert!(served.line().contains("within 0.3 s"));
    // A client that has sent its greeting may be silent forever, because no further deadline applies to it.
    let mut greeted = served.greeted();
    assert_eq!(get(&mut greeted, b"none"), b"");
}

/// Checks WS-3, WS-4.
#[test]
fn a_client_that_stops_reading_is_disconnected_and_holds_little_memory() {
    let limits = Limits { bytes: 20 << 20, stall: Duration::from_secs(2), ..Limits::default() };
    let served = served(limits);
    let mut other = served.greeted();
    let value = vec![7; 4 << 20];
    other.write_all(&request(1, &[b"large", &value])).unwrap();
    assert_eq!(get(&mut other, b"large"), value, "it is there before anybody else asks for it");
    let mut stopped = served.greeted();
    // If all requests were answered at once, the replies would exceed the limit many times over.
    stopped.write_all(&request(3, &[b"large"]).repeat(100)).unwrap();
    assert_eq!(get(&mut other, b"large"), value);
    let line = served.line();
    assert!(line.contains("it did not take its replies for 2 s"), "{line}");
    read_to_the_end(&mut stopped);
    assert_eq!(get(&mut other, b"large"), value);
}

/// Checks WS-3.
#[test]
fn replies_that_the_client_has_do_not_count_toward_the_memory_limit() {
    let served = served(Limits { bytes: 20 << 20, ..Limits::default() });
    let mut client = served.greeted();
    let value = vec![7; 4 << 20];
    client.write_all(&request(1, &[b"key", &value])).unwrap();
    assert_eq!(get(&mut client, b"key"), value);
    client.write_all(&request(3, &[b"key"]).repeat(100)).unwrap();
    let mut left = 100 * (8 + value.len());
    let mut piece = vec![0; 16 << 10];
    while left > 0 {
        match client.read(&mut piece) {
            Ok(length) if length > 0 => left -= length,
            end => panic!("{left} bytes are missing: {end:?}, {}", served.line()),
        }
    }
}

/// Checks WS-3.
#[test]
fn incomplete_requests_count_toward_the_memory_limit() {
    let served = served(Limits { bytes: 1 << 20, ..Limits::default() });
    let mut other = served.greeted();
    let mut large = served.greeted();
    // Ignore an error, because the store resets the connection while this client is still sending.
    let _ = large.write_all(&request(1, &[b"large", &vec![0; 4 << 20]]));
    read_to_the_end(&mut large);
    assert!(served.line().contains("the store is full (the limit is 1048576 bytes)"));
    other.write_all(&request(1, &[b"small", &[5; 1000]])).unwrap();
    assert_eq!(get(&mut other, b"small"), [5; 1000]);
}

/// Checks WS-2.
#[test]
fn pipelined_requests_are_answered_in_order() {
    let served = served(Limits::default());
    let mut stream = served.greeted();
    let mut bytes = Vec::new();
    for number in 0..20_000_u32 {
        bytes.extend(request(1, &[b"key", &number.to_le_bytes()]));
        bytes.extend(request(3, &[b"key"]));
    }
    let mut reader = stream.try_clone().unwrap();
    let writer = std::thread::spawn(move || stream.write_all(&bytes).unwrap());
    for number in 0..20_000_u32 {
        let mut reply = [0; 12];
        reader.read_exact(&mut reply).unwrap();
        assert_eq!(reply[8..], number.to_le_bytes());
    }
    writer.join().unwrap();
}

/// Checks WS-5.
#[test]
fn close_ends_the_listener_and_every_connection() {
    let served = served(Limits::default());
    let mut waits = served.greeted();
    let mut wait = vec![13, 210, 4, 0, 0, 6];
    put_number(&mut wait, 2);
    put_bytes(&mut wait, b"/one");
    put_bytes(&mut wait, b"/two");
    waits.write_all(&wait).unwrap();
    let mut other = served.greeted();
    other.write_all(&request(1, &[b"/two", b""])).unwrap();
    get(&mut other, b"/two");
    let mut nonce = [0; 4];
    waits.read_exact(&mut nonce).unwrap();
    let name = format!("{} (pid 1234)", waits.local_addr().unwrap());
    let deadline = Instant::now() + HANG;
    // The first client sent both requests in one segment, so the store soon lists it as waiting.
    while served.store.waiting().is_empty() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(served.store.waiting(), [(name, vec!["/one".to_owned()])].into());
    served.store.close();
    read_to_the_end(&mut waits);
    read_to_the_end(&mut other);
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, served.store.port())).is_err());
    assert!(served.store.waiting().is_empty());
    served.store.close();
    assert!(matches!(
        served.store.serve(&Runtime::new("elasticrs-store").unwrap(), Box::new(drop)),
        Err(ServeError::Closed)
    ));
    assert!(served.lines.try_recv().is_err());
}

#[test]
fn a_store_accepts_connections_before_serve_and_serves_only_once() {
    let store = WorkerStore::new(None, Port::Any, Limits::default()).unwrap();
    let mut early = TcpStream::connect((Ipv4Addr::LOCALHOST, store.port())).unwrap();
    early.write_all(&GREETING).unwrap();
    let runtime = Runtime::new("elasticrs-store").unwrap();
    store.serve(&runtime, Box::new(drop)).unwrap();
    assert_eq!(get(&mut early, b"none"), b"");
    assert!(matches!(store.serve(&runtime, Box::new(drop)), Err(ServeError::Serving)));
    // Stop the thread first. The store then has nothing left to close.
    drop(runtime);
    store.close();
    read_to_the_end(&mut early);
}

#[test]
fn all_clients_that_wait_for_a_key_are_woken() {
    let served = served(Limits::default());
    let mut wait = vec![6];
    put_number(&mut wait, 1);
    put_bytes(&mut wait, b"key");
    let mut waiters: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = served.greeted();
            stream.write_all(&wait).unwrap();
            stream
        })
        .collect();
    served.greeted().write_all(&request(1, &[b"key", b""])).unwrap();
    for stream in &mut waiters {
        let mut ready = [9];
        stream.read_exact(&mut ready).unwrap();
        assert_eq!(ready, [0]);
    }
}
