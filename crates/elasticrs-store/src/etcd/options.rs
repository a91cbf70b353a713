//! What the maker of a client decides.

use std::time::Duration;

use super::tls;

/// Where a client connects, as whom, and how patient it is.
#[derive(Debug, Clone)]
pub struct Options {
    /// Hosts and ports of the members.
    pub endpoints: Vec<(String, u16)>,
    /// Put before each key.
    pub prefix: String,
    /// `None`: no TLS.
    pub tls: Option<tls::Files>,
    /// Name and password.
    pub user: Option<(String, String)>,
    /// How long the lease lives without a keep-alive; etcd may make it longer.
    pub ttl: Duration,
    /// The lease of keys that outlive the session, and how long it lives.
    pub job_lease: Option<(i64, Duration)>,
    /// For names, connections and the beginning of the session, on all endpoints together.
    pub connect_timeout: Duration,
    /// For a request, over all attempts.
    pub read_timeout: Duration,
    /// Keep-alives stop when the user has not asked for events for so long; `None`: never.
    pub stall_timeout: Option<Duration>,
    /// The sessions with which this session has links, if its guard sends last words. `None` for no links.
    pub links: Option<Site>,
}

/// Which sessions are linked, and where this one is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Sessions of one scope are linked with each other.
    pub scope: String,
    /// Where others reach this machine, beside the address from which it reaches etcd.
    pub host: Option<String>,
}
