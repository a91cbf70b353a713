//! Commands of the test worker that print process attributes, such as the environment, or allocate memory.

use std::fs;

use nix::unistd::{getpgrp, getpid, getppid, getsid};

use crate::{Problem, Request, pause_for_ever, ready, say};

/// `alloc MB`: allocates MB mebibytes, writes to every page, and waits.
pub(crate) fn allocate(request: &mut Request) -> Result<(), Problem> {
    let megabytes: usize = request.number()?;
    let memory = std::hint::black_box(vec![1_u8; megabytes << 20]);
    ready()?;
    if memory.last() == Some(&1) || megabytes == 0 {
        pause_for_ever();
    }
    Ok(())
}

/// `env`: prints the environment, one variable per line.
pub(crate) fn environment() -> Result<(), Problem> {
    for (name, value) in std::env::vars_os() {
        say(&format!("{}={}", name.to_string_lossy(), value.to_string_lossy()))?;
    }
    ready()
}

/// `cwd`: prints the working directory.
pub(crate) fn directory() -> Result<(), Problem> {
    say(&std::env::current_dir()?.to_string_lossy())?;
    ready()
}

/// `fds`: prints each open file descriptor and the file that it refers to, one per line.
pub(crate) fn descriptors() -> Result<(), Problem> {
    for fd in elasticrs_testkit::open_fds() {
        let target = fs::read_link(format!("/proc/self/fd/{fd}"))?;
        say(&format!("{fd} {}", target.display()))?;
    }
    ready()
}

/// `sigmask`: prints the lines `SigBlk`, `SigIgn` and `SigCgt` of `/proc/self/status`. The lines also reflect
/// changes made by the Rust runtime, which ignores SIGPIPE and handles SIGSEGV and SIGBUS.
pub(crate) fn signals() -> Result<(), Problem> {
    let status = fs::read_to_string("/proc/self/status")?;
    for line in status.lines().filter(|line| ["SigBlk", "SigIgn", "SigCgt"].iter().any(|name| line.starts_with(name))) {
        say(line)?;
    }
    ready()
}

/// `ids`: prints the worker's pid, parent pid, process group, session and OOM score adjustment on one line.
pub(crate) fn ids() -> Result<(), Problem> {
    let score = fs::read_to_string("/proc/self/oom_score_adj")?;
    say(&format!("{} {} {} {} {}", getpid(), getppid(), getpgrp(), getsid(None)?, score.trim()))?;
    ready()
}
