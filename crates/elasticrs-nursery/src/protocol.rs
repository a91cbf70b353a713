//! Messages between the agent and its nursery, which are connected by a Unix stream socket.
//!
//! The agent and its nursery normally come from the same build. [`PROTOCOL`] detects a nursery from another build that
//! is run by mistake. A frame consists of a little-endian `u32` length and a message of that length in the postcard
//! format. Descriptors are sent as `SCM_RIGHTS` with the first byte of the frame to which they belong.

use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::stage::Stage;
use serde::{Deserialize, Serialize};

use super::connections::{LastWord, Release};
use super::fence::Holder;
use crate::spec::ProcessSpec;

/// Version of this protocol. Increment it with every change to this file.
pub const PROTOCOL: u32 = 16;

/// Maximum length of a frame in bytes. The environments of 1024 workers need far less.
pub(crate) const MAX_FRAME: usize = 256 * 1024 * 1024;

/// Numbers of the file descriptors that the nursery process inherits. They are the socket, the agent's pidfd, and the
/// pipe for reporting the progress of starting a worker.
pub const FIXED_FDS: [i32; 3] = [3, 4, 5];

/// A message that is sent as one frame.
pub trait Message {
    /// Maximum number of bytes to queue for a peer that does not read.
    const MAX_UNSENT: usize;

    /// Number of file descriptors that are sent with the message.
    fn descriptors(&self) -> usize;
}

impl Message for Request {
    /// The limit is high, because the agent sends the start requests for all workers of a group at once, and each
    /// request contains the environment of a worker.
    const MAX_UNSENT: usize = 4 * MAX_FRAME;

    fn descriptors(&self) -> usize {
        match self {
            Self::Spawn { process, .. } => process.pass_fds.len(),
            Self::Hold { .. } => 1,
            Self::Fence { .. } | Self::Activity => 2,
            Self::Guard => 3,
            Self::SignalGroup { .. } | Self::Sweep { .. } | Self::Release(_) | Self::Leave => 0,
        }
    }
}

impl Message for Reply {
    /// The limit is high enough for hundreds of thousands of replies, because replies are queued while the agent is
    /// stopped. Each stop or resumption of a worker causes a reply.
    const MAX_UNSENT: usize = 16 * 1024 * 1024;

    fn descriptors(&self) -> usize {
        usize::from(matches!(self, Self::Spawned { .. }))
    }
}

/// Time limits of a clean-up of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepLimits {
    /// How long processes may continue to run before the first signal.
    pub linger: Duration,
    /// Time from SIGTERM to SIGKILL. Zero sends SIGKILL at once.
    pub grace: Duration,
    /// Time to wait for processes that SIGKILL has not ended. The remaining ones are then reported.
    pub give_up: Duration,
}

impl SweepLimits {
    /// Returns the time limits of a clean-up that begins with SIGKILL.
    pub const fn at_once(give_up: Duration) -> Self {
        Self { linger: Duration::ZERO, grace: Duration::ZERO, give_up }
    }
}

/// Selects the processes that a sweep does not kill, because they received a stop signal and may be saving. Their
/// worker was only a wrapper that the signal killed.
///
/// A process is selected if it is in the session of one of the workers and handles the signal. Descendants of selected
/// processes are selected as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Savers {
    /// Pids of the workers. The workers have already exited.
    pub workers: Vec<i32>,
    pub signal: i32,
}

/// A message from the agent to the nursery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Start one worker. The frame carries the descriptors of `pass_fds`, in the same order. Each `source` is an
    /// index into them.
    Spawn {
        process: ProcessSpec,
        /// Signals that the worker ignores, because they were already ignored when the agent was started (`nohup`).
        keep_ignored: Vec<i32>,
    },
    /// Send a signal to the process group of a worker. Unknown pids are ignored.
    ///
    /// The agent uses this request for SIGKILL, because the nursery spares [processes that unlink shared
    /// memory](super::cleaner). Before Linux 6.9, the agent uses it for all signals, because the kernel cannot signal a
    /// process group through a pidfd.
    SignalGroup {
        /// Pid of the worker, which leads its process group.
        pid: i32,
        signal: i32,
    },
    /// Stop all descendants of the nursery process, including workers, and wait until they have exited. The nursery
    /// answers with [`Reply::Swept`].
    ///
    /// A second request before the answer can only shorten the time limits. Both requests then get a single answer. A
    /// request with `left_by` is not answered if a request without `left_by` replaces it. The agent sends the next
    /// request with `left_by` only after the answer.
    Sweep {
        /// Number of this request. A single answer can complete several requests, and contains the number of the last
        /// one. An answer with a lower number does not complete this request.
        number: u32,
        /// Pid of an exited worker. Only the processes that this worker has left behind are stopped. These are never in
        /// the session of another worker, or below a running worker that is a
        /// [subreaper](ProcessSpec::keeps_orphans). `None` to stop all descendants.
        left_by: Option<i32>,
        limits: SweepLimits,
        /// Processes that are not killed, because they may still be saving after a stop signal.
        ///
        /// `None` to kill all processes. A second request before the answer replaces this value.
        savers: Option<Savers>,
    },
    /// Keep the connection whose descriptor is sent with this request open until the nursery process exits.
    ///
    /// Even if the agent dies, the peer sees the connection close only after all of the agent's processes have exited.
    Hold {
        /// True to keep the descriptors that are already held, false to replace them.
        beside: bool,
        /// Secret to send on the descriptor after the agent and all of its processes have exited. `None` to send
        /// nothing.
        word: Option<LastWord>,
    },
    /// Close some or all of the descriptors that earlier [`Self::Hold`] requests keep open.
    Release(Release),
    /// Check the fence deadline whenever the timer expires. The timer and the page that contains the deadline are sent
    /// with this request. See [`super::fence`].
    Fence {
        /// Number of the nursery that receives this request.
        holder: Holder,
    },
    /// Publish the current activity of the nursery process in shared memory, so that a hang can be detected. The memory
    /// page and a timer are sent with this request. See [`super::activity`].
    Activity,
    /// Kill the job's processes if a nursery process cannot do it. The nursery's pidfd, shared memory page and timer
    /// are sent with this request.
    ///
    /// Sent only to the process that guards the nursery process.
    Guard,
    /// Exit at once and leave all descendants running (`--keep-descendants`).
    Leave,
}

/// A message from the nursery to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The nursery is ready. This is its first message.
    Ready {
        /// Protocol version of the nursery's build. See [`PROTOCOL`].
        protocol: u32,
        pid: i32,
    },
    /// A worker was started and runs its program. The worker's pidfd is sent with this message.
    ///
    /// The pidfd is missing if the agent has reached its limit on open files; see [`Stage::Receive`].
    Spawned {
        local_rank: u32,
        /// Pid of the worker, which is also the id of its session and process group.
        pid: i32,
    },
    /// A worker could not be started. If a process was created for it, that process has been reaped.
    SpawnFailed {
        local_rank: u32,
        stage: Stage,
        errno: i32,
        /// Path or program on which the stage failed. Empty if the stage uses none.
        subject: String,
    },
    /// A worker has exited and was reaped. Sent once for each worker.
    Exited {
        pid: i32,
        exit: WorkerExit,
        /// Time at which the nursery noticed the exit. Exits noticed in the same iteration of the nursery's loop have
        /// the same time.
        seen: Stamp,
    },
    /// A worker was stopped by a signal (SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU).
    Stopped {
        pid: i32,
        signal: i32,
    },
    Continued {
        pid: i32,
    },
    /// The nursery process is killing all workers and their descendants, because the agent's lease was not renewed in
    /// time. Sent before the exits of the workers are reported.
    Fenced,
    /// A [`Request::Hold`] or [`Request::Fence`] failed.
    NotGuarded {
        /// Error number. `EMFILE` means that the nursery holds the maximum number of links, or did not receive a
        /// descriptor because of its limit on open files.
        errno: i32,
    },
    /// A clean-up of leftover processes is complete.
    Swept {
        /// Number of the last request that this message answers.
        number: u32,
        outcome: SweepOutcome,
    },
}

/// Outcome of cleaning up the processes that workers left behind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepOutcome {
    /// The first 64 processes that had to be signalled, not including workers.
    pub ended: Vec<Descendant>,
    /// Number of processes that had to be signalled but are not listed in `ended`.
    pub more: u32,
    /// Processes, including workers, that could not be killed in time (state D).
    pub stuck: Vec<Descendant>,
    /// Processes that were not killed, because they have left their worker's session and have reset the token.
    pub spared: Vec<Descendant>,
    /// Pids of processes, including workers, that have exited but cannot be reaped yet, because a tracer holds them.
    pub held: Vec<i32>,
}

/// A process in the result of a sweep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descendant {
    pub pid: i32,
    /// The kernel's short name of the process, at most 15 bytes. Empty if the process was gone.
    pub command: String,
}
