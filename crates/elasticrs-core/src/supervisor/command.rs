//! Commands that the supervisor's handle sends to the runtime thread, and the state that the handle and the thread
//! share.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use elasticrs_nursery::connections::{LastWord, Release};
use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::launch::{LaunchError, NurseryImage};
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_runtime::runtime::Task;
use elasticrs_sys::signal::Signal;
use tokio::sync::oneshot;

use super::counters::Counters;
use super::evidence::EvidenceFiles;
use super::queue::Queue;
use crate::logs::Logs;
use crate::spec::{GroupSpec, StopPolicy};
use crate::timer::hang::{Limits, RemoteHang};

/// Configuration of a supervisor.
#[derive(Debug, Clone)]
pub struct Config {
    /// Programs for the nursery (the process that starts the workers), in order of preference. The first one that can
    /// be executed is used.
    pub nursery: Vec<NurseryImage>,
    /// True if the supervisor may control the whole calling process. The supervisor then makes the process a child
    /// subreaper. If the nursery is lost, the supervisor kills every orphan that the process adopts.
    pub owns_process: bool,
}

/// Error from a method of the supervisor.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error("the supervisor ran out of resources")]
    Resources(#[from] io::Error),
    #[error(transparent)]
    Nursery(#[from] LaunchError),
    #[error("a group is running already")]
    Busy,
    #[error("no group is running")]
    Idle,
    #[error("could not open pid {pid}")]
    Adopt {
        pid: i32,
        #[source]
        source: io::Error,
    },
    /// This worker cannot be replaced at the moment.
    #[error("local rank {local_rank} cannot be replaced: {reason}")]
    Replace { local_rank: u32, reason: &'static str },
    /// The shared memory for a process's heartbeats was rejected. The descriptor was invalid, or the process was not
    /// added in the order of local ranks.
    #[error("no page for the heartbeats of local rank {local_rank}")]
    Page {
        local_rank: u32,
        #[source]
        source: io::Error,
    },
    /// The FIFO for the timers could not be created, or the supervisor already has a FIFO.
    #[error("could not watch timers{}", if path.as_os_str().is_empty() { String::new() } else { format!(" at {}", path.display()) })]
    Timers {
        /// Requested path of the FIFO. Empty if the FIFO was to be created in a new directory.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The shared memory for the heartbeats could not be created, or could not be sealed against truncation.
    #[error("could not create the shared memory for heartbeats, which --hang-timeout needs (memfd_create)")]
    Heartbeats(#[source] io::Error),
    /// [`super::Supervisor::close`] was called, or the runtime panicked. The workers were killed.
    #[error("the supervisor has ended")]
    Closed,
    /// This process is a child made by `fork`. A child cannot use the supervisor of its parent.
    #[error("the process was forked: the supervisor belongs to pid {owner}")]
    Forked { owner: u32 },
}

pub(super) type Reply<T> = SyncSender<T>;

pub(super) enum Command {
    Start(Box<GroupSpec>, Reply<Result<(), SupervisorError>>),
    Adopt(Adopted, Reply<Result<(), SupervisorError>>),
    /// Start a replacement for a failed worker. The second field holds the descriptors that the replacement inherits.
    /// `pass_fds` refers to them by index.
    Replace(Box<ProcessSpec>, Vec<OwnedFd>, Reply<Result<(), SupervisorError>>),
    Stop(StopPolicy, Option<RemoteHang>),
    Signal(Signal, Option<Vec<u32>>),
    Forward(Signal, Vec<u32>),
    Suspend(Reply<()>),
    Resume,
    RenewNursery(Reply<bool>),
    Spawn(Task),
    Guard(Guarded),
    /// Read timer records from this FIFO.
    WatchTimers(OwnedFd, Reply<io::Result<()>>),
    WatchHangs(Limits),
    KeepEvidence(Vec<EvidenceFiles>, Option<PathBuf>),
    WatchExits(OwnedFd, Option<Duration>),
    Close {
        keep_descendants: bool,
    },
    /// Make the runtime panic. Tests have no other way to cause a panic.
    #[cfg(test)]
    Panic,
}

/// A change to the sockets that the nursery keeps open for the agent.
pub(super) enum Guarded {
    Hold(OwnedFd),
    /// Keep a connection to another agent open. If `is_first` is true, first close the connections of the previous
    /// session.
    Link {
        link: OwnedFd,
        word: LastWord,
        is_first: bool,
    },
    /// Hold this socket in addition to the others. The channel receives true once the request is in the kernel's socket
    /// buffer. From then on, the nursery will receive the request even if this process dies. The channel receives false
    /// if no descriptor was free for a duplicate of the socket. The channel is closed without a value if there is no
    /// nursery, or if the link to the nursery is closed.
    Beside(OwnedFd, oneshot::Sender<bool>),
    /// Report to the user that the nursery cannot keep a socket open. Duplicating the socket has failed with `errno`.
    NotDuplicated {
        errno: i32,
        is_link: bool,
    },
    Release(Release),
}

/// A process that Python started and that is added to the group. See [`super::Supervisor::adopt`].
pub(super) struct Adopted {
    pub(super) local_rank: u32,
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
    pub(super) status: Option<OwnedFd>,
    pub(super) page: Option<OwnedFd>,
}

/// State that is shared by the supervisor's handle and its task on the runtime thread.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) queue: Arc<Queue>,
    pub(super) logs: Arc<Logs>,
    pub(super) nursery_pid: Arc<AtomicI32>,
    pub(super) fence: Arc<Fence>,
    pub(super) counters: Counters,
}
