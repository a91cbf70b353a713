//! Counts of timers and log lines, and the workers' heartbeats, as reported by the health server.

use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::named_enum;

named_enum! {
    /// Standard output or standard error.
    #[derive(PartialOrd, Ord)]
    pub enum Dest {
        Stdout = "stdout",
        Stderr = "stderr",
    }
}

/// An output stream of a worker, identified by the worker's local rank and by standard output or standard error.
pub type Stream = (u32, Dest);

/// Source of the reported values. Its methods run on the server's thread, and must not wait for other threads of the
/// agent, because those threads may hang.
pub trait Source: Send + Sync {
    /// Returns the current values.
    fn read(&self) -> Readings;

    /// Returns how long the agent's loop has been handling its current event. `None` if it is waiting for an event.
    fn at_work(&self) -> Option<Duration>;
}

/// Snapshot of the reported values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Readings {
    pub timers: TimerCounts,
    /// Output streams that are copied to the console. Each entry contains the stream, the number of bytes read, and the
    /// number of newlines read.
    pub logs: Vec<(Stream, u64, u64)>,
    /// Last heartbeat of each worker that has sent one.
    pub heartbeats: Vec<Heartbeat>,
}

/// Numbers of expiration timers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TimerCounts {
    /// Number of timers that are neither released nor expired.
    pub live: u64,
    pub expired: u64,
    /// Number of expired timers that were handled more than 10 ms after their deadline.
    pub late: u64,
}

/// The last heartbeat of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    pub local_rank: u32,
    pub at: Stamp,
    pub step: Option<u64>,
    /// True if the worker counts its steps across restarts.
    pub is_global: bool,
    /// True if `step` is the number of optimizer steps that this library has counted.
    pub is_automatic: bool,
    pub section: Option<String>,
    /// True if the program has returned, and the process is exiting.
    pub has_returned: bool,
}
