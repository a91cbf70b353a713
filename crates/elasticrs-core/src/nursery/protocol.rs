//! What agent and nursery say to each other over a Unix stream socket.
//!
//! Both ends are always of one build, so there is no versioning beyond [`PROTOCOL`], which guards against an image of
//! another build being run by mistake. A frame is a little-endian `u32` length and that many bytes of postcard.
//! Descriptors travel as `SCM_RIGHTS` with the first byte of the frame that announces them.

use elasticrs_runtime::clock::Stamp;
use serde::{Deserialize, Serialize};

use super::connections::{LastWord, Release};
use crate::exit::{Usage, WorkerExit};
use crate::spec::ProcessSpec;
use crate::sys::stage::Stage;

/// Version of this protocol. Increment it with every change of this file.
pub const PROTOCOL: u32 = 11;

/// The largest frame that is accepted; environments of 1024 workers stay far below it.
pub const MAX_FRAME: usize = 256 * 1024 * 1024;

/// The descriptors that the nursery is started with: the socket, the agent's pidfd, the stage pipe.
pub const FIXED_FDS: [i32; 3] = [3, 4, 5];

/// A message that is sent as one frame.
pub trait Message {
    /// Maximum number of bytes to queue for a peer that does not read.
    const MAX_UNSENT: usize;

    /// Number of file descriptors that are sent with the message.
    fn descriptors(&self) -> usize;
}

impl Message for Request {
    /// Large, because the agent sends all requests that start a group at once, each with the environment of its worker.
    const MAX_UNSENT: usize = 4 * MAX_FRAME;

    fn descriptors(&self) -> usize {
        match self {
            Self::Spawn { process, .. } => process.pass_fds.len(),
            Self::Hold { .. } => 1,
            Self::Fence | Self::Activity => 2,
            Self::Guard => 3,
            Self::SignalGroup { .. } | Self::Sweep { .. } | Self::SweepLeft { .. } | Self::Release(_) | Self::Leave => {
                0
            }
        }
    }
}

impl Message for Reply {
    /// Room for hundreds of thousands of replies, which can pile up while the agent is stopped and its workers are
    /// stopped and resumed again and again.
    const MAX_UNSENT: usize = 16 * 1024 * 1024;

    fn descriptors(&self) -> usize {
        usize::from(matches!(self, Self::Spawned { .. }))
    }
}

/// From the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Start one worker. The descriptors of `pass_fds` come with the frame, in their order; `source` is then the
    /// index among them.
    Spawn {
        process: ProcessSpec,
        /// See [`crate::spec::GroupSpec::keep_ignored`].
        keep_ignored: Vec<i32>,
    },
    /// Signal the process group of a worker. Kernels before 6.9 need it, because there a pidfd cannot name a group; and
    /// SIGKILL always takes this way, since it is not for [cleaners](super::cleaner). Unknown pids are passed over.
    SignalGroup {
        /// The worker, which leads its group.
        pid: i32,
        signal: i32,
    },
    /// End all descendants, workers included, until none is left. Answered by [`Reply::Swept`]. A further request
    /// while a sweep runs only brings its deadlines forward, and shares its answer.
    Sweep {
        /// Comes back with the answer: one that is lower than the last number sent answers an earlier request alone.
        number: u32,
        /// How long descendants may go on before the first signal, milliseconds.
        linger_ms: u64,
        /// Time from SIGTERM to SIGKILL, milliseconds; 0 sends SIGKILL at once.
        grace_ms: u64,
        /// After this long, what cannot be killed is reported instead of waited for, milliseconds.
        give_up_ms: u64,
    },
    /// Kill what this worker, which has ended, has left: all that is below the nursery and not below a worker that
    /// [keeps it](ProcessSpec::keeps_orphans). What other workers that have ended have in their sessions stays. Answered by
    /// [`Reply::Swept`], unless a [`Request::Sweep`] takes its place. One is asked for after the other.
    SweepLeft {
        /// As in [`Request::Sweep`].
        number: u32,
        worker: i32,
        /// As in [`Request::Sweep`].
        give_up_ms: u64,
    },
    /// Keep the descriptor that is sent with this request open until the nursery exits. If it is a duplicate of the
    /// agent's connection, the store sees that connection close only after the processes of a dead agent are gone.
    Hold {
        /// True to keep the descriptors that are already held, false to replace them.
        beside: bool,
        /// Secret to send on the descriptor when no process of a dead agent is left.
        word: Option<LastWord>,
    },
    /// Close some or all of the descriptors that are held.
    Release(Release),
    /// Look at the deadline in the page that comes with this whenever the timer expires that comes with it as well; see
    /// [`super::fence`].
    Fence,
    /// Keep the page and the timer up to date that come with this; see [`super::activity`].
    Activity,
    /// To a sentinel: guard the nursery of this pidfd, and of the page and the timer that come with it.
    Guard,
    /// Exit at once and leave every descendant alone (`--keep-descendants`).
    Leave,
}

/// From the nursery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The first frame.
    Ready {
        /// [`PROTOCOL`] of the nursery's build.
        protocol: u32,
        pid: i32,
    },
    /// A worker runs its program. Its pidfd comes with the frame; when it does not, the agent's descriptor limit is
    /// reached: [`Stage::Receive`].
    Spawned {
        local_rank: u32,
        /// Its pid, which is also its session and process group.
        pid: i32,
    },
    /// A worker could not be started; nothing of it is left.
    SpawnFailed {
        local_rank: u32,
        stage: Stage,
        errno: i32,
        /// The path or program that the stage was about; empty when there is none.
        subject: String,
    },
    /// A worker has ended and was reaped. Told once.
    Exited {
        pid: i32,
        exit: WorkerExit,
        usage: Usage,
        /// When the nursery saw it. Exits that were seen in one wake-up share a stamp.
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
    /// The deadline of the fence has passed: everything is being killed. Told before the exits that follow from it.
    Fenced {
        seen: Stamp,
    },
    /// A [`Request::Hold`] or [`Request::Fence`] could not be served.
    NotGuarded {
        /// The kernel's error number; `EMFILE` when the descriptor did not arrive.
        errno: i32,
    },
    /// The sweep is over.
    Swept {
        /// The number of the last request that this answers.
        number: u32,
        /// Descendants, workers not counted, that had to be signalled; the first 64 of them.
        ended: Vec<Descendant>,
        more: u32,
        /// Descendants, workers included, that could not be killed in time (state D).
        stuck: Vec<Descendant>,
        /// Descendants that were spared: in a session of their own, with the token reset.
        spared: Vec<Descendant>,
        /// Descendants, workers included, that have ended and that a tracer does not let go.
        held: Vec<i32>,
    },
}

/// A descendant that a worker left behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descendant {
    pub pid: i32,
    /// The kernel's short name of its program, at most 15 bytes; empty when it was gone.
    pub command: String,
}
