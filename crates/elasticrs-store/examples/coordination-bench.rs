//! Benchmark of the coordination store over loopback: `coordination-bench [watchers] [sessions]`.
//!
//! The server and the clients have a thread each. Prints the transactions per second (one client, pipelined) and
//! the time from a transaction until the last watcher sees the change. Also prints the memory of the process with
//! all sessions open.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use elasticrs_runtime::runtime::Runtime;
use elasticrs_store::coordination::client::{self, Options};
use elasticrs_store::coordination::protocol::{Hello, Request, VERSION};
use elasticrs_store::coordination::server::{Config, MAX_BYTES, REQUEST_TIMEOUT, Server};
use elasticrs_store::coordination::wire::{Frames, MAGIC};
use elasticrs_store::session::client::{Client, NoGuard};
use elasticrs_store::session::events::Event;
use elasticrs_store::types::{Compare, Op, Txn, Watch};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const TXNS: u64 = 200_000;
const IN_FLIGHT: u64 = 512;
const ROUNDS: usize = 200;
const HANG: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let watchers = arguments.first().copied().unwrap_or(1_000);
    let sessions = arguments.get(1).copied().unwrap_or(9_500);
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let (store, users) = (Runtime::new("elasticrs-store")?, Runtime::new("elasticrs-store")?);
    let config = Config {
        run_id: None,
        token: None,
        max_connections: 100_000,
        max_bytes: MAX_BYTES,
        request_timeout: REQUEST_TIMEOUT,
        state: None,
    };
    let server = Server::start(&store, &[("127.0.0.1".into(), 0)], config, Box::new(|_| false), Box::new(drop))?;
    let port = server.port();
    let mut out = io::stdout().lock();

    let writer = connect(&users, port)?;
    writeln!(out, "{:.0} transactions per second ({IN_FLIGHT} in flight)", transactions(&writer)?)?;
    let mut delays = fan_out(&users, port, &writer, watchers)?;
    delays.sort();
    let (median, p99) = (delays[delays.len() / 2], delays[delays.len() * 99 / 100]);
    writeln!(out, "{watchers} watchers: the last of them hears after {median:.1?} (median), {p99:.1?} (p99)")?;

    let before = resident_kib()?;
    let begun = Instant::now();
    let many = sessions_of(port, sessions)?;
    let joined = begun.elapsed();
    let added = resident_kib()? - before;
    writeln!(out, "{sessions} sessions in {joined:.1?}: {added} KiB more ({} KiB in all)", resident_kib()?)?;
    drop(many);
    Ok(())
}

/// Opens sessions as plain sockets, with one descriptor each, so that the memory that they use is the server's.
fn sessions_of(port: u16, count: usize) -> io::Result<Vec<TcpStream>> {
    let hello = Hello {
        version: VERSION,
        run_id: String::new(),
        interval_ms: 3_600_000,
        attempts: 1_000,
        challenge: [0; 32],
        resume: None,
        confirmed: None,
    };
    let hello = [&MAGIC[..], &Request::Hello(hello).encode()].concat();
    let mut streams = Vec::new();
    for number in 0..count {
        let key = format!("nodes/{number:016x}/1");
        let put = Op::Put { key: key.into(), value: [7; 300][..].into(), leased: true };
        let put = Request::Txn { tag: 1, txn: Txn { then: vec![put], ..Txn::default() } }.encode();
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(&hello)?;
        stream.write_all(&put)?;
        streams.push(stream);
    }
    for stream in &mut streams {
        let mut frames = Frames::new(1 << 20);
        let mut chunk = [0; 1024];
        let mut seen = 0;
        while seen < 3 {
            let length = stream.read(&mut chunk)?;
            frames.feed(&chunk[..length]);
            while frames.cut().map_err(io::Error::other)?.is_some() {
                seen += 1;
            }
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
    Ok(streams)
}

fn connect(runtime: &Runtime, port: u16) -> io::Result<Client> {
    let options = Options {
        host: "127.0.0.1".into(),
        port,
        run_id: String::new(),
        token: None,
        scope: None,
        interval: Duration::from_secs(1),
        attempts: 60,
        connect_timeout: HANG,
        stall_timeout: None,
        resume: false,
        met: None,
    };
    client::connect(runtime, options, Box::new(NoGuard))
}

fn put(key: &str) -> Txn {
    let put = Op::Put { key: key.into(), value: [7; 100][..].into(), leased: false };
    Txn { compares: vec![Compare::Missing("none".into())], then: vec![put], ..Txn::default() }
}

/// Waits for `count` events of a client.
fn take(client: &Client, wanted: impl Fn(&Event) -> bool, mut count: usize) -> io::Result<()> {
    while count > 0 {
        if !client.events().wait(Some(HANG))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let events = client.events().take();
        if let Some(Event::ConnectionLost { message, .. }) = events.back() {
            return Err(io::Error::other(message.clone()));
        }
        count = count.saturating_sub(events.iter().filter(|event| wanted(event)).count());
    }
    Ok(())
}

fn transactions(client: &Client) -> Result<f64, Box<dyn std::error::Error>> {
    let begun = Instant::now();
    let (mut sent, mut answered) = (0, 0);
    while answered < TXNS {
        while sent < TXNS && sent - answered < IN_FLIGHT {
            client.txn(sent, put(&format!("k/{}", sent % 1000)))?;
            sent += 1;
        }
        client.events().wait(Some(HANG))?;
        let events = client.events().take();
        answered += events.iter().filter(|event| matches!(event, Event::Reply { .. })).count() as u64;
    }
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    Ok(TXNS as f64 / begun.elapsed().as_secs_f64())
}

fn fan_out(
    runtime: &Runtime,
    port: u16,
    writer: &Client,
    watchers: usize,
) -> Result<Vec<Duration>, Box<dyn std::error::Error>> {
    let watching = connect_all(runtime, port, watchers)?;
    for client in &watching {
        client.watch(0, Watch { prefix: "head".into(), exact: true }, false)?;
    }
    for client in &watching {
        take(client, |event| matches!(event, Event::Reply { .. }), 1)?;
    }
    let mut delays = Vec::new();
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        writer.txn(0, put("head"))?;
        for client in &watching {
            take(client, |event| matches!(event, Event::Changes { .. }), 1)?;
        }
        delays.push(begun.elapsed());
    }
    Ok(delays)
}

fn connect_all(runtime: &Runtime, port: u16, count: usize) -> io::Result<Vec<Client>> {
    let clients = (0..count).map(|_| connect(runtime, port)).collect::<io::Result<Vec<_>>>()?;
    for client in &clients {
        take(client, |event| matches!(event, Event::Connected { .. }), 1)?;
    }
    Ok(clients)
}

fn resident_kib() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    Ok(line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0))
}
