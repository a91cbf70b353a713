//! Events that the supervisor reports to the agent.

use std::path::PathBuf;
use std::time::Duration;

use elasticrs_nursery::launch::LaunchError;
pub use elasticrs_nursery::protocol::SweepOutcome;
use elasticrs_runtime::readings::{Dest, Heartbeat};
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::named_enum;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::signal::Signal;
use elasticrs_sys::stage::Stage;

use crate::logs::Notice;
use crate::timer::hang::{Ground, Missed};

/// Something that happened to the group, a worker, the nursery, or the supervisor itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A [warm](elasticrs_nursery::launch::Warm) nursery has finished its module imports, or has exited. If it has
    /// exited, a cold nursery, which imports nothing, starts all later workers.
    Warmed { failure: Option<NurseryExit> },
    /// All workers of the group are running their programs.
    GroupStarted {
        /// Pids of the workers, ordered by local rank.
        pids: Vec<i32>,
        /// Time at which all workers were running.
        started: Stamp,
    },
    /// The group could not be started. All of its processes were killed.
    StartFailed(StartFailure),
    /// A worker has exited. Reported once for each worker.
    WorkerExited {
        local_rank: u32,
        pid: i32,
        exit: WorkerExit,
        /// The last signal that the supervisor sent to the worker.
        sent: Option<Signal>,
        /// Time at which the supervisor noticed the exit. All exits that are noticed in one wake-up have the same time.
        seen: Stamp,
    },
    /// The leftover processes of a failed worker have been cleaned up, so a replacement can now be started. `swept` is
    /// the outcome of the clean-up. Reported once for each failed worker in a group that
    /// [replaces](crate::spec::GroupPolicy::replaces) failed workers.
    WorkerSwept { local_rank: u32, swept: SweepOutcome },
    /// A replacement for a failed worker is running.
    WorkerReplaced { local_rank: u32, pid: i32, started: Stamp },
    /// A replacement for a failed worker could not be started.
    ReplaceFailed(StartFailure),
    /// A worker has failed, and the other workers have already been signalled. Reported only for the first failure in
    /// a group.
    FailureSeen {
        local_rank: u32,
        /// Time at which the supervisor noticed the failure.
        seen: Stamp,
        /// Time by which the stop signal had been sent to all other workers.
        signalled: Stamp,
        siblings: u32,
    },
    /// The workers that can copy their states into memory have done so, or the time limit for that has passed. The stop
    /// signals to these workers have just been sent.
    StateKept {
        /// Local ranks of the workers that were ordered to copy their states.
        asked: Vec<u32>,
        /// Local ranks of the workers that have answered in time. The other workers have exited, or did not answer.
        answered: Vec<u32>,
        /// Time at which the workers were ordered to copy their states.
        begun: Stamp,
        ended: Stamp,
    },
    /// A worker or one of its descendants did not release an expiration timer in time.
    ///
    /// If the timer has a signal, the worker is considered failed. If the failure stops the group,
    /// [`Self::FailureSeen`] follows.
    TimerExpired(TimerExpired),
    /// A worker hangs, or may have caused a hang on another node.
    ///
    /// If a local worker missed its heartbeat deadline, the reported worker is considered failed. If the failure stops
    /// the group, [`Self::FailureSeen`] follows.
    WorkerHung(Box<WorkerHung>),
    /// A worker has recorded an uncaught exception. The event is sent again if the worker does not exit in time.
    WorkerRaised(WorkerRaised),
    /// Workers are being killed with SIGKILL, because they did not exit within their grace period or made no progress
    /// while exiting.
    WorkersKilled(WorkersKilled),
    /// A signal that the supervisor did not send has stopped a worker. The worker is still stopped one second later.
    WorkerPaused { local_rank: u32, pid: i32, signal: i32 },
    /// A worker that was reported as paused is running again.
    WorkerResumed { local_rank: u32, pid: i32 },
    /// The fence deadline has passed. Because the agent's lease may expire soon, the nursery is killing all workers
    /// and their descendants. Reported immediately, even if no group is running. A running group ends with
    /// [`Outcome::Stopped`].
    Fenced,
    /// The group has ended. `stuck_workers` and `swept.stuck` list the processes that did not exit after SIGKILL.
    GroupEnded {
        outcome: Outcome,
        nursery: Option<NurseryExit>,
        /// Local rank of each worker that did not exit after SIGKILL, with the kernel function in which it waits. The
        /// function name is empty if it cannot be read.
        stuck_workers: Vec<(u32, String)>,
        swept: SweepOutcome,
        at: Stamp,
    },
    /// A log file cannot be read, or its file system is full. Reported once for each file.
    LogTrouble { local_rank: u32, path: PathBuf, errno: i32 },
    /// A feature of the supervisor is impaired or has failed. The message gives details. The job continues.
    Degraded { message: String },
    /// A task of the runtime panicked. The workers are being killed. No further event follows.
    Panicked { message: String },
}

impl Event {
    /// Returns true if the event only informs the agent or the user. The queue may drop such events if the agent does
    /// not read its events, because workers can cause an unlimited number of them.
    pub(super) fn is_notice(&self) -> bool {
        match self {
            Self::WorkerRaised(raised) => raised.exit == ExitStage::Begun,
            Self::TimerExpired(expired) => expired.signal.is_none(),
            Self::WorkerPaused { .. }
            | Self::WorkerResumed { .. }
            | Self::LogTrouble { .. }
            | Self::Degraded { .. } => true,
            Self::Warmed { .. }
            | Self::GroupStarted { .. }
            | Self::StartFailed(_)
            | Self::WorkerExited { .. }
            | Self::WorkerSwept { .. }
            | Self::WorkerReplaced { .. }
            | Self::ReplaceFailed(_)
            | Self::FailureSeen { .. }
            | Self::StateKept { .. }
            | Self::WorkerHung(_)
            | Self::WorkersKilled(_)
            | Self::Fenced
            | Self::GroupEnded { .. }
            | Self::Panicked { .. } => false,
        }
    }
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
                    "{} accepts no more output ({}); the lines are only in the log files",
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

/// An expiration timer that was not released in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimerExpired {
    pub local_rank: u32,
    /// Pid of the process that acquired the timer: the worker or one of its descendants.
    pub pid: i32,
    pub scope: String,
    /// File and line of the block that acquired the timer. `None` if the client did not send them.
    pub at: Option<String>,
    /// Deadline of the timer on the worker's wall clock, in milliseconds since 1970.
    pub deadline_ms: u64,
    /// Number of other active timers of the same process.
    pub others: u32,
    /// Signal that was sent to the process. `None` if the timer has no signal, so that its expiry is only reported.
    pub signal: Option<Signal>,
    pub seen: Stamp,
}

/// An uncaught exception, recorded by a worker or one of its descendants just before it exits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRaised {
    pub local_rank: u32,
    /// Pid of the process that recorded the exception: the worker or one of its descendants.
    pub pid: i32,
    /// End of the traceback. Empty if the process sent no traceback.
    pub text: String,
    /// Time at which the process recorded the exception. If the process did not send that time, the time at which the
    /// supervisor received the report.
    pub seen: Stamp,
    /// Time limit for the exit, starting at `seen`. `None` if there is no limit.
    pub limit: Option<Duration>,
    pub origin: Origin,
    pub exit: ExitStage,
}

named_enum! {
    /// Origin of an exception, as the process that raised it reported it.
    pub enum Origin {
        /// Another worker's exit cannot have caused the exception.
        Own = "own",
        /// The exception reports that another worker is lost or does not answer.
        Peer = "peer",
        Unknown = "unknown",
    }
}

named_enum! {
    /// Progress of a worker's exit after an uncaught exception.
    pub enum ExitStage {
        /// The exception has just been recorded.
        Begun = "begun",
        /// The worker did not exit within the time limit, but it is still making progress. The supervisor considers
        /// the worker failed, but gives it the usual grace period to exit.
        ///
        /// [`Event::FailureSeen`] follows if the supervisor stops the group because of the failed worker.
        Slow = "slow",
        /// The time limit for the exit has passed, and the worker makes no progress. The worker is considered failed
        /// and is killed immediately.
        ///
        /// If the failure stops the group, [`Event::FailureSeen`] follows.
        Stalled = "stalled",
    }
}

/// Workers that did not exit in time and are therefore killed with SIGKILL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersKilled {
    /// Local rank and pid of each worker.
    pub workers: Vec<(u32, i32)>,
    pub reason: KillReason,
    /// Time limit that the workers exceeded: the grace period or, for a stalled exit, the maximum time without
    /// progress. Zero for [`KillReason::Request`].
    pub limit: Duration,
}

/// Reason for sending SIGKILL to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillReason {
    /// The workers did not exit within the grace period after this signal.
    AfterSignal(Signal),
    /// The workers were exiting slowly after an uncaught exception and did not finish within the grace period. No
    /// signal was sent to them before SIGKILL.
    SlowExit,
    /// The workers had raised an uncaught exception, and stalled while they were exiting.
    StalledExit,
    /// SIGKILL was requested while the workers were already being stopped.
    Request,
}

/// A hanging worker, and the state of all workers when the hang was detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerHung {
    /// Local rank of the worker that the others are most likely waiting for.
    pub local_rank: u32,
    pub pid: i32,
    pub missed: Missed,
    /// Time of the worker's last heartbeat or output. If there was neither, the start time of the worker.
    pub since: Stamp,
    pub limit: Duration,
    pub seen: Stamp,
    /// Reason why this worker is considered the cause of the hang.
    pub ground: Ground,
    /// All running workers, ordered by local rank.
    pub ranks: Vec<RankSeen>,
}

/// State of a worker at the time of a hang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSeen {
    pub local_rank: u32,
    pub heartbeat: Option<Heartbeat>,
    /// True if at least half of the worker's time limit has passed.
    pub is_late: bool,
    /// State of the process: a letter as in `/proc/PID/stat`, or a space if the state is unknown.
    pub state: char,
    /// Kernel function in which the worker waits. Empty if the worker is running or the function cannot be read.
    pub wait_channel: String,
    /// Innermost frame of the worker's Python program. `None` if it is unknown.
    pub frame: Option<String>,
}

/// Exit status of a nursery that died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NurseryExit {
    pub exit: WorkerExit,
    /// True if the supervisor killed the nursery because it did not respond.
    pub hung: bool,
}

named_enum! {
    /// Final result of a group of workers.
    pub enum Outcome {
        /// All workers exited with code 0.
        Succeeded = "succeeded",
        /// A worker failed before any other event stopped the group.
        Failed = "failed",
        /// The group was stopped on request, or because the agent's lease was about to expire.
        Stopped = "stopped",
        /// The nursery died, and its workers died with it.
        Lost = "lost",
    }
}

/// Reason why a group or a replacement worker could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartFailure {
    #[error("could not {stage}{} for local rank {local_rank}: {}",
        if subject.is_empty() { String::new() } else { format!(" `{subject}`") },
        stage.reason(nix::errno::Errno::from_raw(*errno)))]
    Worker {
        local_rank: u32,
        stage: Stage,
        errno: i32,
        /// Path or program that the failed operation used. Empty if the operation used none.
        subject: String,
    },
    /// The start exceeded its deadline. The supervisor killed the hanging process or the nursery.
    #[error("local rank {local_rank} did not start within {deadline:?}: it hangs while trying to {}{}",
        stage.map_or_else(|| "begin".to_owned(), |s| s.to_string()),
        if wait_channel.is_empty() { String::new() } else { format!(" (in {wait_channel})") })]
    Hung {
        local_rank: u32,
        /// Last stage that the start reached, as reported by the starting process. `None` if it reported no stage.
        stage: Option<Stage>,
        /// Kernel function in which the hanging process waits. Empty if the name of the function cannot be read.
        wait_channel: String,
        /// Time limit for the start, see [`crate::spec::GroupPolicy::start_deadline`].
        deadline: std::time::Duration,
    },
    /// No worker was started, because the nursery could not be launched.
    #[error("{message}")]
    Nursery {
        /// Text of the [`elasticrs_nursery::launch::LaunchError`].
        message: String,
        /// Error number of the failed system call. `None` if no system call failed, for example because the launch
        /// exceeded its time limit.
        errno: Option<i32>,
    },
}

impl StartFailure {
    /// Returns the failure of a worker whose pidfd the agent could not receive, because no descriptor was free.
    pub(super) fn no_descriptor(local_rank: u32, pid: i32) -> Self {
        Self::Worker { local_rank, stage: Stage::Receive, errno: libc::EMFILE, subject: format!("/proc/{pid}") }
    }

    /// Converts the launch error of a nursery to a start failure.
    pub(super) fn no_nursery(error: &LaunchError) -> Self {
        let errno = match error {
            LaunchError::Unsupported(_) | LaunchError::Hung { .. } => None,
            LaunchError::Start { errno, .. } => Some(*errno as i32),
            LaunchError::Prepare(error) => error.raw_os_error(),
        };
        Self::Nursery { message: error.to_string(), errno }
    }

    /// Returns the local rank of the worker that could not be started. Returns 0 if the nursery could not be launched.
    pub fn local_rank(&self) -> u32 {
        match self {
            Self::Worker { local_rank, .. } | Self::Hung { local_rank, .. } => *local_rank,
            Self::Nursery { .. } => 0,
        }
    }
}
