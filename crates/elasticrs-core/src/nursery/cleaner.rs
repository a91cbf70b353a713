//! Processes that clean up after others: they wait for the end of those, and unlink then what was shared.
//!
//! There are two in Python programs: multiprocessing's resource tracker (joblib's as well), at the end of a pipe, and
//! torch's `torch_shm_manager`. Killed with the others, they would leave the memory behind until the machine restarts. So
//! whoever ends everything ends the others first, and waits for these a moment.
//!
//! They are known by what the kernel says of them, never by their command line, which cannot be read safely. Whoever is
//! taken for one and is none costs that moment.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::tree::{self, Target};
use crate::procfs;

/// What a cleaner may take when all others have ended.
const PATIENCE: Duration = Duration::from_secs(1);
/// `torch_shm_manager` begins two seconds after its last client has ended: another one might come.
const MANAGER_PATIENCE: Duration = Duration::from_secs(3);
/// For the end of those that were killed when they had taken too long.
pub const LAST_MOMENT: Duration = Duration::from_secs(1);
/// The longest that cleaners can prolong a sweep.
pub const LONGEST: Duration = MANAGER_PATIENCE.saturating_add(LAST_MOMENT);

/// The kernel keeps 15 bytes of `torch_shm_manager`.
const MANAGER: &str = "torch_shm_manag";
/// A tracker has the pipe's end, and may have a copy of its standard error; a start and a warning open files.
const FEW_DESCRIPTORS: usize = 4;

/// How long a cleaner may take when all others have ended; `None`: the process is none.
pub fn patience_with(target: &Target) -> Option<Duration> {
    if target.name() == MANAGER && program(target.pid).is_some_and(|path| path.ends_with("torch_shm_manager")) {
        return Some(MANAGER_PATIENCE);
    }
    (target.disregards(Signal::SIGINT) && target.disregards(Signal::SIGTERM) && is_tracker(target.pid))
        .then_some(PATIENCE)
}

/// True for a process that holds little but the end of a pipe. A tracker that is about to unlink has closed that, and is
/// known by its program.
fn is_tracker(pid: i32) -> bool {
    let Some(Ok(entries)) = procfs::folder(pid).map(|folder| fs::read_dir(folder.join("fd"))) else { return false };
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| !is_standard(path));
    let paths: Vec<PathBuf> = paths.take(FEW_DESCRIPTORS + 1).collect();
    // One that is ending has no program any more.
    let may_be_python = || program(pid).is_none_or(|path| is_python(&path));
    paths.len() <= FEW_DESCRIPTORS && (paths.iter().any(|path| reads_a_pipe(path)) || may_be_python())
}

fn is_standard(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "0" || name == "1" || name == "2")
}

fn reads_a_pipe(path: &Path) -> bool {
    // The mode of the link is that of the descriptor.
    let may_write = fs::symlink_metadata(path).is_ok_and(|link| link.permissions().mode() & 0o200 != 0);
    !may_write && fs::read_link(path).is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"pipe:"))
}

fn is_python(program: &Path) -> bool {
    let is_one = |name: &str| name.starts_with("python") || name.starts_with("pypy");
    program.file_name().and_then(|name| name.to_str()).is_some_and(is_one)
}

/// The file that it executes; one that was removed has `(deleted)` behind its name.
fn program(pid: i32) -> Option<PathBuf> {
    fs::read_link(procfs::folder(pid)?.join("exe")).ok()
}

/// How long whoever ends everything still waits for cleaners.
#[derive(Debug, Default)]
pub struct Patience {
    alone_since: Option<Instant>,
    is_over: bool,
    /// Cleaners that were seen, by pid and start: one that is ending has no descriptor and no program any more.
    seen: BTreeMap<(i32, u64), Duration>,
}

impl Patience {
    /// True for a cleaner that may go on.
    pub fn spares(&mut self, target: &Target, now: Instant) -> bool {
        let Some(started) = target.started() else { return false };
        if let Some(patience) = patience_with(target) {
            self.seen.insert((target.pid, started), patience);
        }
        let patience = self.seen.get(&(target.pid, started));
        !self.is_over && patience.is_some_and(|&span| self.alone_since.is_none_or(|since| now < since + span))
    }

    /// From now on nobody but cleaners is left; true the first time.
    pub fn begin(&mut self, now: Instant) -> bool {
        let is_first = self.alone_since.is_none();
        self.alone_since.get_or_insert(now);
        is_first
    }

    /// Nobody is spared any more; true the first time.
    pub fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.is_over, true)
    }
}

/// All processes below `root` in the process groups that `is_meant` names, but for cleaners that do not lead theirs.
pub fn others_in_groups(root: i32, is_meant: impl Fn(i32) -> bool) -> Vec<Target> {
    let me = std::process::id().cast_signed();
    let is_other = |target: &Target| {
        let status = target.status;
        let is_member = is_meant(status.group) && !status.has_ended();
        is_member && (status.group == target.pid || patience_with(target).is_none())
    };
    tree::descendants(root, &[]).filter_map(|listed| Target::open(me, listed)).filter(is_other).collect()
}
