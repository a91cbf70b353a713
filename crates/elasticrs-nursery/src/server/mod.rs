//! Main program of the nursery.
//!
//! A single loop waits for the agent's socket, the agent's pidfd, SIGCHLD and the fence timer. See [`super`] for the
//! invariants.

mod sentinel;
mod spawn;
mod sweep;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::fds::Inherited;
use elasticrs_sys::fork::Forker;
use elasticrs_sys::process::{self, Waited, WorkerExit};
use elasticrs_sys::spawn::Stack;
use elasticrs_sys::{resources, signal};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;
use nix::unistd::{getpid, getsid, setsid};

use self::sentinel::Sentinel;
pub use self::spawn::Worker;
pub(crate) use self::spawn::command;
use self::spawn::{Begun, Compaction, Unsettled};
use self::sweep::{Sweep, SweepStep};
use super::activity::ActivityPage;
use super::connections::{Connections, HeldSocket, LastWord, Release};
use super::fence::{Fence, FenceState, Holder};
use super::protocol::{FIXED_FDS, NurseryLink, PROTOCOL, Reply, Request, SweepLimits, SweepOutcome};
use super::start::Start;
use super::tree::Signalled;
use super::{NAME, cleaner};

/// Time limit for killing all processes after the agent has died or its lease has expired.
///
/// It is safe to stop waiting after this time, because the remaining processes have a pending SIGKILL and will die.
const LAST_SWEEP: Duration = Duration::from_secs(10);

/// Runs the nursery on the descriptors [`FIXED_FDS`], with the text of a [`Start`]. Returns when the nursery is done.
///
/// The process must be single-threaded and must have been started for this purpose only. Returns the exit code: 0 for
/// success, an error number, or 255 if the error has no number. Errors are not reported in any other way: the agent
/// sees only the exit code and the closed socket.
pub fn run(start: Option<&str>) -> u8 {
    run_warm(start, None).err().unwrap_or_default()
}

/// Ensures that all processes that are started during the imports belong to the job. Must be called before the
/// imports. After the imports, call [`run_warm`].
pub fn begin_warm(start: &str) {
    // Ignore errors, because `run_warm` repeats both calls and handles their errors.
    let _ = prctl::set_child_subreaper(true);
    let _ = Start::parse(start).map(|start| start.token.apply());
}

/// Runs a warm nursery. Like [`run`], but forks the workers from this process, which has already imported the
/// modules that they need. Returns a [`Worker`] in each forked worker. In the nursery itself, returns the exit
/// code as an error.
pub fn run_warm(start: Option<&str>, forker: Option<Forker>) -> Result<Worker, u8> {
    let code = |error: io::Error| error.raw_os_error().and_then(|errno| u8::try_from(errno).ok()).unwrap_or(255);
    let start = start.and_then(Start::parse);
    let nursery = NurseryServer::new(start, forker).map_err(code)?;
    if let Some(start) = start.filter(|start| start.is_sentinel) {
        Sentinel::new(nursery, start.token).serve().map_err(code)?;
        return Err(0);
    }
    // In a forked worker, call `settle` only after `serve` has closed the nursery's descriptors, because `settle` may
    // reuse their numbers.
    nursery.serve().map_err(code)?.map(Begun::settle).ok_or(0)
}

/// Returns the current name of this process. Forked workers get this name back after the nursery has renamed
/// itself.
fn leave_program() -> CString {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    CString::new(name.trim_end()).unwrap_or_default()
}

struct NurseryServer {
    pid: i32,
    link: NurseryLink,
    agent: OwnedFd,
    stages: OwnedFd,
    child_signals: SignalFd,
    stack: Stack,
    forker: Option<Forker>,
    compaction: Compaction,
    /// Name of this process before the nursery renamed it.
    name: CString,
    /// True if this process carries a token. Descendants inherit the token, so a descendant without one must have
    /// reset it.
    marked: bool,
    /// Value of `oom_score_adj` to restore in workers. `None` if the nursery did not lower its own value.
    oom_score_adj: Option<CString>,
    /// Workers that have not been reaped.
    workers: BTreeSet<i32>,
    /// Session IDs of the running workers, and of exited workers whose leftover processes have not been killed yet.
    sessions: BTreeSet<i32>,
    /// The last forked worker, if it is still completing its setup. Meanwhile, the nursery can serve requests or fork
    /// the next worker.
    unsettled: Option<Unsettled>,
    /// Signals that are still to be sent, keyed by process group. Each process in a group is signalled individually.
    left_groups: BTreeMap<i32, i32>,
    sweep: Option<Sweep>,
    /// Request to start a worker, and the descriptors sent with it. Postponed while all processes are being killed,
    /// because the new worker would be killed too.
    ///
    /// No further requests are read before a postponed request is handled.
    postponed: Option<(Request, Vec<OwnedFd>)>,
    /// Leftover processes that did not die in time after SIGKILL. The nursery reports each of them once. When it cleans
    /// up after another worker, it no longer waits for them.
    given_up: BTreeSet<i32>,
    /// Exited children that are still held by their tracers. The nursery reports each of them once, and then stops
    /// waiting for it.
    held_by_tracers: BTreeSet<i32>,
    /// Processes that the nursery killed without a request from the agent. They are listed in the next
    /// [`Reply::Swept`].
    untold: Signalled,
    /// Connections that are kept open for the agent.
    held: Connections,
    fence: Option<Fence>,
    /// Shared memory page in which the nursery process reports what it is doing. `None` if no other process reads it.
    activity: Option<ActivityPage>,
    /// Nice value before the nursery process raised its priority to kill processes. It is restored afterwards. `None`
    /// if the priority is not raised.
    nice: Option<i32>,
    /// Spare descriptors. They are closed before processes are killed, so that `/proc` can be read even at the limit on
    /// open files.
    reserve: Vec<OwnedFd>,
    /// True if the agent is gone. The nursery process then sends no more replies, and exits once it has killed all
    /// processes.
    orphaned: bool,
}

impl NurseryServer {
    fn new(start: Option<Start>, forker: Option<Forker>) -> io::Result<Self> {
        let [socket, agent, stages] = Inherited::claim()?.take(FIXED_FDS, forker.is_none())?;
        if getsid(None)? != getpid() {
            setsid()?;
        }
        if let Some(start) = start {
            start.limit_descriptors()?;
        }
        prctl::set_child_subreaper(true)?;
        // Have the kernel send SIGCONT to this nursery when the agent dies. A stopped nursery must resume, because
        // otherwise the workers would outlive the lease. The kernel sends the signal even if no other process is alive.
        // In a warm nursery, this replaces SIGKILL, which was set because the nursery could not watch its agent during
        // the imports.
        prctl::set_pdeathsig(Signal::SIGCONT)?;
        let name = if forker.is_some() { leave_program() } else { CString::default() };
        prctl::set_name(NAME)?;
        // With autogroups, the scheduler first divides the CPU among sessions, and nice values count only within a
        // session. The nursery is alone in its session, so set the nice value of the session's autogroup. Ignore
        // errors: the nursery then has an ordinary share of the CPU.
        let _ = std::fs::write("/proc/self/autogroup", "-20");
        // If SIGCHLD were ignored, the kernel would discard the exit statuses of the workers.
        signal::set_default(Signal::SIGCHLD)?;
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None)?;
        let mut child_signal = SigSet::empty();
        child_signal.add(Signal::SIGCHLD);
        let child_signals = SignalFd::with_flags(&child_signal, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let mut nursery = Self {
            reserve: reserve_of(&agent),
            pid: getpid().as_raw(),
            link: NurseryLink::new(socket)?,
            agent,
            stages,
            child_signals,
            stack: Stack::new()?,
            forker,
            compaction: Compaction::Later,
            name,
            marked: start.is_some_and(|start| start.token.apply().is_ok()),
            oom_score_adj: lower_oom_score(),
            workers: BTreeSet::new(),
            sessions: BTreeSet::new(),
            unsettled: None,
            left_groups: BTreeMap::new(),
            sweep: None,
            postponed: None,
            given_up: BTreeSet::new(),
            held_by_tracers: BTreeSet::new(),
            untold: Signalled::default(),
            held: Connections::default(),
            fence: None,
            activity: None,
            nice: None,
            orphaned: false,
        };
        nursery.tell(&Reply::Ready { protocol: PROTOCOL, pid: nursery.pid }, Vec::new());
        Ok(nursery)
    }

    /// Serves requests. Returns `None` when the nursery is done, and `Some` in each forked worker.
    fn serve(mut self) -> io::Result<Option<Begun>> {
        loop {
            let ready = self.wait()?;
            if self.sweep.is_none() && !ready.any() {
                self.step_compaction();
            }
            if ready.child {
                while self.child_signals.read_signal()?.is_some() {}
                self.reap();
            }
            if ready.fence {
                self.check_fence();
            }
            if ready.agent_gone {
                self.lose_agent();
            }
            if (ready.socket || self.postponed.is_some()) && !self.orphaned {
                match self.serve_requests() {
                    Served::GoOn => {}
                    Served::Leave => return Ok(None),
                    Served::Become(begun) => return Ok(Some(*begun)),
                }
            }
            if matches!(self.step_sweep(), Served::Leave) {
                return Ok(None);
            }
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let timeout = match &self.sweep {
            Some(sweep) => Some(sweep.wait(Instant::now())),
            None => self.postponed.as_ref().map(|_| Duration::ZERO).or(self.pause_of_compaction()),
        };
        let timeout = timeout.map(TimeSpec::from);
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::POLLIN, self.postponed.is_none());
        wanted.set(PollFlags::POLLOUT, self.link.has_unsent());
        let timer = self.fence.as_ref().map_or(self.child_signals.as_fd(), Fence::timer);
        let mut polled = [
            PollFd::new(self.child_signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.agent.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.link.as_fd(), wanted),
            PollFd::new(timer, PollFlags::POLLIN),
        ];
        // Once the agent is gone, poll only the children, because the other descriptors would always be ready.
        let count = match &self.fence {
            _ if self.orphaned => 1,
            None => polled.len() - 1,
            Some(_) => polled.len(),
        };
        match ppoll(&mut polled[..count], timeout, None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Check here whether the agent has closed the socket. While a start is postponed, the nursery does not read
        // from the socket, so it would not notice the end of the stream.
        let has_hung_up =
            self.postponed.is_some() && polled[2].revents().is_some_and(|e| e.contains(PollFlags::POLLHUP));
        let [child, agent_gone, socket, fence] = polled.map(|fd| fd.any().unwrap_or(true));
        Ok(Ready { child, agent_gone: agent_gone || has_hung_up, socket, fence })
    }

    /// Handles all state changes of children and reaps those that have exited. Returns true if any children are left.
    fn reap(&mut self) -> bool {
        let seen = Stamp::now();
        loop {
            match process::any_child() {
                Waited::Changed { pid, status } => {
                    let exit = WorkerExit::from_wait_status(status);
                    self.held_by_tracers.remove(&pid);
                    self.given_up.remove(&pid);
                    // A worker that called `PTRACE_TRACEME` is traced by its parent, the nursery. Such a worker stops
                    // at each signal, so detach from the worker.
                    if exit.is_none() && libc::WIFSTOPPED(status) && process::release(pid, libc::WSTOPSIG(status)) {
                        continue;
                    }
                    let is_worker =
                        if exit.is_some() { self.workers.remove(&pid) } else { self.workers.contains(&pid) };
                    if !is_worker {
                        continue;
                    }
                    let reply = match exit {
                        Some(exit) => Reply::Exited { pid, exit, seen },
                        None if libc::WIFSTOPPED(status) => Reply::Stopped { pid, signal: libc::WSTOPSIG(status) },
                        None => Reply::Continued { pid },
                    };
                    self.tell(&reply, Vec::new());
                }
                Waited::Pending => return true,
                Waited::NoChildren => return false,
            }
        }
    }

    fn serve_requests(&mut self) -> Served {
        loop {
            let received = match self.postponed.take() {
                None => self.link.receive(),
                postponed => Ok(postponed),
            };
            match received {
                Ok(Some(start @ (Request::Spawn { .. }, _)))
                    if self.sweep.as_ref().is_some_and(Sweep::ends_workers) =>
                {
                    self.postponed = Some(start);
                    break;
                }
                Ok(Some((request, fds))) => match self.serve_request(request, fds) {
                    Served::GoOn => {}
                    other => return other,
                },
                Ok(None) => break,
                Err(_) => {
                    self.lose_agent();
                    break;
                }
            }
        }
        self.settle();
        if let Some(activity) = &mut self.activity {
            activity.wait();
        }
        self.signal_left_groups();
        if self.link.flush().is_err() {
            self.lose_agent();
        }
        Served::GoOn
    }

    fn serve_request(&mut self, request: Request, fds: Vec<OwnedFd>) -> Served {
        if !matches!(request, Request::Spawn { .. }) {
            self.settle();
        }
        match request {
            Request::Spawn { process, keep_ignored } => return self.spawn(process, &keep_ignored, fds),
            Request::SignalGroup { pid, signal } => self.signal_group(pid, signal),
            Request::Sweep { number, left_by, limits, savers } => {
                self.begin_sweep(limits, Some(number), left_by);
                if let Some(sweep) = &mut self.sweep
                    && left_by.is_none()
                {
                    sweep.spare(savers);
                }
            }
            Request::Hold { beside, word } => self.hold(fds, beside, word),
            Request::Release(which) => self.held.release(which),
            Request::Fence { holder } => self.set_fence(fds, holder),
            Request::Activity => self.set_activity(fds),
            Request::Guard => {}
            Request::Leave => return Served::Leave,
        }
        Served::GoOn
    }

    /// Starts killing all descendants or, if `left_by` is a worker's pid, only the leftover processes of that worker.
    ///
    /// `number` is the number of the request to answer, or `None` if no answer is expected.
    fn begin_sweep(&mut self, limits: SweepLimits, number: Option<u32>, left_by: Option<i32>) {
        if let Some(sweep) = &mut self.sweep {
            if left_by.is_none() {
                sweep.spare(None);
            }
            return sweep.bring_forward(limits, number, left_by);
        }
        self.reserve.clear();
        self.sweep = Some(Sweep::new(limits, number, left_by, std::mem::take(&mut self.untold)));
        // Raise the nursery's priority, because it would get too little CPU time while hundreds of processes are busy.
        // If this is not permitted, continue at the normal priority.
        self.nice = resources::set_nice(-20).ok();
    }

    fn step_sweep(&mut self) -> Served {
        let Some(mut sweep) = self.sweep.take() else { return Served::GoOn };
        let has_children = self.reap();
        match sweep.step(self, has_children) {
            SweepStep::GoOn => {
                if self.orphaned && sweep.is_quiet() {
                    // End the agent's session before the processes that unlink shared memory exit, because the other
                    // nodes wait only for the exit of the workers.
                    self.end_session();
                }
                self.sweep = Some(sweep);
            }
            SweepStep::Over { stuck, spared, held } => {
                if self.orphaned {
                    if let Some(activity) = &self.activity {
                        activity.end();
                    }
                    self.end_session();
                    return Served::Leave;
                }
                // Forget exited workers that a tracer still holds. Otherwise, their exits would be reported twice: in
                // the `Swept` reply and when the tracer releases them.
                self.workers.retain(|pid| !held.contains(pid));
                self.held_by_tracers.extend(&held);
                let left_by = sweep.left_by();
                match left_by {
                    Some(_) => self.given_up.extend(stuck.iter().map(|stuck| stuck.pid)),
                    None => self.given_up.clear(),
                }
                self.sessions.retain(|pid| self.workers.contains(pid) || left_by.is_some_and(|worker| worker != *pid));
                self.reserve = reserve_of(&self.agent);
                self.lower_priority();
                match sweep.into_answer(&stuck) {
                    (Some(number), ended) => {
                        let outcome = SweepOutcome { more: ended.more(), ended: ended.named, stuck, spared, held };
                        self.tell(&Reply::Swept { number, outcome }, Vec::new());
                    }
                    (None, ended) => self.untold = ended,
                }
            }
        }
        Served::GoOn
    }

    /// Restores the normal priority after processes were killed at a raised priority, because new workers would inherit
    /// the raised priority.
    fn lower_priority(&mut self) {
        if let Some(nice) = self.nice.take() {
            // Ignore the result, because raising the nice value is always permitted.
            let _ = resources::set_nice(nice);
        }
    }

    /// Starts killing all processes, because the agent is dead or has closed its end of the connection. The nursery
    /// exits when all processes have exited or the time limit has passed.
    fn lose_agent(&mut self) {
        if !self.orphaned {
            self.orphaned = true;
            self.begin_sweep(SweepLimits::at_once(LAST_SWEEP), None, None);
        }
    }

    fn tell(&mut self, reply: &Reply, fds: Vec<OwnedFd>) {
        if !self.orphaned && self.link.send(reply, fds).is_err() {
            self.lose_agent();
        }
    }

    // --- signals to groups of workers ------------------------------------------------------------------------

    // These methods send every SIGKILL to a group. They also send the other signals if the kernel cannot signal a group
    // through a pidfd.

    /// Sends a signal to the process group of a worker, or queues the signal for [`Self::signal_left_groups`]. Ignores
    /// errors, because the group may be gone, or may now belong to another user. The agent notices workers that do not
    /// exit.
    pub(super) fn signal_group(&mut self, pid: i32, signal: i32) {
        if signal != libc::SIGKILL && self.workers.contains(&pid) {
            let _ = signal::kill_group(pid, signal);
        } else if self.sessions.contains(&pid) {
            // Queue the signal, so that each process in the group is signalled individually. Do not signal the whole
            // group, because SIGKILL would also kill processes that unlink shared memory. In addition, the group's
            // number may have been reused.
            self.left_groups.insert(pid, signal);
        }
    }

    /// Sends the queued signals. Lists the processes of the system once for all groups, and signals each process in a
    /// group individually.
    pub(super) fn signal_left_groups(&mut self) {
        let groups = std::mem::take(&mut self.left_groups);
        if groups.is_empty() {
            return;
        }
        for target in cleaner::others_in_groups(self.pid, |group| groups.contains_key(&group)) {
            if let Some(Ok(signal)) = groups.get(&target.status.group).map(|&signal| Signal::try_from(signal)) {
                target.signal(signal);
            }
        }
    }

    // --- connections and deadline of the agent ---------------------------------------------------------------

    // If the agent dies, the nursery keeps the agent's connections to a store open until all workers and their
    // descendants have exited. It also kills these if the agent does not renew its lease in the store before a
    // deadline.

    fn hold(&mut self, fds: Vec<OwnedFd>, beside: bool, word: Option<LastWord>) {
        // `fds` is empty if this process has reached its limit on open files. `self.held.hold` fails if there are too many
        // connections, which is not expected, because the agent respects the same limit.
        let is_held =
            fds.into_iter().next().is_some_and(|socket| self.held.hold(HeldSocket { socket, word }, beside).is_ok());
        if !is_held {
            self.tell(&Reply::NotGuarded { errno: libc::EMFILE }, Vec::new());
        }
    }

    /// Closes the connections to a store that are held for a dead agent, so that the agent's session there ends.
    ///
    /// Called when all workers and their descendants have exited. Processes that only unlink shared memory may remain.
    fn end_session(&mut self) {
        // First handle the last requests that the agent has sent to this nursery. They may say that the agent's session
        // has moved to another connection, or that the agent is alive.
        while let Ok(Some((request, fds))) = self.link.receive() {
            match request {
                Request::Hold { beside, word } => self.hold(fds, beside, word),
                Request::Release(which) => self.held.release(which),
                _ => {}
            }
        }
        self.held.release(Release::All);
    }

    fn set_activity(&mut self, fds: Vec<OwnedFd>) {
        // Ignore an error in getting this page of memory. Without the page, the process that guards the nursery has to
        // kill all processes when the agent dies, instead of the nursery.
        self.activity = ActivityPage::from_descriptors(fds).ok();
        if let Some(activity) = &mut self.activity {
            activity.wait();
        }
    }

    fn set_fence(&mut self, fds: Vec<OwnedFd>, holder: Holder) {
        match Fence::from_descriptors(fds, holder) {
            Ok(fence) => {
                self.fence = Some(fence);
                self.check_fence();
            }
            Err(error) => self.cannot_guard(&error),
        }
    }

    /// Starts killing all workers and their descendants if the deadline of the agent's lease (the fence) has passed,
    /// because the other nodes may then consider this agent dead. Returns true if the deadline has passed.
    fn check_fence(&mut self) -> bool {
        match self.fence.as_ref().map(Fence::look) {
            None | Some(Ok(FenceState::Unset | FenceState::At(_))) => false,
            Some(Ok(FenceState::Passed { first })) => {
                if first {
                    self.end_lease();
                }
                true
            }
            Some(Ok(FenceState::HandedOver(_))) => {
                self.fence = None;
                false
            }
            Some(Err(error)) => {
                self.cannot_guard(&error);
                false
            }
        }
    }

    fn end_lease(&mut self) {
        self.settle();
        // First reap the workers that have exited on their own, so that their exits are reported before
        // [`Reply::Fenced`].
        self.reap();
        self.tell(&Reply::Fenced, Vec::new());
        if !self.orphaned {
            self.begin_sweep(SweepLimits::at_once(LAST_SWEEP), None, None);
        }
    }

    fn cannot_guard(&mut self, error: &std::io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
        self.tell(&Reply::NotGuarded { errno }, Vec::new());
    }
}

enum Served {
    GoOn,
    Leave,
    /// This process is now a forked worker.
    Become(Box<Begun>),
}

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a descriptor of its own")]
struct Ready {
    child: bool,
    agent_gone: bool,
    socket: bool,
    fence: bool,
}

impl Ready {
    fn any(&self) -> bool {
        self.child || self.agent_gone || self.socket || self.fence
    }
}

/// Reserves the file descriptors that are needed to kill processes, or as many of them as are available.
fn reserve_of(any: &OwnedFd) -> Vec<OwnedFd> {
    (0..4).map_while(|_| any.try_clone().ok()).collect()
}

/// Protects this process from the OOM killer. Returns the previous `oom_score_adj`, or `None` if the change is
/// not permitted.
fn lower_oom_score() -> Option<CString> {
    const PATH: &str = "/proc/self/oom_score_adj";
    let before = std::fs::read_to_string(PATH).ok()?;
    std::fs::write(PATH, "-1000").ok()?;
    CString::new(before.trim_end()).ok()
}
