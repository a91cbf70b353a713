//! Lists the descendants of a process, read from `/proc`.
//!
//! An empty listing does not prove that all processes have exited, because processes start and exit while the listing
//! is made. A listing only shows which processes to signal next.
//!
//! If `/proc` does not show this pid namespace ([`procfs::is_own`]), each possible pid is checked with a system call
//! that shows whether it is a child of this process. This check does not find grandchildren. They become children of
//! this process, which is a subreaper, when their parents have exited.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::Builder;

use elasticrs_sys::features::Features;
use elasticrs_sys::process;
use elasticrs_sys::procfs::{self, START_TIME, Stat};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{self, Signal};
use nix::unistd::{Pid, getpgid, getsid, gettid};

use super::protocol::Descendant;

/// Numbers of the fields in `/proc/PID/stat` that contain the masks of blocked, ignored and handled signals. The masks
/// cover the lowest 31 signals.
const BLOCKED: usize = 32;
const IGNORED: usize = 33;
const CAUGHT: usize = 34;

/// Upper bound on the pids that the kernel assigns.
const HIGHEST_PID: i32 = 4 << 20;

/// A process in a listing of descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    pub pid: i32,
    /// Pid of the process's parent at the time of the listing.
    pub parent: i32,
}

/// Status of a process, from `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// State of the main thread as a letter: `R`, `S`, `D`, `T`, `Z`, …
    pub state: char,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    /// Number of threads, including exited threads that have not been reaped.
    pub threads: i32,
}

impl Status {
    /// Reads the status of a process. `None` if the process is gone.
    pub fn of(pid: i32) -> Option<Self> {
        Self::in_stat(&Stat::of(pid)?)
    }

    pub(super) fn in_stat(stat: &Stat) -> Option<Self> {
        Some(Self {
            state: stat.field(3)?,
            parent: stat.field(4)?,
            group: stat.field(5)?,
            session: stat.field(6)?,
            threads: stat.field(20)?,
        })
    }

    /// Returns the status of a process without using `/proc`. If `pidfd` is `None`, works only for a child of this
    /// process.
    fn asked(pid: i32, pidfd: Option<&OwnedFd>) -> Option<Self> {
        let (parent, has_ended) = match pidfd {
            Some(pidfd) => (0, poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(1)),
            None => (std::process::id().cast_signed(), process::child_has_ended(pid)?),
        };
        let pid = Some(Pid::from_raw(pid));
        let (group, session) = (getpgid(pid).ok()?.as_raw(), getsid(pid).ok()?.as_raw());
        Some(Self { state: if has_ended { 'Z' } else { 'S' }, parent, group, session, threads: 1 })
    }

    /// True if the process has exited and waits to be reaped. A process whose main thread has exited (`pthread_exit` in
    /// `main`) is still running while it has other threads.
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

/// True if the process has exited, as in [`Status::has_ended`], or if all of its threads have exited but are held by a
/// tracer.
pub fn has_died(pid: i32, status: Status) -> bool {
    let has_ended = |thread: &Path| Stat::in_folder(thread).is_none_or(|stat| matches!(stat.field(3), Some('Z' | 'X')));
    status.has_ended()
        || matches!(status.state, 'Z')
            && threads(pid).is_some_and(|mut threads| threads.all(|thread| has_ended(&thread)))
}

/// Iterates over all descendants of `root`, parents before their children. Skips the processes in `except` and their
/// descendants.
///
/// The iterator reads the children of a process before it returns the process. The caller can therefore kill each
/// process at once and still get its children. Processes that are killed early no longer take CPU time from the rest of
/// the search.
pub fn descendants(root: i32, except: &[i32]) -> Descendants {
    let all = match procfs::is_own() {
        true if Features::get().proc_children => None,
        true => Some(all_by_parent()),
        false => Some(BTreeMap::from([(std::process::id().cast_signed(), children_of_ours())])),
    };
    // Remember the pids that were visited, because a pid that is reused during the listing could create a cycle.
    let known = except.iter().copied().chain([root]).collect();
    let mut walk = Descendants { all, known, pending: Vec::new() };
    walk.add_children(root);
    walk
}

/// Returns the children of this process, including zombies. The kernel may omit a child from its list while other
/// children exit.
pub fn children_of_self() -> Vec<i32> {
    descendants(std::process::id().cast_signed(), &[]).pending.into_iter().map(|listed| listed.pid).collect()
}

/// Iterator that [`descendants`] returns.
#[derive(Debug)]
pub struct Descendants {
    all: Option<BTreeMap<i32, Vec<i32>>>,
    known: BTreeSet<i32>,
    pending: Vec<Listed>,
}

impl Descendants {
    fn add_children(&mut self, parent: i32) {
        let children = match &mut self.all {
            Some(all) => all.remove(&parent).unwrap_or_default(),
            None => children(parent),
        };
        let new = children.into_iter().filter(|&pid| self.known.insert(pid));
        self.pending.extend(new.map(|pid| Listed { pid, parent }));
    }
}

impl Iterator for Descendants {
    type Item = Listed;

    fn next(&mut self) -> Option<Listed> {
        let listed = self.pending.pop()?;
        self.add_children(listed.pid);
        Some(listed)
    }
}

/// Returns the `/proc` directories of a process's threads. `None` if the process is gone.
pub fn threads(pid: i32) -> Option<impl Iterator<Item = PathBuf>> {
    Some(fs::read_dir(procfs::folder(pid)?.join("task")).ok()?.flatten().map(|thread| thread.path()))
}

fn children(parent: i32) -> Vec<i32> {
    let mut found = Vec::new();
    for thread in threads(parent).into_iter().flatten() {
        let text = fs::read_to_string(thread.join("children")).unwrap_or_default();
        found.extend(text.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    found
}

fn all_by_parent() -> BTreeMap<i32, Vec<i32>> {
    let mut all = BTreeMap::<i32, Vec<i32>>::new();
    for pid in pids() {
        if let Some(status) = Status::of(pid) {
            all.entry(status.parent).or_default().push(pid);
        }
    }
    all
}

fn children_of_ours() -> Vec<i32> {
    if !process::has_children() {
        return Vec::new();
    }
    let among =
        |pids: RangeInclusive<i32>| pids.filter(|pid| process::child_has_ended(*pid).is_some()).collect::<Vec<_>>();
    let newest = newest_pid();
    let found = among(1..=newest);
    // After the highest pid, the kernel starts again with low pids. A child may therefore have a higher pid than the
    // newest process.
    if found.is_empty() { among(newest + 1..=HIGHEST_PID) } else { found }
}

/// Returns the pids of all processes in this pid namespace. Without a usable `/proc`, returns all pids up to the
/// newest.
pub fn pids() -> Vec<i32> {
    if !procfs::is_own() {
        return (1..=newest_pid()).collect();
    }
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Returns the most recently assigned pid in this pid namespace, even if `/proc` belongs to another namespace.
pub(crate) fn newest_pid() -> i32 {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let pid = load.split_whitespace().next_back().and_then(|pid| pid.parse().ok());
    // If `/proc/loadavg` cannot be read, start a thread. Its thread ID is the newest pid, because threads and processes
    // share the same numbers.
    pid.or_else(|| Builder::new().spawn(|| gettid().as_raw()).ok()?.join().ok()).unwrap_or(HIGHEST_PID)
}

/// A process that can be signalled safely: the signal cannot reach another process that reuses the pid.
#[derive(Debug)]
pub struct Target {
    pub(super) pid: i32,
    /// Pidfd of the process. `None` for a child of this process, because the pid of a child is not reused until it is
    /// reaped.
    pidfd: Option<OwnedFd>,
    /// Status of the process, read after the pidfd was opened.
    pub status: Status,
    /// Content of `/proc/PID/stat`. `None` if `/proc` does not show this pid namespace.
    stat: Option<Stat>,
}

impl Target {
    /// Opens the process with the pid of `listed`. `None` if the process is gone, or if its parent has changed to any
    /// process except this process.
    pub fn open(me: i32, listed: Listed) -> Option<Self> {
        let pid = listed.pid;
        let pidfd = if listed.parent == me { None } else { Some(process::open_pidfd(pid).ok()?) };
        let target = Self::behind(pid, pidfd)?;
        let parent = target.status.parent;
        // Compare the current parent with the listed one to detect a reused pid. The parent of a process can change
        // only to this process, when the old parent exits.
        (parent == listed.parent || parent == me).then_some(target)
    }

    /// Opens any process. The caller must check afterwards that it is the intended process.
    pub fn open_any(pid: i32) -> Option<Self> {
        Self::behind(pid, Some(process::open_pidfd(pid).ok()?))
    }

    fn behind(pid: i32, pidfd: Option<OwnedFd>) -> Option<Self> {
        let stat = Stat::of(pid);
        let status = match &stat {
            Some(stat) => Status::in_stat(stat)?,
            None if procfs::is_own() => return None,
            None => Status::asked(pid, pidfd.as_ref())?,
        };
        Some(Self { pid, pidfd, status, stat })
    }

    /// Returns the kernel's short name of the process, at most 15 bytes. Empty if the name cannot be read.
    pub fn name(&self) -> &str {
        self.stat.as_ref().map_or("", |stat| &stat.name)
    }

    /// Returns the start time of the process, in clock ticks since boot.
    pub fn started(&self) -> Option<u64> {
        self.stat.as_ref()?.field(START_TIME)
    }

    /// True if the process ignores or blocks this signal.
    pub(crate) fn disregards(&self, signal: Signal) -> bool {
        self.has(BLOCKED, signal) || self.has(IGNORED, signal)
    }

    /// Returns true if the process has a handler for this signal.
    pub fn handles(&self, signal: Signal) -> bool {
        self.has(CAUGHT, signal)
    }

    fn has(&self, field: usize, signal: Signal) -> bool {
        let Some(stat) = &self.stat else { return false };
        stat.field::<u64>(field).is_some_and(|signals| signals & 1 << (signal as i32 - 1) != 0)
    }

    /// Sends a signal to the process. Does nothing if the process has exited in the meantime.
    pub fn signal(&self, signal: Signal) {
        let sent = match &self.pidfd {
            Some(pidfd) => process::send_signal(pidfd, signal as i32),
            None => signal::kill(Pid::from_raw(self.pid), signal),
        };
        // Ignore errors, because the process has exited or now belongs to another user (set-user-id). A process that
        // does not exit is reported later.
        debug_assert!(matches!(sent, Ok(()) | Err(Errno::ESRCH | Errno::EPERM)), "kill({}): {sent:?}", self.pid);
    }
}

/// Describes a process for a message to the user.
///
/// Uses the kernel's short name, because the command line is in the process's own memory. Reading the command line
/// blocks while the process changes its memory map. If the process hangs during such a change, the read blocks forever.
pub fn describe(pid: i32) -> Descendant {
    Descendant { pid, command: Stat::of(pid).map(|stat| stat.name).unwrap_or_default() }
}

/// Processes that had to be signalled. The first 64 are listed, and the others are only counted.
#[derive(Debug, Default)]
pub(crate) struct Signalled {
    /// The first 64 signalled processes.
    pub named: Vec<Descendant>,
    others: BTreeSet<i32>,
}

impl Signalled {
    const NAMED: usize = 64;

    /// Adds a process that was signalled.
    pub(crate) fn add(&mut self, target: &Target) {
        if self.named.len() < Self::NAMED {
            self.named.push(Descendant { pid: target.pid, command: target.name().to_owned() });
        } else {
            self.others.insert(target.pid);
        }
    }

    /// Returns the list without the processes in `stuck`, because only signalled processes that exited are reported.
    #[must_use]
    pub(crate) fn without(mut self, stuck: &[i32]) -> Self {
        self.named.retain(|ended| !stuck.contains(&ended.pid));
        self.others.retain(|pid| !stuck.contains(pid));
        self
    }

    /// Returns the number of processes that are counted but not listed.
    pub(crate) fn more(&self) -> u32 {
        u32::try_from(self.others.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_found_among_descendants_and_in_the_map_by_parent() {
        use std::io::{Read, Write};
        use std::process::{Command, Stdio};
        let mut child = Command::new("cat").arg("-u").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Wait for the echo, which proves that `cat` is running. Immediately after `exec`, a process has no command
        // line yet.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let (me, pid) = (std::process::id().cast_signed(), child.id().cast_signed());
        assert!(descendants(me, &[]).any(|listed| listed == Listed { pid, parent: me }));
        assert!(descendants(me, &[pid]).all(|listed| listed.pid != pid));
        assert!(all_by_parent()[&me].contains(&pid));
        let session = nix::unistd::getsid(None).unwrap().as_raw();
        assert!(Status::of(pid).is_some_and(|status| (status.parent, status.session) == (me, session)));
        assert_eq!(describe(pid).command, "cat");
        Target::open(me, Listed { pid, parent: me }).unwrap().signal(Signal::SIGKILL);
        child.wait().unwrap();
        assert_eq!(Status::of(pid), None);
    }
}
