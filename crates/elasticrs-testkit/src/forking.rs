//! Commands of the test worker that fork.
//!
//! Commands that would fork forever limit themselves: to two seconds, to a maximum number of forks, and to a maximum
//! number of live processes. The numbers are counted in memory that all processes of a command share. A process that
//! stops because of a limit prints the line `LIMIT`. A test can therefore distinguish this case from processes that
//! were killed.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal};
use nix::unistd::{ForkResult, fork, getpid, setsid};

use crate::{Problem, Request, pause_for_ever, ready, say, set};

const TIME_LIMIT: Duration = Duration::from_secs(2);
const LIVE_LIMIT: u32 = 200;
const FORK_LIMIT: u32 = 100_000;

/// Counters in shared memory, for a test process and all its descendants.
struct Limits {
    forks: AtomicU32,
    live: AtomicU32,
}

impl Limits {
    fn shared() -> Result<&'static Self, Problem> {
        let length = std::num::NonZeroUsize::new(size_of::<Self>()).expect("it has fields");
        let protection = nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, so the mapping replaces no other memory.
        let memory =
            unsafe { nix::sys::mman::mmap_anonymous(None, length, protection, nix::sys::mman::MapFlags::MAP_SHARED) }?;
        // SAFETY: the memory is page-aligned, large enough and never unmapped. It is zeroed, and zero is a valid value
        // of the atomics.
        Ok(unsafe { memory.cast::<Self>().as_ref() })
    }

    /// Counts a process that is about to be started. Returns true if the limits allow it.
    fn admit(&self) -> bool {
        let forks = self.forks.fetch_add(1, Ordering::SeqCst);
        let live = self.live.fetch_add(1, Ordering::SeqCst);
        let admitted = forks < FORK_LIMIT && live < LIVE_LIMIT;
        if !admitted {
            self.live.fetch_sub(1, Ordering::SeqCst);
        }
        admitted
    }

    fn leave(&self) -> ! {
        self.live.fetch_sub(1, Ordering::SeqCst);
        std::process::exit(0)
    }
}

fn forked() -> Result<ForkResult, Problem> {
    // SAFETY: this program has only one thread, so the child may call any function that the parent may call.
    Ok(unsafe { fork() }?)
}

/// `cleaner FILE`: starts a child that creates the file, and prints the child's pid. The child removes the file after
/// this process and all processes that this process starts later have exited. With `cleaner FILE stubborn`, the child
/// never removes the file. Like the resource tracker of multiprocessing, the child ignores SIGINT and SIGTERM.
pub(crate) fn cleaner(request: &mut Request) -> Result<(), Problem> {
    let path = request.next()?;
    let is_stubborn = request.next().is_ok();
    let (reader, writer) = nix::unistd::pipe()?;
    let (waits, started) = nix::unistd::pipe()?;
    if let ForkResult::Child = forked()? {
        set(Signal::SIGINT, SigHandler::SigIgn)?;
        set(Signal::SIGTERM, SigHandler::SigIgn)?;
        std::fs::write(&path, "")?;
        say(&getpid().to_string())?;
        drop((waits, started));
        let keep = is_stubborn.then_some(writer);
        nix::unistd::read(&reader, &mut [0])?;
        drop(keep);
        std::fs::remove_file(path)?;
        std::process::exit(0);
    }
    drop((reader, started));
    nix::unistd::read(&waits, &mut [0])?;
    // Fork a second child that keeps the write end of the pipe open, so that the first child waits for the second.
    if let ForkResult::Child = forked()? {
        pause_for_ever();
    }
    ready()?;
    pause_for_ever();
}

/// Kind of grandchild to start with [`daemonise`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Daemon {
    /// An ordinary process that sleeps.
    Ordinary,
    /// A daemon that is meant to outlive the job. It resets the soft limit of `RLIMIT_RTTIME`, because this limit
    /// identifies the processes of the job.
    Exempt,
    /// A process whose main thread has exited, while another thread is still waiting.
    Headless,
}

/// Implements the commands `daemonise`, `exempt` and `headless`. Starts a grandchild of the given kind ([`Daemon`]) in
/// its own session, prints the grandchild's pid, and then pauses forever.
pub(crate) fn daemonise(daemon: Daemon) -> Result<(), Problem> {
    let (reader, writer) = nix::unistd::pipe()?;
    if let ForkResult::Child = forked()? {
        setsid()?;
        if let ForkResult::Parent { .. } = forked()? {
            std::process::exit(0);
        }
        if daemon == Daemon::Exempt {
            let (_, hard) = getrlimit(Resource::RLIMIT_RTTIME)?;
            setrlimit(Resource::RLIMIT_RTTIME, hard, hard)?;
        }
        nix::unistd::write(&writer, &getpid().as_raw().to_le_bytes())?;
        drop(reader);
        if daemon == Daemon::Headless {
            end_main_thread(writer);
        }
        drop(writer);
        pause_for_ever();
    }
    drop(writer);
    let mut pid = [0; 4];
    nix::unistd::read(&reader, &mut pid)?;
    // Wait for EOF, because the grandchild closes the pipe once it is set up.
    nix::unistd::read(&reader, &mut [0])?;
    nix::sys::wait::wait()?;
    say(&i32::from_le_bytes(pid).to_string())?;
    ready()?;
    pause_for_ever();
}

/// Exits only the main thread, like `pthread_exit` in `main`. Another thread keeps the process running, and closes the
/// pipe `until` to report that the main thread has exited.
fn end_main_thread(until: OwnedFd) -> ! {
    let me = getpid().as_raw();
    std::thread::spawn(move || {
        elasticrs_testkit::wait_for_state(me, 'Z');
        drop(until);
        pause_for_ever();
    });
    // SAFETY: the call exits this thread, and no other thread uses data on its stack.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    unreachable!("it does not return");
}

/// `tree DEPTH`: starts a binary tree of processes with this depth. All processes ignore SIGTERM and wait.
pub(crate) fn tree(request: &mut Request) -> Result<(), Problem> {
    set(Signal::SIGTERM, SigHandler::SigIgn)?;
    let mut depth: u32 = request.number()?;
    if depth > 6 {
        return Err("a tree of more than 126 processes".into());
    }
    let root = getpid();
    let (reader, writer) = nix::unistd::pipe()?;
    'grow: while depth > 0 {
        depth -= 1;
        for _ in 0..2 {
            if let ForkResult::Child = forked()? {
                continue 'grow;
            }
        }
        break;
    }
    drop(writer);
    if getpid() == root {
        // Wait for EOF, which means that every process has started its children and has closed the pipe.
        nix::unistd::read(&reader, &mut [0])?;
        ready()?;
    }
    pause_for_ever();
}

fn begin() -> Result<(&'static Limits, Instant), Problem> {
    let (limits, start) = (Limits::shared()?, Instant::now());
    set(Signal::SIGTERM, SigHandler::SigIgn)?;
    ready()?;
    limits.live.fetch_add(1, Ordering::SeqCst);
    Ok((limits, start))
}

/// `fork-bomb`: every process forks as fast as it can. About half of the children start a session of their own.
pub(crate) fn bomb() -> Result<(), Problem> {
    set(Signal::SIGCHLD, SigHandler::SigIgn)?;
    let (limits, start) = begin()?;
    while start.elapsed() < TIME_LIMIT {
        if !limits.admit() {
            std::thread::yield_now();
            continue;
        }
        if let ForkResult::Child = forked()? {
            if getpid().as_raw() % 2 == 0 {
                setsid()?;
            }
            if getpid().as_raw() % 8 == 0 {
                limits.leave();
            }
        }
    }
    say("LIMIT")?;
    limits.leave()
}

/// `chain`: forks repeatedly. After each fork, the parent exits and the child starts a session of its own. At
/// most two of these processes exist at a time.
pub(crate) fn chain() -> Result<(), Problem> {
    let (limits, start) = begin()?;
    while start.elapsed() < TIME_LIMIT && limits.admit() {
        if let ForkResult::Parent { .. } = forked()? {
            limits.leave();
        }
        setsid()?;
    }
    say("LIMIT")?;
    limits.leave()
}
