//! Helpers for tests: a store and its clients.
#![allow(dead_code, reason = "each test uses some of it")]

use std::time::Duration;

use elasticrs_runtime::runtime::Runtime;
use elasticrs_store::coordination::client::Options;
use elasticrs_store::coordination::server::{Config, MAX_BYTES, REQUEST_TIMEOUT, Server};
use elasticrs_store::session::client::Client;
use elasticrs_store::session::events::Event;
use elasticrs_store::types::{Op, Txn, Watch};

/// Time limit that keeps a test from hanging. No test measures it.
pub(crate) const HANG: Duration = Duration::from_secs(30);

pub(crate) fn serve(runtime: &Runtime) -> Server {
    let config = Config {
        run_id: None,
        token: None,
        max_connections: 100,
        max_bytes: MAX_BYTES,
        request_timeout: REQUEST_TIMEOUT,
        state: None,
    };
    Server::start(runtime, &[("127.0.0.1".into(), 0)], config, Box::new(|_| false), Box::new(drop)).unwrap()
}

pub(crate) fn options(port: u16, interval: Duration) -> Options {
    Options {
        host: "127.0.0.1".into(),
        port,
        run_id: "run".into(),
        token: None,
        scope: None,
        interval,
        attempts: 100,
        connect_timeout: HANG,
        stall_timeout: None,
        resume: false,
        met: None,
    }
}

/// Takes events until one matches, and returns it.
pub(crate) fn until(client: &Client, mut found: impl FnMut(&Event) -> bool) -> Event {
    loop {
        assert!(client.events().wait(Some(HANG)).unwrap());
        // Drop the events after it, because a test waits for one event at a time.
        if let Some(event) = client.events().take().into_iter().find(&mut found) {
            return event;
        }
    }
}

pub(crate) fn is_reply(event: &Event) -> bool {
    matches!(event, Event::Reply { .. })
}

pub(crate) fn is_change(event: &Event) -> bool {
    matches!(event, Event::Changes { .. })
}

pub(crate) fn is_lost(event: &Event) -> bool {
    matches!(event, Event::ConnectionLost { .. })
}

pub(crate) fn put(key: &str, leased: bool) -> Txn {
    let put = Op::Put { key: key.into(), value: [].into(), leased };
    Txn { then: vec![put], ..Txn::default() }
}

pub(crate) fn lease(client: &Client) {
    client.txn(1, put("member", true)).unwrap();
    until(client, is_reply);
}

pub(crate) fn watch(client: &Client) {
    client.watch(1, Watch { prefix: "member".into(), exact: true }, false).unwrap();
    until(client, is_reply);
}
