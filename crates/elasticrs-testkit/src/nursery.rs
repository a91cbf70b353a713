//! Test helpers: a small blocking client of the nursery, and an agent that a test can kill.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::VecDeque;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio as Pipes};
use std::time::Duration;

use elasticrs_nursery::launch::{Interrupt, Launched, NurseryImage, launch};
use elasticrs_nursery::protocol::{Descendant, PROTOCOL, Reply, Request, SweepLimits, SweepOutcome};
use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::process::{self, WorkerExit};
use elasticrs_sys::stage::Stage;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::{assert_no_children, built, is_running, wait_for_end, wait_for_state, wait_readable, worker_program};

/// A connected nursery. Dropping this value makes the nursery exit, and fails the test if any process is left
/// behind.
pub struct Client {
    /// The launched nursery.
    pub nursery: Launched,
    /// Replies that arrived while the client waited for a different reply.
    early: VecDeque<(Reply, Vec<OwnedFd>)>,
    reaped: bool,
}

/// A running worker.
pub struct Worker {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

/// Returns the pids of `processes`.
pub fn pids(processes: &[Descendant]) -> Vec<i32> {
    processes.iter().map(|process| process.pid).collect()
}

/// Returns the path of the program `worker-nursery`, which is in the same folder as [`worker_program`].
pub fn program() -> PathBuf {
    built("worker-nursery")
}

/// Returns a [`NurseryImage`] that runs this program.
pub fn image(program: PathBuf) -> NurseryImage {
    NurseryImage::Program { path: c_string(program), args: vec![c"worker-nursery".into()] }
}

impl Client {
    /// Starts a nursery. Makes this process a child subreaper, so that the check for leaked processes also finds
    /// orphans.
    pub fn start() -> Self {
        Self::start_from(image(program()))
    }

    /// Same as [`Self::start`], but runs the program `image` as the nursery process.
    pub fn start_from(image: NurseryImage) -> Self {
        nix::sys::prctl::set_child_subreaper(true).unwrap();
        let nursery = launch(&[image], None, &Interrupt::default()).unwrap();
        let mut client = Self { nursery, early: VecDeque::new(), reaped: false };
        let (ready, _) = client.next_reply();
        assert_eq!(ready, Reply::Ready { protocol: PROTOCOL, pid: client.nursery.pid });
        client
    }

    /// Sends a request without descriptors.
    pub fn send(&mut self, request: &Request) {
        self.nursery.link.send(request, Vec::new()).unwrap();
        assert!(!self.nursery.link.has_unsent(), "the socket takes a small request at once");
    }

    /// Returns the next reply. Replies are returned in the order in which the nursery sent them.
    pub fn next_reply(&mut self) -> (Reply, Vec<OwnedFd>) {
        if let Some(early) = self.early.pop_front() {
            return early;
        }
        loop {
            if let Some(reply) = self.nursery.link.receive().unwrap() {
                return reply;
            }
            wait_readable(&self.nursery.link, "a reply of the nursery");
        }
    }

    /// Waits for a reply for which `pick` returns a value. Returns that value and the reply's descriptors. Keeps all
    /// other replies for later calls.
    pub fn find<T>(&mut self, mut pick: impl FnMut(&Reply) -> Option<T>) -> (T, Vec<OwnedFd>) {
        if let Some(at) = self.early.iter().position(|(reply, _)| pick(reply).is_some()) {
            let (reply, fds) = self.early.remove(at).unwrap();
            return (pick(&reply).unwrap(), fds);
        }
        let mut others = std::mem::take(&mut self.early);
        loop {
            let (reply, fds) = self.next_reply();
            if let Some(picked) = pick(&reply) {
                self.early = others;
                return (picked, fds);
            }
            others.push_back((reply, fds));
        }
    }

    /// Requests the start of a worker. Call [`Self::spawned`] to wait for the answer.
    pub fn request_spawn(&mut self, process: &ProcessSpec, keep_ignored: &[i32], fds: Vec<OwnedFd>) {
        let request = Request::Spawn { process: process.clone(), keep_ignored: keep_ignored.to_vec() };
        self.nursery.link.send(&request, fds).unwrap();
    }

    /// Starts a worker. On failure, returns the stage, the error number, and the path or program that caused the
    /// failure.
    pub fn try_spawn(&mut self, process: &ProcessSpec) -> Result<Worker, (Stage, i32, String)> {
        self.request_spawn(process, &[], Vec::new());
        self.spawned()
    }

    /// Waits for the answer to the oldest unanswered start request.
    pub fn spawned(&mut self) -> Result<Worker, (Stage, i32, String)> {
        let (result, mut fds) = self.find(|reply| match reply {
            Reply::Spawned { pid, .. } => Some(Ok(*pid)),
            Reply::SpawnFailed { stage, errno, subject, .. } => Some(Err((*stage, *errno, subject.clone()))),
            _ => None,
        });
        result.map(|pid| Worker { pid, pidfd: fds.pop().unwrap() })
    }

    /// Starts a worker. Panics if the start fails.
    pub fn spawn(&mut self, process: &ProcessSpec) -> Worker {
        self.try_spawn(process).unwrap()
    }

    /// Starts a testkit worker and waits until it is ready. Returns the worker and its output.
    pub fn spawn_ready(&mut self, arguments: &[&str]) -> (Worker, Lines) {
        let (reader, writer) = pipe();
        let process = with_stdout(worker(arguments));
        self.request_spawn(&process, &[], vec![writer]);
        let worker = self.spawned().unwrap();
        let mut lines = Lines::new(reader);
        lines.until_ready();
        (worker, lines)
    }

    /// Waits until a worker has exited. Returns its exit status.
    pub fn exit_of(&mut self, pid: i32) -> WorkerExit {
        let pick = |reply: &Reply| match reply {
            Reply::Exited { pid: of, exit, .. } if *of == pid => Some(*exit),
            _ => None,
        };
        self.find(pick).0
    }

    /// Requests a sweep of all descendants, and waits for its result. The time limits are in milliseconds.
    pub fn sweep(&mut self, linger_ms: u64, grace_ms: u64) -> SweepOutcome {
        self.request_sweep(linger_ms, grace_ms, 10_000);
        self.swept()
    }

    /// Requests a sweep of all descendants. The time limits are in milliseconds.
    pub fn request_sweep(&mut self, linger_ms: u64, grace_ms: u64, give_up_ms: u64) {
        let [linger, grace, give_up] = [linger_ms, grace_ms, give_up_ms].map(Duration::from_millis);
        let limits = SweepLimits { linger, grace, give_up };
        self.send(&Request::Sweep { number: 1, left_by: None, limits, savers: None });
    }

    /// Waits for the result of a sweep.
    pub fn swept(&mut self) -> SweepOutcome {
        let pick = |reply: &Reply| match reply.clone() {
            Reply::Swept { outcome, .. } => Some(outcome.clone()),
            _ => None,
        };
        self.find(pick).0
    }

    /// Kills the nursery and reaps it.
    pub fn kill(&mut self) {
        elasticrs_sys::process::send_signal(&self.nursery.pidfd, libc::SIGKILL).unwrap();
        self.reap();
    }

    /// Waits until the nursery has exited, reaps it, and returns its wait status.
    pub fn reap(&mut self) -> i32 {
        wait_readable(&self.nursery.pidfd, "the end of the nursery");
        self.reaped = true;
        let process::Waited::Changed { status, .. } = process::reap(self.nursery.pid) else {
            panic!("it is our child")
        };
        status
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if !self.reaped {
            nix::sys::socket::shutdown(
                std::os::fd::AsRawFd::as_raw_fd(&self.nursery.link),
                nix::sys::socket::Shutdown::Both,
            )
            .unwrap();
            assert_eq!(self.reap(), 0, "the nursery ends in order");
        }
        assert_no_children();
    }
}

/// An example agent (from `examples/`) whose workers are ready.
pub struct Agent {
    pub process: Child,
    pub lines: Lines,
    pub tree: Tree,
}

impl Agent {
    /// Starts the example `name`. Passes it the path of the nursery program, followed by `arguments`. Makes this
    /// process a child subreaper, so that it adopts the processes that the agent leaves behind.
    pub fn start(nursery: &Path, name: &str, arguments: &[&str], workers: usize) -> Self {
        nix::sys::prctl::set_child_subreaper(true).unwrap();
        let (reader, writer) = pipe();
        let mut agent = Command::new(nursery.parent().unwrap().join("examples").join(name));
        let process = agent.arg(nursery).args(arguments).stdin(Pipes::piped()).stdout(writer).spawn().unwrap();
        drop(agent);
        let mut lines = Lines::new(reader);
        let tree = lines.until_all_ready(workers);
        Self { process, lines, tree }
    }

    /// Kills the agent. Asserts that the agent's nursery has killed all its processes and has exited. This process
    /// adopts the nursery and reaps it.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        wait_for_end(self.tree.nursery);
        assert!(matches!(process::reap(self.tree.nursery), process::Waited::Changed { status: 0, .. }));
        assert!(!self.tree.below().any(is_running));
        assert_no_children();
        assert_eq!(self.lines.rest(), Vec::<String>::new(), "nobody holds the pipe");
    }
}

/// Pids of the processes that an example agent has started.
pub struct Tree {
    pub nursery: i32,
    pub workers: Vec<i32>,
    /// Processes that the workers have started.
    pub daemons: Vec<i32>,
}

impl Tree {
    /// Returns the pids of all workers and daemons.
    pub fn below(&self) -> impl Iterator<Item = i32> {
        self.workers.iter().chain(&self.daemons).copied()
    }
}

/// Output of a worker, as lines.
pub struct Lines {
    reader: BufReader<File>,
    /// Lines before `READY`.
    pub said: Vec<String>,
}

impl Lines {
    /// Creates a reader for the lines from a pipe.
    pub fn new(reader: OwnedFd) -> Self {
        Self { reader: BufReader::new(File::from(reader)), said: Vec::new() }
    }

    /// Reads up to and including the line `READY`.
    pub fn until_ready(&mut self) {
        loop {
            let line = self.next().expect("READY comes before the end of the output");
            if line == "READY" {
                return;
            }
            self.said.push(line);
        }
    }

    /// Reads until the example agent has printed the pids of its processes and `count` workers are ready.
    pub(crate) fn until_all_ready(&mut self, count: usize) -> Tree {
        let mut tree = Tree { nursery: 0, workers: Vec::new(), daemons: Vec::new() };
        let mut ready = 0;
        while tree.nursery == 0 || ready < count {
            let line = self.next().expect("all are ready before the end of the output");
            if line == "READY" {
                ready += 1;
            } else if let Some(pids) = line.strip_prefix("nursery ") {
                let (nursery, workers) = pids.split_once(" workers ").unwrap();
                tree.nursery = nursery.parse().unwrap();
                tree.workers.extend(workers.split(' ').map(|pid| pid.parse::<i32>().unwrap()));
            } else {
                tree.daemons.push(line.parse().unwrap());
            }
        }
        tree
    }

    /// Returns all remaining lines. Blocks until every writer has closed its end.
    pub fn rest(&mut self) -> Vec<String> {
        self.collect()
    }
}

impl Iterator for Lines {
    type Item = String;

    /// Blocks until the next line is available. Returns `None` at the end of the output.
    fn next(&mut self) -> Option<String> {
        if self.reader.buffer().is_empty() {
            wait_readable(self.reader.get_ref().as_fd(), "a line of a worker");
        }
        let mut line = String::new();
        if self.reader.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        Some(line.trim_end().to_owned())
    }
}

/// Creates a close-on-exec pipe. Returns its read end and its write end.
pub fn pipe() -> (OwnedFd, OwnedFd) {
    nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap()
}

/// Describes a testkit worker with these arguments. See [`process()`].
pub fn worker(arguments: &[&str]) -> ProcessSpec {
    let mut argv = vec![worker_program().into_os_string()];
    argv.extend(arguments.iter().map(OsString::from));
    process(argv)
}

/// Describes a process with a minimal environment. It shares only standard error with the test.
pub fn process(argv: Vec<OsString>) -> ProcessSpec {
    let stdio = [Some(c"/dev/null".into()), Some(c"/dev/null".into()), None];
    let argv = argv.into_iter().map(c_string).collect();
    ProcessSpec { stdio, ..ProcessSpec::new(argv, vec![c"PATH=/usr/bin:/bin".into()]) }
}

/// Converts a text or a path. Panics if it contains a NUL byte.
pub fn c_string(text: impl Into<OsString>) -> CString {
    CString::new(text.into().into_encoded_bytes()).unwrap()
}

/// Connects the worker's standard output to the first descriptor that is sent with the start request.
pub fn with_stdout(mut process: ProcessSpec) -> ProcessSpec {
    process.pass_fds = vec![PassedFd { source: 0, target: 1 }];
    process
}

/// Stops a process with `ptrace`. No signal can resume the process before [`ptrace::detach`].
pub fn hold(pid: i32) -> Pid {
    let held = Pid::from_raw(pid);
    ptrace::seize(held, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(held).unwrap();
    wait_for_state(pid, 't');
    held
}
