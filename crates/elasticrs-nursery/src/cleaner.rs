//! Cleaners: processes that wait until other processes have exited, and then unlink the shared memory of those
//! processes.
//!
//! Python programs have two kinds of cleaners: the resource tracker of multiprocessing (and joblib), which reads from a
//! pipe, and torch's `torch_shm_manager`. If a cleaner is killed together with the other processes, the shared memory
//! stays allocated until the machine restarts. Therefore, a sweep kills all other processes first and gives the
//! cleaners a short time to finish.
//!
//! Cleaners are recognised by data from the kernel, never by their command line, because reading the command line may
//! block. If another process is mistaken for a cleaner, the only cost is this short delay.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use elasticrs_sys::procfs;
use nix::sys::signal::Signal;

use super::tree::{self, Target};

/// How long to wait for a process that unlinks shared memory, after all other processes have exited.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long to wait for `torch_shm_manager` to exit. The program starts its clean-up only two seconds after its last
/// client has exited.
const MANAGER_PATIENCE: Duration = Duration::from_secs(3);
/// How long to wait for a process that unlinks shared memory, after it was killed for taking too long.
pub(crate) const LAST_MOMENT: Duration = Duration::from_secs(1);
/// Maximum additional time to wait for processes that unlink shared memory.
pub const LONGEST: Duration = MANAGER_PATIENCE.saturating_add(LAST_MOMENT);

/// Name of the `torch_shm_manager` process, which the kernel truncates to 15 bytes.
const MANAGER: &str = "torch_shm_manag";
/// Maximum number of descriptors that a resource tracker has open, besides the three standard ones. A tracker has
/// the read end of its pipe and possibly a copy of standard error. It also opens files briefly while it starts or
/// prints a warning.
const FEW_DESCRIPTORS: usize = 4;

/// Returns how long to wait for this process to unlink shared memory, after all other processes have exited. `None` if
/// the process does not unlink shared memory.
pub fn patience_with(target: &Target) -> Option<Duration> {
    if target.name() == MANAGER && program(target.pid).is_some_and(|path| path.ends_with("torch_shm_manager")) {
        return Some(MANAGER_PATIENCE);
    }
    (target.disregards(Signal::SIGINT) && target.disregards(Signal::SIGTERM) && is_tracker(target.pid))
        .then_some(PATIENCE)
}

/// True if the process looks like a resource tracker: it has few open descriptors, and either reads from a pipe
/// or runs Python. The Python case covers a tracker that has closed its pipe and is about to unlink memory.
fn is_tracker(pid: i32) -> bool {
    let Some(Ok(entries)) = procfs::folder(pid).map(|folder| fs::read_dir(folder.join("fd"))) else { return false };
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| !is_standard(path));
    let paths: Vec<PathBuf> = paths.take(FEW_DESCRIPTORS + 1).collect();
    // Treat an exiting process as Python, because its program can no longer be determined. If this is wrong, the only
    // cost is a short wait.
    let may_be_python = || program(pid).is_none_or(|path| is_python(&path));
    paths.len() <= FEW_DESCRIPTORS && (paths.iter().any(|path| reads_a_pipe(path)) || may_be_python())
}

fn is_standard(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "0" || name == "1" || name == "2")
}

fn reads_a_pipe(path: &Path) -> bool {
    // The mode of the `/proc` link shows whether the descriptor is open for reading or for writing.
    let may_write = fs::symlink_metadata(path).is_ok_and(|link| link.permissions().mode() & 0o200 != 0);
    !may_write && fs::read_link(path).is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"pipe:"))
}

fn is_python(program: &Path) -> bool {
    let is_one = |name: &str| name.starts_with("python") || name.starts_with("pypy");
    program.file_name().and_then(|name| name.to_str()).is_some_and(is_one)
}

/// Returns the path of the program that the process executes. If the file was removed, the path ends in ` (deleted)`.
fn program(pid: i32) -> Option<PathBuf> {
    fs::read_link(procfs::folder(pid)?.join("exe")).ok()
}

/// Tracks the time that processes get to unlink shared memory before they are killed.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    alone_since: Option<Instant>,
    is_over: bool,
    /// Time limits of processes that unlink shared memory, keyed by pid and start time.
    ///
    /// The limits are stored, because an exiting process can no longer be recognised as one that unlinks shared memory.
    seen: BTreeMap<(i32, u64), Duration>,
}

impl Patience {
    /// True if the process unlinks shared memory and its time limit has not passed.
    pub(crate) fn spares(&mut self, target: &Target, now: Instant) -> bool {
        let Some(started) = target.started() else { return false };
        if let Some(patience) = patience_with(target) {
            self.seen.insert((target.pid, started), patience);
        }
        let patience = self.seen.get(&(target.pid, started));
        !self.is_over && patience.is_some_and(|&span| self.alone_since.is_none_or(|since| now < since + span))
    }

    /// Starts the time limits of the processes that unlink shared memory. Called when all other processes have exited.
    /// Returns true on the first call.
    pub(crate) fn begin(&mut self, now: Instant) -> bool {
        let is_first = self.alone_since.is_none();
        self.alone_since.get_or_insert(now);
        is_first
    }

    /// Stops waiting for processes that unlink shared memory, so that they can be killed like all other processes.
    /// Returns true on the first call.
    pub(crate) fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.is_over, true)
    }
}

/// Returns all running descendants of `root` in the process groups that `is_meant` accepts.
///
/// Omits processes that unlink shared memory. A process that leads its group is never omitted, because it is a worker.
pub fn others_in_groups(root: i32, is_meant: impl Fn(i32) -> bool) -> Vec<Target> {
    let me = std::process::id().cast_signed();
    let is_other = |target: &Target| {
        let status = target.status;
        let is_member = is_meant(status.group) && !status.has_ended();
        is_member && (status.group == target.pid || patience_with(target).is_none())
    };
    tree::descendants(root, &[]).filter_map(|listed| Target::open(me, listed)).filter(is_other).collect()
}
