//! A small HTTP server that reports the state of an agent to orchestrators, monitoring systems and people.
//!
//! The server runs on a thread of its own. Neither the agent's loop nor the supervisor's runtime thread ever waits for
//! a client, and the server can still answer when one of them hangs. It serves data that other threads provide: the
//! loop publishes the state of the workers when it changes, metrics are reported through [`Handle`], and the counters
//! of the core are read through a [`Source`]. Only the liveness check needs the loop. A liveness request makes a file
//! descriptor readable, which the loop polls together with its other descriptors, and then waits a short time for the
//! answer. The answer passes through the runtime thread, so it proves that both threads are alive. The server wakes an
//! idle agent only for a request.
//!
//! The [`Handle`] belongs to the agent's thread, and the sockets belong to the server's thread. Shared data is
//! protected by locks that are held briefly. Checking files on a dead network mount may hang in the kernel, so a
//! separate thread does it ([`log_sizes`]). Other threads wait for that thread only for a short time.
//!
//! - **HEALTH-1** A client has limited time for sending its request and for reading the response.
//! - **HEALTH-2** There are at most [`server::MAX_CONNECTIONS`] connections. A new connection replaces the oldest one.
//! - **HEALTH-3** Several requests that wait for the same answer wake the loop only once.
//! - **HEALTH-4** The agent counts as dead only in three cases, all with the same time limit: it does not answer a
//!   question in time, its loop is busy with one event for too long, or its last answer reported that its last progress
//!   was too long ago.
//! - **HEALTH-5** Closing or dropping a handle closes the port and stops its threads, except a thread that hangs in a
//!   file system.

pub mod http;
pub mod liveness;
pub mod log_sizes;
pub mod metrics;
pub mod names;
pub mod processes;
pub mod server;
pub mod source;
mod spans;

pub use metrics::{Cause, Job, State};
pub use processes::Worker;
pub use server::{Handle, Settings};
pub use source::{Output, Source};
pub use spans::{Activity, Spans};

/// Parses the agent's status of the job, which must be a JSON object. The error is a message for the user.
pub fn parse_status(text: &str) -> Result<serde_json::Value, String> {
    match serde_json::from_str(text) {
        Ok(status @ serde_json::Value::Object(_)) => Ok(status),
        Ok(_) => Err("the status is no object".into()),
        Err(error) => Err(format!("the status is no JSON: {error}")),
    }
}
