//! A small HTTP server that says how an agent is, for orchestrators, monitoring and people.
//!
//! It runs on a thread of its own: neither the agent's loop nor the runtime thread of the supervisor ever waits for a
//! client, and it can answer while either of them hangs, which is its purpose. What it serves is what others have told it:
//! the loop publishes the state of the workers when that changes, the metrics come through [`Handle`], and counters of the
//! runtime are atomics that are read in passing. Only the question whether the loop is alive needs the loop: a request for
//! it makes a descriptor readable, which the loop watches among its others, and the answer is waited for a moment. It goes
//! by way of the runtime thread, so that it says that both are alive. So an idle agent sleeps until somebody asks.
//!
//! Who owns what: the [`Handle`] belongs to the agent's thread; sockets belong to the server's thread alone; what both use
//! is behind short locks. What may hang in the kernel, the look at the files of a dead network mount, has a thread of its
//! own ([`log_sizes`]), which nobody waits for longer than a moment.
//!
//! - **HEALTH-1** a client has so much time for its request and for taking the answer, and no more;
//! - **HEALTH-2** there are never more than [`server::MAX_CONNECTIONS`] connections; the oldest makes room for a new one;
//! - **HEALTH-3** many requests for one answer cost the loop one wake-up;
//! - **HEALTH-4** the agent counts as dead when a question is not answered within the limit, or when the last answer said
//!   that progress is longer ago than that, and in no other case;
//! - **HEALTH-5** a handle that is closed or dropped has ended its threads, but for one that hangs in a file system, and
//!   closed the port.

pub mod http;
pub mod liveness;
pub mod log_sizes;
pub mod metrics;
pub mod names;
pub mod processes;
pub mod server;
mod spans;

pub use metrics::{Cause, Job, State};
pub use processes::Worker;
pub use server::{Handle, Settings};
pub use spans::{Activity, Spans};

/// What the agent tells of the job. The error is in words.
pub fn parse_status(text: &str) -> Result<serde_json::Value, String> {
    match serde_json::from_str(text) {
        Ok(status @ serde_json::Value::Object(_)) => Ok(status),
        Ok(_) => Err("the status is no object".into()),
        Err(error) => Err(format!("the status is no JSON: {error}")),
    }
}
