//! A small HTTP server that reports the state of an agent to orchestrators, monitoring systems and people.
//!
//! The server runs on a thread of its own. Therefore the agent's loop and the supervisor's runtime thread never wait
//! for a client, and the server can still answer when either of these threads hangs. It serves data that other threads
//! provide: the loop publishes the state of the workers when the state changes, the agent reports metrics through
//! [`Handle`], and the server reads the counters of the core through a
//! [`Source`](elasticrs_runtime::readings::Source). Only the liveness check needs the
//! loop. A liveness request makes a file descriptor readable, which the loop polls together with its other descriptors.
//! The request then waits a short time for the loop's answer. The answer passes through the runtime thread, so it
//! proves that both threads are alive. Without requests, the server does not wake an idle agent.
//!
//! The [`Handle`] belongs to the agent's thread, and the sockets belong to the server's thread. Shared data is
//! protected by locks that are held briefly. A separate thread checks the sizes of log files ([`log_sizes`]), because a
//! check on a dead network mount may hang in the kernel. Other threads wait for that thread only for a short time.
//!
//! | module | contents |
//! | --- | --- |
//! | [`server`] | [`Handle`], the thread of the server, and the response to each path |
//! | [`http`], [`names`] | the part of HTTP that is needed, and the check of the host name in a request |
//! | [`page`] | the page for browsers, and the events that keep it current |
//! | `control` | the control socket: the agent's Unix socket for `elasticctl` |
//! | [`orders`] | requests to act, over the control socket, for the agent's loop |
//! | [`outline`] | the status of the job until the loop publishes one |
//! | [`liveness`] | decides whether the agent is alive (pure) |
//! | [`metrics`] | counts the metrics that the agent reports, and renders the page of all metrics; time of the job by activity |
//! | [`processes`], [`log_sizes`], [`steps`] | values read at a scrape: from `/proc`, log files, and files in memory of the workers |
//!
//! - **HEALTH-1** A client has limited time for sending its request and for reading the response.
//! - **HEALTH-2** There are at most [`server::MAX_CONNECTIONS`] connections over TCP, and
//!   [`server::MAX_CONTROLLERS`] to the control socket. A new connection replaces the oldest one of its kind.
//! - **HEALTH-3** Requests that arrive while the loop has not answered yet share one question to the loop.
//! - **HEALTH-4** The agent counts as dead only in three cases: it has not answered a question in time, its loop has
//!   been busy with one event for too long, or according to its last answer, its last progress was too long ago. All
//!   three cases have the same time limit.
//! - **HEALTH-5** Closing or dropping a handle closes the port and stops the server's threads, except a thread that
//!   hangs in a file system.

mod control;
pub mod http;
pub mod liveness;
pub mod log_sizes;
pub mod metrics;
pub mod names;
pub mod orders;
pub mod outline;
pub mod page;
pub mod processes;
pub mod server;
pub mod steps;

pub use metrics::{Activity, Cause, Job, Spans, State};
pub use orders::Order;
pub use outline::Outline;
pub use processes::Worker;
pub use server::Handle;

/// Parses the status of the job. The text must be a JSON object. The error is a message for the user.
pub fn parse_status(text: &str) -> Result<serde_json::Value, String> {
    match serde_json::from_str(text) {
        Ok(status @ serde_json::Value::Object(_)) => Ok(status),
        Ok(_) => Err("the status is no object".into()),
        Err(error) => Err(format!("the status is no JSON: {error}")),
    }
}
