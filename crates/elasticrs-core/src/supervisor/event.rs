//! What the supervisor tells.

use std::path::PathBuf;
use std::time::Duration;

use elasticrs_runtime::clock::Stamp;

use crate::exit::{Usage, WorkerExit};
use crate::logs::{Dest, Notice};
use crate::nursery::protocol::Descendant;
use crate::signal::Signal;
use crate::sys::stage::Stage;
use crate::timer::hang::{Ground, Missed};

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A [warm](crate::nursery::launch::Warm) nursery has imported; or it has ended before, and another one starts workers
    /// cold from now on.
    Warmed { failure: Option<NurseryEnd> },
    /// Every worker of the group runs its program.
    GroupStarted {
        /// Pids by local rank.
        pids: Vec<i32>,
        /// When the last of them ran.
        started: Stamp,
    },
    /// The group could not be started; nothing of it is left.
    StartFailed(StartFailure),
    /// A worker has ended. Told once for each.
    WorkerExited {
        local_rank: u32,
        pid: i32,
        exit: WorkerExit,
        /// The last signal that we had sent to it.
        sent: Option<Signal>,
        /// When it was seen; deaths seen in one wake-up share a stamp.
        seen: Stamp,
        /// What it used; unknown for adopted pids and lost parents.
        usage: Option<Usage>,
    },
    /// No process of a failed worker is left, except those listed in `swept`, and a replacement may be started.
    /// Reported once for each failed worker, and only by a group that [replaces](crate::spec::GroupSpec::replaces)
    /// failed workers.
    WorkerSwept { local_rank: u32, swept: Swept, at: Stamp },
    /// A replacement for a failed worker is running.
    WorkerReplaced { local_rank: u32, pid: i32, started: Stamp },
    /// A replacement could not be started. No process of it is left.
    ReplaceFailed(StartFailure),
    /// The first failure of the group. The siblings have already been signalled.
    FailureSeen {
        local_rank: u32,
        /// When the supervisor noticed the failure.
        seen: Stamp,
        /// When the last sibling had been sent the stop signal.
        signalled: Stamp,
        siblings: u32,
    },
    /// An expiration timer of a worker, or of a descendant of one, was not released in time. With a signal, the worker
    /// counts as failed, and [`Self::FailureSeen`] follows.
    TimerExpired(TimerExpired),
    /// A worker missed its heartbeat deadline. It counts as failed, and [`Self::FailureSeen`] follows.
    WorkerHung(Box<WorkerHung>),
    /// A worker has recorded an uncaught exception, or has not exited in time after recording one.
    WorkerRaised(WorkerRaised),
    /// Workers were still running at the end of their grace, or their exit made no progress. They get SIGKILL now.
    WorkersKilled(WorkersKilled),
    /// A worker has been stopped for one second by a signal that the supervisor did not send.
    WorkerPaused { local_rank: u32, pid: i32, signal: i32 },
    /// A worker that was reported as paused is running again.
    WorkerResumed { local_rank: u32, pid: i32 },
    /// The deadline of the fence has passed, and the nursery kills everything. Reported immediately, even if no group
    /// is running. A running group ends with [`Outcome::Stopped`].
    Fenced { at: Stamp },
    /// No process of the group is left, except those listed here.
    GroupEnded {
        outcome: Outcome,
        nursery: Option<NurseryEnd>,
        /// Workers that did not exit after SIGKILL, each with the kernel function in which it waits. The name is empty
        /// if it cannot be read.
        stuck_workers: Vec<(u32, String)>,
        swept: Swept,
        at: Stamp,
    },
    /// A log file cannot be read, or its file system is full. Reported once for each file.
    LogTrouble { local_rank: u32, path: PathBuf, errno: i32 },
    /// Something works less well than it should. The job continues.
    Degraded { message: String },
    /// A task of the runtime panicked. The workers are being killed, and no further event follows.
    Panicked { message: String },
}

impl From<Notice> for Event {
    fn from(notice: Notice) -> Self {
        match notice {
            Notice::LogTrouble { local_rank, path, errno } => {
                Self::LogTrouble { local_rank, path, errno: errno as i32 }
            }
            Notice::Polling { errno } => {
                Self::Degraded { message: format!("log files are polled, because inotify failed: {}", errno.desc()) }
            }
            Notice::ConsoleLost { to, errno } => Self::Degraded {
                message: format!(
                    "{} takes no more output ({}); it continues in the log files",
                    console_name(to),
                    errno.desc()
                ),
            },
            Notice::Panicked { message } => Self::Panicked { message },
        }
    }
}

fn console_name(dest: Dest) -> &'static str {
    match dest {
        Dest::Stdout => "standard output",
        Dest::Stderr => "standard error",
    }
}

/// A timer that was not released in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimerExpired {
    pub local_rank: u32,
    /// Process that acquired the timer: the worker or a descendant.
    pub pid: i32,
    pub scope: String,
    /// File and line of the block that acquired the timer. `None` if the client did not send them.
    pub at: Option<String>,
    /// Deadline of the timer by the worker's wall clock, in milliseconds since 1970.
    pub deadline_ms: u64,
    /// Number of other active timers of the process.
    pub others: u32,
    /// Signal that was sent to the process. `None` if the timer only reports.
    pub signal: Option<Signal>,
    pub seen: Stamp,
}

/// A worker, or a descendant of it, has recorded an uncaught exception and is about to exit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRaised {
    pub local_rank: u32,
    /// Process that recorded the exception: the worker or a descendant.
    pub pid: i32,
    /// Last part of the traceback, as the process sent it. Empty if it sent none.
    pub text: String,
    /// When the exception was recorded. If the process did not send that time, when its notice was received.
    pub seen: Stamp,
    /// Time limit for the exit, measured from `seen`. `None` if there is no limit.
    pub limit: Option<Duration>,
    pub exit: ExitStage,
}

/// Progress of a worker's exit after an uncaught exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStage {
    /// The exception has just been recorded.
    Begun,
    /// The limit has passed, but the exit is making progress. The worker counts as failed, and [`Event::FailureSeen`]
    /// follows. The worker has the same grace as its siblings to finish its exit.
    Slow,
    /// The limit has passed, and the exit makes no progress. The worker counts as failed and is killed at once, and
    /// [`Event::FailureSeen`] follows.
    Stalled,
}

/// Workers that get SIGKILL because they did not exit in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersKilled {
    /// Local rank and pid of each.
    pub workers: Vec<(u32, i32)>,
    /// Stop signal after which the workers did not exit in time. `None` if a worker did not complete its exit after an
    /// uncaught exception: either that exit made no progress, or a worker that was to be replaced exceeded its grace.
    pub signal: Option<Signal>,
    /// Time that the workers had to exit: their grace, or the time without progress.
    pub limit: Duration,
}

/// The last heartbeat of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    pub local_rank: u32,
    pub at: Stamp,
    pub step: Option<u64>,
    pub section: Option<String>,
}

/// Reports a worker that hangs, and what every worker was doing when the hang was detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerHung {
    /// The worker that keeps the others waiting, as far as can be told.
    pub local_rank: u32,
    pub pid: i32,
    pub missed: Missed,
    /// Time of the worker's last heartbeat or output, or the start of the group.
    pub since: Stamp,
    pub limit: Duration,
    pub seen: Stamp,
    /// Reason for blaming this worker rather than the other late ones.
    pub ground: Ground,
    /// All running workers, ordered by local rank.
    pub ranks: Vec<RankSeen>,
}

/// What a worker was doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSeen {
    pub local_rank: u32,
    pub heartbeat: Option<Heartbeat>,
    /// At least half of its limit has passed.
    pub is_late: bool,
    /// One letter, as in `/proc/PID/stat`; a blank when that is not known.
    pub state: char,
    /// The kernel function that it waits in; empty when it runs, or that cannot be read.
    pub wait_channel: String,
    /// The innermost frame of its Python program.
    pub frame: Option<String>,
}

/// What became of the processes that workers left behind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Those that had to be signalled, the first of them.
    pub ended: Vec<Descendant>,
    /// How many more had to be.
    pub more: u32,
    /// Those that could not be killed.
    pub stuck: Vec<Descendant>,
    /// Those that were left alone.
    pub spared: Vec<Descendant>,
    /// Those that have ended and that a tracer does not let go; each is told as [`Event::Degraded`], too.
    pub held: Vec<i32>,
}

impl Swept {
    /// Takes in what a later look at the same processes has found.
    pub(super) fn follow_up(&mut self, later: Self) {
        self.ended.extend(later.ended);
        self.more += later.more;
        (self.stuck, self.spared, self.held) = (later.stuck, later.spared, later.held);
    }
}

/// How a nursery was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NurseryEnd {
    pub exit: WorkerExit,
    /// It had kept silent, and did not wake up: we killed it.
    pub hung: bool,
}

/// Why a group ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All workers exited 0.
    Succeeded,
    /// A worker failed first.
    Failed,
    /// It was stopped on request, or by the fence.
    Stopped,
    /// The nursery died, and the workers with it.
    Lost,
}

/// Why a group could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartFailure {
    #[error("could not {stage}{} for local rank {local_rank}: {}",
        if subject.is_empty() { String::new() } else { format!(" `{subject}`") },
        stage.reason(nix::errno::Errno::from_raw(*errno)))]
    Worker {
        local_rank: u32,
        stage: Stage,
        errno: i32,
        /// The path or program that it was about.
        subject: String,
    },
    /// The start took longer than its deadline; the nursery was killed.
    #[error("local rank {local_rank} did not start within {deadline:?}: it hangs while it tries to {}{}",
        stage.map_or_else(|| "begin".to_owned(), |s| s.to_string()),
        if wait_channel.is_empty() { String::new() } else { format!(" (in {wait_channel})") })]
    Hung {
        local_rank: u32,
        /// The last stage that it reported.
        stage: Option<Stage>,
        /// The kernel function that it waits in; empty when unreadable.
        wait_channel: String,
        /// See [`crate::spec::GroupSpec::start_deadline`].
        deadline: std::time::Duration,
    },
}
