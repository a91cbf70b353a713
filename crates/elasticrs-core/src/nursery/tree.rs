//! Who descends from whom, read from `/proc`.
//!
//! A listing is never a proof of emptiness: processes come and go while it is made. It tells whom to signal next.
//!
//! Without a `/proc` of our own ([`procfs::is_own`]) the kernel is asked for each pid whether it is a child of ours. Who is
//! further down is not seen, but becomes a child of this process, a subreaper, when those above it have ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::Builder;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{self, Signal};
use nix::unistd::{Pid, getpgid, getsid, gettid};

use super::protocol::Descendant;
use crate::procfs;
use crate::stat::{START_TIME, Stat};
use crate::sys::features::Features;
use crate::sys::{pidfd, wait};

/// Fields of `/proc/PID/stat`: signals, of which the lowest 31.
const BLOCKED: usize = 32;
const IGNORED: usize = 33;

/// No kernel gives out a higher pid.
const HIGHEST_PID: i32 = 4 << 20;

/// A process below the root of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    pub pid: i32,
    /// Its parent when it was listed.
    pub parent: i32,
}

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// One letter, that of the main thread: `R`, `S`, `D`, `T`, `Z`, …
    pub state: char,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    /// How many threads there are, those included that have ended and were not collected.
    pub threads: i32,
}

impl Status {
    /// `None` when there is no such process any more.
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

    /// What the kernel says of a child, or of the process of this pidfd, without `/proc`.
    fn asked(pid: i32, pidfd: Option<&OwnedFd>) -> Option<Self> {
        let (parent, has_ended) = match pidfd {
            Some(pidfd) => (0, poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(1)),
            None => (std::process::id().cast_signed(), wait::child_has_ended(pid)?),
        };
        let pid = Some(Pid::from_raw(pid));
        let (group, session) = (getpgid(pid).ok()?.as_raw(), getsid(pid).ok()?.as_raw());
        Some(Self { state: if has_ended { 'Z' } else { 'S' }, parent, group, session, threads: 1 })
    }

    /// It has ended, and waits for its parent to see it. While there is another thread, only the main one has ended
    /// (`pthread_exit` in `main`): the process goes on.
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

/// As [`Status::has_ended`], or all of its threads have ended and a tracer has not collected them.
pub fn has_died(pid: i32, status: Status) -> bool {
    let has_ended = |thread: &Path| Stat::in_folder(thread).is_none_or(|stat| matches!(stat.field(3), Some('Z' | 'X')));
    status.has_ended()
        || matches!(status.state, 'Z')
            && threads(pid).is_some_and(|mut threads| threads.all(|thread| has_ended(&thread)))
}

/// All processes below `root`, parents before their children, without those in `except` and what is below them.
///
/// Each is found when it is asked for, after its own children were: whoever kills what it gets makes room on the CPUs
/// before the rest is looked for, and loses nobody by it.
pub fn descendants(root: i32, except: &[i32]) -> Descendants {
    let all = match procfs::is_own() {
        true if Features::get().proc_children => None,
        true => Some(all_by_parent()),
        false => Some(BTreeMap::from([(std::process::id().cast_signed(), children_of_ours())])),
    };
    // A pid that is used again while the listing is made could close a circle.
    let known = except.iter().copied().chain([root]).collect();
    let mut walk = Descendants { all, known, pending: Vec::new() };
    walk.add_children(root);
    walk
}

/// The children of this process, zombies as well. The kernel may miss one in its list while others end.
pub fn children_of_self() -> Vec<i32> {
    descendants(std::process::id().cast_signed(), &[]).pending.into_iter().map(|listed| listed.pid).collect()
}

/// See [`descendants`].
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

/// The folders of a process's threads; `None` when it is gone.
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
    if !wait::has_children() {
        return Vec::new();
    }
    let among =
        |pids: RangeInclusive<i32>| pids.filter(|pid| wait::child_has_ended(*pid).is_some()).collect::<Vec<_>>();
    let newest = newest_pid();
    let found = among(1..=newest);
    // After the highest pid the kernel begins again with the lowest: older processes may have higher ones.
    if found.is_empty() { among(newest + 1..=HIGHEST_PID) } else { found }
}

/// All pids of the machine (of the pid namespace, to be exact). Without `/proc` those that may be in use.
pub fn pids() -> Vec<i32> {
    if !procfs::is_own() {
        return (1..=newest_pid()).collect();
    }
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The pid that was given out last in this pid namespace, whichever `/proc` shows.
pub fn newest_pid() -> i32 {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let pid = load.split_whitespace().next_back().and_then(|pid| pid.parse().ok());
    // A thread gets the next one.
    pid.or_else(|| Builder::new().spawn(|| gettid().as_raw()).ok()?.join().ok()).unwrap_or(HIGHEST_PID)
}

/// A descendant that can be signalled without hitting somebody else who got its pid.
#[derive(Debug)]
pub struct Target {
    pub(super) pid: i32,
    /// `None` for a child of this process, which holds its pid until it is reaped here.
    pidfd: Option<OwnedFd>,
    /// Read after the descriptor was opened.
    pub status: Status,
    /// `None` without a `/proc` of our own.
    stat: Option<Stat>,
}

impl Target {
    /// `None` when the process is gone or no longer where it was listed.
    pub fn open(me: i32, listed: Listed) -> Option<Self> {
        let pid = listed.pid;
        let pidfd = if listed.parent == me { None } else { Some(pidfd::open(pid).ok()?) };
        let target = Self::behind(pid, pidfd)?;
        let parent = target.status.parent;
        // A process that got the pid after the listing has another parent: the listed one is still there, or its
        // children are ours.
        (parent == listed.parent || parent == me).then_some(target)
    }

    /// Any process; the caller checks, after this, that it is the one that it means.
    pub fn open_any(pid: i32) -> Option<Self> {
        Self::behind(pid, Some(pidfd::open(pid).ok()?))
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

    /// The kernel's short name, at most 15 bytes; empty when it cannot be known.
    pub fn name(&self) -> &str {
        self.stat.as_ref().map_or("", |stat| &stat.name)
    }

    /// When it began, in ticks after the machine's start.
    pub fn started(&self) -> Option<u64> {
        self.stat.as_ref()?.field(START_TIME)
    }

    /// True when this signal does nothing to it: it is ignored or blocked.
    pub fn disregards(&self, signal: Signal) -> bool {
        let Some(stat) = &self.stat else { return false };
        let has = |field| stat.field::<u64>(field).is_some_and(|signals| signals & 1 << (signal as i32 - 1) != 0);
        has(BLOCKED) || has(IGNORED)
    }

    /// Sends a signal; a process that has ended meanwhile is passed over.
    pub fn signal(&self, signal: Signal) {
        let sent = match &self.pidfd {
            Some(pidfd) => pidfd::send_signal(pidfd, signal as i32),
            None => signal::kill(Pid::from_raw(self.pid), signal),
        };
        // Gone, or it has changed its user (set-user-id): the sweep goes on and reports what does not end.
        debug_assert!(matches!(sent, Ok(()) | Err(Errno::ESRCH | Errno::EPERM)), "kill({}): {sent:?}", self.pid);
    }
}

/// A process as people are told of it.
///
/// By the kernel's short name: the command line is in the process's own memory, and whoever reads it waits for as long as
/// the process changes that, for ever when it hangs there.
pub fn describe(pid: i32) -> Descendant {
    Descendant { pid, command: Stat::of(pid).map(|stat| stat.name).unwrap_or_default() }
}

/// Those that had to be signalled: the first few by name, the rest as a number.
#[derive(Debug, Default)]
pub struct Ended {
    /// The first 64.
    pub named: Vec<Descendant>,
    others: BTreeSet<i32>,
}

impl Ended {
    const NAMED: usize = 64;

    /// One more.
    pub fn add(&mut self, target: &Target) {
        if self.named.len() < Self::NAMED {
            self.named.push(Descendant { pid: target.pid, command: target.name().to_owned() });
        } else {
            self.others.insert(target.pid);
        }
    }

    /// Without those that did not end.
    #[must_use]
    pub fn without(mut self, stuck: &[i32]) -> Self {
        self.named.retain(|ended| !stuck.contains(&ended.pid));
        self.others.retain(|pid| !stuck.contains(pid));
        self
    }

    /// How many more.
    pub fn more(&self) -> u32 {
        u32::try_from(self.others.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_found_both_ways() {
        use std::io::{Read, Write};
        use std::process::{Command, Stdio};
        let mut child = Command::new("cat").arg("-u").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // What it echoes proves that it runs: right after the exec a process has no command line yet.
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
