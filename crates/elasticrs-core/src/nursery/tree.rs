//! Who descends from whom, read from `/proc`.
//!
//! A listing is never a proof of emptiness: processes come and go while it is made. It tells whom to signal next.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use super::protocol::Descendant;
use crate::stat::Stat;
use crate::sys::features::Features;
use crate::sys::pidfd;

const COMMAND_LENGTH: usize = 200;

/// A process below the root of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Its pid.
    pub pid: i32,
    /// Its parent when it was listed.
    pub parent: i32,
}

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// One letter: `R`, `S`, `D`, `T`, `Z`, …
    pub state: char,
    /// The parent.
    pub parent: i32,
    /// The session.
    pub session: i32,
}

impl Status {
    /// `None` when there is no such process any more.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = Stat::of(pid)?;
        Some(Self { state: stat.field(3)?, parent: stat.field(4)?, session: stat.field(6)? })
    }

    /// It has ended, and waits for its parent (or for its own threads) to see it.
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// All processes below `root`, parents before their children, without those in `except` and what is below them.
///
/// Each is found when it is asked for, after its own children were: whoever kills what it gets makes room on the CPUs
/// before the rest is looked for, and loses nobody by it.
pub fn descendants(root: i32, except: &[i32]) -> Descendants {
    let all = if Features::get().proc_children { None } else { Some(all_by_parent()) };
    // A pid that is used again while the listing is made could close a circle.
    let known = except.iter().copied().chain([root]).collect();
    let mut walk = Descendants { all, known, pending: Vec::new() };
    walk.add_children(root);
    walk
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

fn children(parent: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{parent}/task")) else { return Vec::new() };
    let mut found = Vec::new();
    for thread in threads.flatten() {
        let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
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

/// All pids of the machine (of the pid namespace, to be exact).
pub fn pids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The pid that was given out last; 0 without `/proc`.
pub fn newest_pid() -> i32 {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace().next_back().and_then(|pid| pid.parse().ok()).unwrap_or(0)
}

/// A descendant that can be signalled without hitting somebody else who got its pid.
#[derive(Debug)]
pub struct Target {
    pid: i32,
    /// `None` for a child of this process, which holds its pid until it is reaped here.
    pidfd: Option<OwnedFd>,
    /// Read after the descriptor was opened.
    pub status: Status,
}

impl Target {
    /// `None` when the process is gone or no longer where it was listed.
    pub fn open(me: i32, listed: Listed) -> Option<Self> {
        let pid = listed.pid;
        let pidfd = if listed.parent == me { None } else { Some(pidfd::open(pid).ok()?) };
        let status = Status::of(pid)?;
        // A process that got the pid after the listing has another parent: the listed one is still there, or its
        // children are ours.
        (status.parent == listed.parent || status.parent == me).then_some(Self { pid, pidfd, status })
    }

    /// Any process; the caller checks, after this, that it is the one that it means.
    pub fn open_any(pid: i32) -> Option<Self> {
        let pidfd = Some(pidfd::open(pid).ok()?);
        Some(Self { pid, pidfd, status: Status::of(pid)? })
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

/// A descendant with its command line, for people.
pub fn describe(pid: i32) -> Descendant {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut command = line.strip_suffix(b"\0").unwrap_or(&line).to_vec();
    command.truncate(COMMAND_LENGTH);
    for byte in &mut command {
        if *byte == 0 {
            *byte = b' ';
        }
    }
    if command.is_empty() {
        command = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default().trim_ascii_end().to_vec();
    }
    Descendant { pid, command: String::from_utf8_lossy(&command).into_owned() }
}

/// Those that had to be signalled: the first few by name, the rest as a number.
#[derive(Debug, Default)]
pub struct Ended {
    /// The first 64.
    pub named: Vec<Descendant>,
    /// How many more.
    pub more: u32,
}

impl Ended {
    const NAMED: usize = 64;

    /// To be called before the process is signalled: afterwards it has no command line.
    pub fn add(&mut self, pid: i32) {
        if self.named.len() < Self::NAMED {
            self.named.push(describe(pid));
        } else {
            self.more += 1;
        }
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
        assert_eq!(describe(pid).command, "cat -u");
        Target::open(me, Listed { pid, parent: me }).unwrap().signal(Signal::SIGKILL);
        child.wait().unwrap();
        assert_eq!(Status::of(pid), None);
    }
}
