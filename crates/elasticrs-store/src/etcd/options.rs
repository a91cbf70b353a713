//! Options of an etcd client.

use std::time::Duration;

use super::tls;

/// Endpoints, credentials and time limits of a client.
#[derive(Debug, Clone)]
pub struct Options {
    /// Hosts and ports of the etcd members.
    pub endpoints: Vec<(String, u16)>,
    /// Prefix that is added to each key.
    pub prefix: String,
    /// Certificate files for TLS. `None` to connect without TLS. The files are read again for each connection, because
    /// certificates are renewed in place.
    pub tls: Option<tls::Files>,
    /// Name and password of the etcd user. `None` to connect without authentication.
    pub user: Option<(String, String)>,
    /// Time to live to request for the lease. etcd may grant a longer one.
    pub ttl: Duration,
    /// ID and time to live of the lease for keys that outlive the session. `None` to put these keys without a lease.
    pub job_lease: Option<(i64, Duration)>,
    /// Time limit for opening the session. It includes name lookups, and covers all endpoints together.
    pub connect_timeout: Duration,
    /// Time limit for a request, including all its retries.
    pub read_timeout: Duration,
    /// Time after which keep-alives stop if the user does not fetch events. `None` if they never stop.
    pub stall_timeout: Option<Duration>,
    /// Settings for links: connections through which sessions notice each other's end before a lease expires. `None` to
    /// disable links.
    ///
    /// Ignored if no other process can announce the end of this session after this process has died.
    pub links: Option<Site>,
}

/// Settings for the links of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Name of a group of sessions. Only sessions of the same group connect to each other.
    pub scope: String,
    /// Host name or address at which other sessions can reach this machine, or `None`. It is published in addition to
    /// the local address of the connection to etcd.
    pub host: Option<String>,
}
