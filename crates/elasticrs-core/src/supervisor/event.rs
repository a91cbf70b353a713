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
    /// A [warm](crate::nursery::launch::Warm) nursery has finished its imports, or has exited. After a failure, workers
    /// start cold from now on.
    Warmed {
        failure: Option<NurseryEnd>,
        /// True for a nursery that [`super::Supervisor::import_beside`] has started and that has not taken over.
        is_beside: bool,
    },
    /// Every worker of the group runs its program.
    GroupStarted {
        /// Pids by local rank.
        pids: Vec<i32>,
        /// When the last of them ran.
        started: Stamp,
    },
    /// The group could not be started; nothing of it is left.
    StartFailed(StartFailure),
    /// A worker has exited. Reported once for each worker.
    WorkerExited {
        local_rank: u32,
        pid: i32,
        exit: WorkerExit,
        /// The last signal that the supervisor sent to the worker.
        sent: Option<Signal>,
        /// Time at which the exit was noticed. Exits that were noticed in one wake-up have the same time.
        seen: Stamp,
        /// Resources that the worker used. `None` if the nursery did not reap the worker, for example because Python
        /// started it.
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
        /// Time at which the supervisor noticed the failure.
        seen: Stamp,
        /// Time at which the stop signal had been sent to the last sibling.
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
    /// Workers did not exit within their grace period, or their exit made no progress. They get SIGKILL now.
    WorkersKilled(WorkersKilled),
    /// A worker has been stopped for one second by a signal that the supervisor did not send.
    WorkerPaused { local_rank: u32, pid: i32, signal: i32 },
    /// A worker that was reported as paused is running again.
    WorkerResumed { local_rank: u32, pid: i32 },
    /// The fence deadline has passed, so the agent's lease may expire. The nursery is killing all workers and their
    /// descendants. Reported immediately, even if no group is running. A running group ends with [`Outcome::Stopped`].
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
    /// A feature of the supervisor is impaired or has failed, as described in the message. The job continues.
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
    /// Signal that was sent to the process. `None` if the timer has no signal, so that its expiry is only reported.
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
    /// Time at which the exception was recorded. If the process did not send that time, the time at which its notice
    /// was received.
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
    /// The time limit for the exit has passed, but the exit is making progress. The worker counts as failed, but gets
    /// the same grace period as its siblings to finish its exit. [`Event::FailureSeen`] follows.
    Slow,
    /// The time limit for the exit has passed, and the exit makes no progress. The worker counts as failed and is
    /// killed at once. [`Event::FailureSeen`] follows.
    Stalled,
}

/// Workers that get SIGKILL because they did not exit in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersKilled {
    /// Local rank and pid of each worker.
    pub workers: Vec<(u32, i32)>,
    pub reason: KillReason,
    /// Time limit that the workers exceeded: their grace period, or the maximum time without progress.
    pub limit: Duration,
}

/// Reason for sending SIGKILL to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillReason {
    /// They did not exit within the grace after this signal.
    AfterSignal(Signal),
    /// Their exit after an uncaught exception made progress, but was not complete at the end of the grace. They were
    /// sent no signal before.
    SlowExit,
    /// Their exit after an uncaught exception made no progress.
    StalledExit,
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
    /// The worker for which the others are most likely waiting.
    pub local_rank: u32,
    pub pid: i32,
    pub missed: Missed,
    /// Time of the worker's last heartbeat or output, or the start of the group.
    pub since: Stamp,
    pub limit: Duration,
    pub seen: Stamp,
    /// Reason for blaming this worker and not another worker that is also late.
    pub ground: Ground,
    /// All running workers, ordered by local rank.
    pub ranks: Vec<RankSeen>,
}

/// What a worker was doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSeen {
    pub local_rank: u32,
    pub heartbeat: Option<Heartbeat>,
    /// True if at least half of the worker's limit has passed.
    pub is_late: bool,
    /// State of the process: a letter as in `/proc/PID/stat`, or a space if the state is unknown.
    pub state: char,
    /// Kernel function in which the worker waits. Empty if the worker is running or the function cannot be read.
    pub wait_channel: String,
    /// Innermost frame of the worker's Python program.
    pub frame: Option<String>,
}

/// Outcome of cleaning up the processes that workers left behind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Processes that had to be signalled. Has only the first of them if there are many.
    pub ended: Vec<Descendant>,
    /// Number of further processes that had to be signalled.
    pub more: u32,
    /// Processes that could not be killed.
    pub stuck: Vec<Descendant>,
    /// Processes that were spared.
    pub spared: Vec<Descendant>,
    /// Processes that have exited but cannot be reaped yet, because a tracer holds them. Each of them is also reported
    /// as [`Event::Degraded`].
    pub held: Vec<i32>,
}

impl Swept {
    /// Merges the outcome of a later sweep of the same processes into this one.
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
    /// True if the supervisor killed the nursery, because it did not respond.
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
