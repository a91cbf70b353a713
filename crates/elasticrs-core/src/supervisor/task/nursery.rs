//! The agent's end of the connection to the nursery (the process that starts the workers). Converts the replies and the
//! exit of the nursery into events for the runtime.
//!
//! Owns the current nursery and the nurseries that are being shut down in the background. Also keeps the token by which
//! processes are found that a nursery has left behind.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use elasticrs_nursery::activity::ActivityPage;
use elasticrs_nursery::connections::Release;
use elasticrs_nursery::launch::{LaunchError, Launched, REPORT_FD, Warm, Warming, stage_reached};
use elasticrs_nursery::protocol::{AgentLink, FIXED_FDS, Reply, Request};
use elasticrs_nursery::report::{self, ImportFailure};
use elasticrs_nursery::sweep::kill_by_token;
use elasticrs_nursery::token::Token;
use elasticrs_runtime::readiness::{Registered, register};
use elasticrs_sys::process::{self, WorkerExit};
use elasticrs_sys::procfs::{self, Stat};
use elasticrs_sys::stage::Stage;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::CLOSE_LIMIT;
use crate::supervisor::deadlines::{Deadline, Deadlines};

/// Event returned by [`Nursery::next`].
#[derive(Debug)]
pub(super) enum NurseryEvent {
    /// A reply from the nursery, and the descriptors that came with it.
    Reply(Reply, Vec<OwnedFd>),
    /// The nursery has exited, and all of its replies have been returned.
    Died(WorkerExit),
    /// The nursery did not exit in time after SIGKILL, because its control group is frozen or because it hangs in the
    /// kernel.
    GivenUp,
}

/// Time limit for a nursery to exit. Nurseries are small and exit quickly unless the machine is very busy.
pub(super) const DEATH_LIMIT: Duration = Duration::from_secs(5);

/// A running nursery.
#[derive(Debug)]
pub(super) struct Nursery {
    pub(super) pid: i32,
    pub(super) token: Token,
    /// State of the module imports. `None` if the nursery is not importing modules.
    pub(super) import: Option<Import>,
    pub(super) sentinel: Option<SentinelLink>,
    link: Registered<AgentLink>,
    pidfd: AsyncFd<OwnedFd>,
    stages: OwnedFd,
    /// Channels to notify once all queued requests are in the kernel's socket buffer.
    waiting: Vec<oneshot::Sender<bool>>,
    link_is_open: bool,
    has_died: bool,
    /// Time at which the supervisor started to wait for the nursery's exit. `None` if it is not waiting.
    ending: Option<Instant>,
    /// True if the nursery was killed because it did not respond.
    pub(super) hung: bool,
}

/// State of a nursery's module imports. See [`Warming`].
#[derive(Debug)]
pub(super) struct Import {
    pub(super) warm: Arc<Warm>,
    pub(super) since: u64,
    /// Reason why the nursery lost its link: an imported module executed another program, or closed the nursery's
    /// descriptors. `None` if neither was detected.
    pub(super) failure: Option<ImportFailure>,
    /// True if the import was stopped because the guard process, which cleans up if the agent is killed, was lost.
    pub(super) is_unguarded: bool,
    /// Keeps the thread that launched the nursery running. See [`Parent`].
    _parent: Parent,
}

/// Keeps the thread that launched a nursery running until this value is dropped. If the thread exited during the
/// nursery's imports, the kernel would kill the nursery.
pub(super) type Parent = std::sync::mpsc::SyncSender<std::convert::Infallible>;

/// The sentinel (a process that cleans up if the nursery cannot), and the memory page that it shares with the
/// nursery.
#[derive(Debug)]
pub(super) struct SentinelLink {
    pub(super) sentinel: Box<Nursery>,
    activity: ActivityPage,
}

impl SentinelLink {
    /// Passes the nursery's pidfd to the sentinel, a process that cleans up if the nursery cannot.
    fn introduce(&mut self, nursery: &AsyncFd<OwnedFd>) -> io::Result<()> {
        let mut fds = vec![nursery.get_ref().try_clone()?];
        fds.extend(self.activity.descriptors()?);
        self.sentinel.send(&Request::Guard, fds);
        Ok(())
    }
}

impl Nursery {
    /// Creates a `Nursery` for a launched process. Must be called on the runtime thread. On failure, kills the process
    /// and its sentinel.
    pub(super) fn of(launched: Launched, parent: &Parent) -> Result<Self, LaunchError> {
        let pids = [Some(launched.pid), launched.sentinel.as_ref().map(|sentinel| sentinel.pid)];
        Self::assembled(launched, parent).inspect_err(|_| {
            #[allow(clippy::disallowed_methods, reason = "`reap` runs on a thread of its own")]
            for pid in pids.into_iter().flatten() {
                // Use the pids, because the pidfds are already closed. The pids are still valid, because the processes
                // have not been reaped.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                tokio::task::spawn_blocking(move || process::reap(pid));
            }
        })
    }

    fn assembled(launched: Launched, parent: &Parent) -> Result<Self, LaunchError> {
        let Launched { pid, pidfd, link, stages, token, warming, sentinel } = launched;
        let import = warming.map(|Warming { warm, since }| Import {
            warm,
            since,
            failure: None,
            is_unguarded: false,
            _parent: parent.clone(),
        });
        let mut nursery = Self {
            pid,
            token,
            import,
            sentinel: None,
            link: Registered::new(link, Interest::READABLE | Interest::WRITABLE)?,
            pidfd: register(pidfd, Interest::READABLE)?,
            stages,
            waiting: Vec::new(),
            link_is_open: true,
            has_died: false,
            ending: None,
            hung: false,
        };
        if let Some(sentinel) = sentinel {
            let mut guard = SentinelLink {
                sentinel: Box::new(Self::assembled(*sentinel, parent)?),
                activity: ActivityPage::new()?,
            };
            guard.introduce(&nursery.pidfd)?;
            nursery.send(&Request::Activity, guard.activity.descriptors()?);
            nursery.sentinel = Some(guard);
        }
        Ok(nursery)
    }

    /// Reaps the sentinel if it has exited, and returns the memory page that it shared with the nursery. Returns `None`
    /// if the sentinel is running, or if the nursery is importing modules.
    pub(super) fn take_lost_sentinel(&mut self) -> Option<ActivityPage> {
        let ended = |guard: &mut SentinelLink| process::have_ended(&[guard.sentinel.pidfd.get_ref().as_fd()]) == [true];
        let SentinelLink { sentinel, activity } =
            self.sentinel.take_if(|guard| self.import.is_none() && ended(guard))?;
        exit_of(sentinel.pidfd.get_ref());
        Some(activity)
    }

    /// Assigns a new sentinel to the nursery. Returns a reference to the sentinel.
    pub(super) fn guard_by(&mut self, sentinel: Self, activity: ActivityPage) -> io::Result<&mut Self> {
        let guard = self.sentinel.insert(SentinelLink { sentinel: Box::new(sentinel), activity });
        guard.introduce(&self.pidfd)?;
        Ok(&mut guard.sentinel)
    }

    /// Sends a request to the nursery and to its sentinel. See [`Self::send`].
    pub(super) fn send_to_both(&mut self, request: &Request, fds: Vec<OwnedFd>) -> io::Result<()> {
        if let Some(SentinelLink { sentinel, .. }) = &mut self.sentinel {
            sentinel.send(request, fds.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?);
        }
        self.send(request, fds);
        Ok(())
    }

    /// Queues a request and sends as much as the socket accepts. [`Self::next`] sends the remainder.
    pub(super) fn send(&mut self, request: &Request, fds: Vec<OwnedFd>) {
        if self.link_is_open && self.link.get_mut().send(request, fds).is_err() {
            self.give_up();
        }
    }

    /// Notifies `sent` once all queued requests are in the kernel's socket buffer. From then on, the nursery will
    /// receive them even if this process dies. Drops `sent` if the link is closed.
    pub(super) fn notify_when_sent(&mut self, sent: oneshot::Sender<bool>) {
        self.waiting.push(sent);
        self.check_sent();
    }

    fn check_sent(&mut self) {
        if !self.link_is_open {
            self.waiting.clear();
        } else if !self.link.get_ref().has_unsent() {
            for sent in self.waiting.drain(..) {
                // Ignore an error, which means that the receiver has stopped waiting.
                let _ = sent.send(true);
            }
        }
    }

    /// Stops using the connection to the nursery process after an error. Also kills the process, because in rare cases
    /// it does not exit by itself.
    fn give_up(&mut self) {
        self.link_is_open = false;
        self.waiting.clear();
        self.kill();
    }

    /// Sends SIGCONT to the nursery, in case a user has paused the nursery with a signal.
    pub(super) fn resume(&self) {
        // Ignore the only possible error, ESRCH. It means that the nursery has exited, and the exit is about to be
        // reported.
        let _ = process::send_signal(self.pidfd.get_ref(), libc::SIGCONT);
    }

    pub(super) fn kill(&mut self) {
        self.ending.get_or_insert_with(Instant::now);
        // Ignore the only possible error, ESRCH. It means that the nursery has already exited.
        let _ = process::send_signal(self.pidfd.get_ref(), libc::SIGKILL);
    }

    /// Kills a nursery that does not respond. Its exit is then handled like that of any other nursery.
    pub(super) fn kill_hung(&mut self) {
        self.hung = true;
        self.kill();
    }

    /// Returns the message about a nursery that does not exit after SIGKILL.
    pub(super) fn left_behind(&self) -> String {
        let (pid, channel) = (self.pid, procfs::wait_channel(self.pid));
        let channel = if channel.is_empty() { "the kernel" } else { &channel };
        format!("the nursery (pid {pid}) did not exit after SIGKILL (waits in {channel}) and is still running")
    }

    /// Returns the last stage that the nursery reported while it was starting a worker. See [`stage_reached`].
    pub(super) fn stage_reached(&self) -> Option<Stage> {
        stage_reached(&self.stages)
    }

    /// Kills a nursery that lost its link during the imports, unless it is already exiting. A nursery closes its link
    /// only when it exits. If it is not exiting, an imported module must have closed descriptors that it does not own,
    /// or executed another program. That program might run the script outside of any group. Records in
    /// [`Import::failure`] what the module has done.
    #[allow(clippy::disallowed_methods, reason = "links below /proc are read without blocking")]
    fn end_what_it_executes(&mut self) {
        let Some(import) = &mut self.import else { return };
        let Some(folder) = procfs::folder(self.pid) else { return };
        if Stat::in_folder(&folder).is_none_or(|stat| stat.is_ending()) {
            return;
        }
        // After `exec`, the report descriptor is open, but `stages` is closed, because it is close-on-exec. Check that
        // `stages` is a pipe, because the new program may have opened another file with the same number.
        let [_, _, stages] = FIXED_FDS.map(|fd| fs::read_link(folder.join(format!("fd/{fd}"))).unwrap_or_default());
        let has_stages = stages.to_string_lossy().starts_with("pipe:");
        let has_report = folder.join(format!("fd/{REPORT_FD}")).exists();
        import.failure = Some(if has_report && !has_stages {
            ImportFailure::ExecutedProgram
        } else {
            ImportFailure::ClosedConnection
        });
        self.kill();
    }

    /// Stops the imports by killing the nursery, because its guard process was lost. Only the guard process cleans up
    /// if the agent is killed during the imports.
    fn end_unguarded(&mut self) {
        if let Some(import) = &mut self.import {
            import.is_unguarded = true;
            self.kill();
        }
    }

    /// Returns the next event. Cancel-safe, because no state is held across an await.
    pub(super) async fn next(&mut self) -> NurseryEvent {
        loop {
            match self.link.get_mut().receive() {
                Ok(Some((reply, fds))) => return NurseryEvent::Reply(reply, fds),
                // Do not wait for end-of-file from a dead nursery, because a child that hangs in `exec` may keep the
                // socket open.
                Ok(None) if self.link_is_open && !self.has_died => {}
                end @ (Ok(None) | Err(_)) => {
                    self.link_is_open = false;
                    self.waiting.clear();
                    self.end_what_it_executes();
                    if end.is_err_and(|error| error.kind() != ErrorKind::UnexpectedEof) {
                        self.give_up();
                    }
                    return self.wait_for_end().await;
                }
            }
            let ending = self.ending;
            let wants_to_write = self.link.get_ref().has_unsent();
            // Clear the readiness before reading. In the opposite order, data that arrives between the two steps would
            // be missed.
            //
            // Ignore an error from `readable`, because it occurs only when the runtime shuts down.
            tokio::select! {
                biased;
                Ok(mut guard) = self.link.readable() => guard.clear_ready(),
                Ok(mut guard) = self.link.writable(), if wants_to_write => {
                    guard.clear_ready();
                    if self.link.get_mut().flush().is_err() {
                        self.give_up();
                    }
                    self.check_sent();
                }
                _ = self.pidfd.readable() => self.has_died = true,
                () = lost(self.sentinel.as_ref()), if self.import.as_ref().is_some_and(|import| !import.is_unguarded) => {
                    self.end_unguarded();
                }
                () = death_limit(ending), if ending.is_some() => return NurseryEvent::GivenUp,
            }
        }
    }

    /// Makes the nursery exit, and waits until it has exited. If `leave` is true, the processes of the nursery keep
    /// running. Otherwise, the nursery kills them. Returns `None` if the nursery does not exit.
    pub(super) async fn end(mut self, leave: bool, limit: Duration) -> Option<WorkerExit> {
        // Make the nursery close its connections without ending the agent's session, because the agent is still alive.
        self.send(&Request::Release(Release::Quietly), Vec::new());
        if leave {
            if let Some(SentinelLink { sentinel, .. }) = &mut self.sentinel {
                sentinel.kill();
            }
            self.send(&Request::Leave, Vec::new());
        }
        if self.import.is_some() {
            // Kill the nursery, because it does not read requests during its imports. It has no workers yet.
            self.kill();
        }
        let Self { link, pidfd, sentinel, .. } = self;
        // Close the connection even if requests are still unsent. A nursery that has not read its requests is dead or
        // hangs, so it could not handle them.
        drop(link);
        // Send SIGCONT, because a nursery that a user has paused with SIGSTOP cannot exit. Ignore the only possible
        // error, ESRCH. It means that the nursery has already exited.
        let _ = process::send_signal(pidfd.get_ref(), libc::SIGCONT);
        if tokio::time::timeout(limit, pidfd.readable()).await.is_err() {
            let _ = process::send_signal(pidfd.get_ref(), libc::SIGKILL);
            if tokio::time::timeout(DEATH_LIMIT, pidfd.readable()).await.is_err() {
                return None;
            }
        }
        let exit = exit_of(pidfd.get_ref());
        if let Some(SentinelLink { sentinel, .. }) = sentinel {
            if leave {
                Box::pin(sentinel.end(true, limit)).await;
            } else {
                Box::pin(sentinel.end_what_it_guards(limit)).await;
            }
        }
        Some(exit)
    }

    /// Makes the sentinel kill the processes that its nursery left behind. If the sentinel fails, kills them from this
    /// process.
    pub(super) async fn end_what_it_guards(self, limit: Duration) {
        let token = self.token;
        if self.end(false, limit).await != Some(WorkerExit::Exited { code: 0 }) {
            // Ignore the result, because nothing more can be done about processes that are still alive after the limit.
            let _ = tokio::task::spawn_blocking(move || kill_by_token(token, limit)).await;
        }
    }

    async fn wait_for_end(&mut self) -> NurseryEvent {
        // Wait for the exit, because the link closes a moment before the process exits.
        let ending = *self.ending.get_or_insert_with(Instant::now);
        tokio::select! {
            biased;
            _ = self.pidfd.readable() => NurseryEvent::Died(exit_of(self.pidfd.get_ref())),
            () = death_limit(Some(ending)) => {
                self.kill();
                NurseryEvent::GivenUp
            }
        }
    }
}

async fn lost(sentinel: Option<&SentinelLink>) {
    match sentinel {
        // Ignore an error, because it only means that the runtime is shutting down.
        Some(SentinelLink { sentinel, .. }) => drop(sentinel.pidfd.readable().await),
        None => std::future::pending().await,
    }
}

async fn death_limit(ending: Option<Instant>) {
    tokio::time::sleep_until((ending.unwrap_or_else(Instant::now) + DEATH_LIMIT).into()).await;
}

/// Reaps a child process and returns its exit status, or `Unknown` if another thread has already reaped the child.
fn exit_of(pidfd: &OwnedFd) -> WorkerExit {
    let reaped = waitid(Id::PIDFd(pidfd.as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG);
    reaped.map_or(WorkerExit::Unknown, WorkerExit::of)
}

/// Time after which the user is notified that the workers' start is waiting for an import in the nursery.
const SLOW_IMPORT: Duration = Duration::from_secs(5);

/// The nursery that starts the workers. If it is lost, there is no nursery until the next group starts.
#[derive(Debug)]
pub(super) struct CurrentNursery {
    nursery: Option<Nursery>,
    /// Token of the last nursery, used to find the processes that the nursery left behind. `None` until the first
    /// nursery has been launched.
    token: Option<Token>,
    /// Pid of the nursery, for readers on other threads. Zero if there is no nursery.
    pid: Arc<AtomicI32>,
}

impl CurrentNursery {
    pub(super) fn new(pid: Arc<AtomicI32>) -> Self {
        Self { token: None, nursery: None, pid }
    }

    /// Switches to another nursery. Returns the previous nursery if it still exists.
    pub(super) fn replace(&mut self, nursery: Nursery) -> Option<Nursery> {
        self.pid.store(nursery.pid, Ordering::Relaxed);
        self.token = Some(nursery.token);
        self.nursery.replace(nursery)
    }

    /// Removes the nursery, because it was lost or is being closed.
    pub(super) fn take(&mut self) -> Option<Nursery> {
        self.pid.store(0, Ordering::Relaxed);
        self.nursery.take()
    }

    pub(super) fn token(&self) -> Option<Token> {
        self.token
    }

    pub(super) fn exists(&self) -> bool {
        self.nursery.is_some()
    }

    pub(super) fn pid(&self) -> Option<i32> {
        self.nursery.as_ref().map(|nursery| nursery.pid)
    }

    pub(super) fn get(&mut self) -> Option<&mut Nursery> {
        self.nursery.as_mut()
    }

    /// Sends a request to the nursery. Does nothing if there is no nursery.
    pub(super) fn send(&mut self, request: &Request, fds: Vec<OwnedFd>) {
        if let Some(nursery) = &mut self.nursery {
            nursery.send(request, fds);
        }
    }

    /// Waits for the next event from the nursery and returns it. Never returns if there is no nursery. Cancel-safe.
    pub(super) async fn next(&mut self) -> NurseryEvent {
        match &mut self.nursery {
            Some(nursery) => nursery.next().await,
            None => std::future::pending().await,
        }
    }

    /// Returns true while the nursery imports modules.
    pub(super) fn is_warming(&self) -> bool {
        self.import().is_some()
    }

    fn import(&self) -> Option<&Import> {
        self.nursery.as_ref()?.import.as_ref()
    }

    /// Records that the nursery (the process that starts the workers) has imported the modules for warm starts. Returns
    /// false if it was not importing.
    pub(super) fn finish_import(&mut self, deadlines: &mut Deadlines) -> bool {
        let was_warming = self.nursery.as_mut().and_then(|nursery| nursery.import.take()).is_some();
        if was_warming {
            disarm_import(deadlines);
        }
        was_warming
    }

    /// Sets the deadlines for the nursery's imports. Called again when a group starts to wait for the imports, because
    /// all deadlines were cleared at the end of the previous group.
    pub(super) fn arm_import(&self, deadlines: &mut Deadlines) {
        if let Some(import) = self.import() {
            // Do not postpone a deadline that is already set, because all imports share one time limit. If an import
            // kills the nursery, its replacement imports the remaining modules within the same limit.
            deadlines.hasten(Deadline::Warm, import.warm.limit, Instant::now());
            deadlines.hasten(Deadline::SlowImport, SLOW_IMPORT, Instant::now());
        }
    }

    /// Kills a nursery that has exceeded the time limit of its imports.
    pub(super) fn kill_hung_import(&mut self) {
        if let Some(nursery) = self.nursery.as_mut().filter(|nursery| nursery.import.is_some()) {
            nursery.kill_hung();
        }
    }

    /// Returns a message about the module that the nursery (the process that starts the workers) is still importing.
    /// `None` if no import is in progress.
    pub(super) fn slow_import(&self) -> Option<String> {
        let import = self.import()?;
        let module = report::importing(&import.warm.report, import.since);
        Some(format!(
            "warm: {} is still being imported after {} s; the workers wait for it for at most {} s (--warm-timeout)",
            module.as_deref().unwrap_or("the first module"),
            SLOW_IMPORT.as_secs(),
            import.warm.limit.as_secs_f64(),
        ))
    }
}

/// Cancels the deadlines for the nursery's module imports.
pub(super) fn disarm_import(deadlines: &mut Deadlines) {
    deadlines.disarm(Deadline::Warm);
    deadlines.disarm(Deadline::SlowImport);
}

/// Background tasks that must finish before the supervisor is closed, such as the shutdown of a nursery.
#[derive(Debug, Default)]
pub(super) struct Retired(JoinSet<()>);

impl Retired {
    /// Runs `work` in the background. Must be called on the runtime thread.
    pub(super) fn add(&mut self, work: impl Future<Output = ()> + 'static) {
        while self.0.try_join_next().is_some() {}
        self.0.spawn_local(work);
    }

    /// Stops a nursery that is no longer needed.
    pub(super) fn add_nursery(&mut self, nursery: Nursery) {
        self.add(async { _ = nursery.end(false, CLOSE_LIMIT).await });
    }

    /// Makes the sentinel process of a dead nursery kill the nursery's leftover processes.
    pub(super) fn add_sentinel(&mut self, sentinel: Nursery) {
        self.add(sentinel.end_what_it_guards(CLOSE_LIMIT));
    }

    /// Waits until all background tasks have finished.
    pub(super) async fn finish(&mut self) {
        while self.0.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use elasticrs_nursery::launch::{Interrupt, NurseryImage, launch};
    use elasticrs_testkit::{open_fds, wait_until};
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use tokio::sync::oneshot;
    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test]
    async fn a_nursery_that_cannot_be_taken_over_is_killed_and_reaped() {
        let args = [c"sh", c"-c", c"cat <&3 >/dev/null"].map(Into::into).to_vec();
        let images = [NurseryImage::Program { path: c"/bin/sh".into(), args }];
        let launched = || launch(&images, None, &Interrupt::default()).unwrap();
        let (mut nursery, sentinel) = (launched(), launched());
        nursery.sentinel = Some(Box::new(sentinel));
        // Use up all file descriptors, so that the page shared by nursery and sentinel cannot be created.
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let lowest = open_fds().into_iter().max().unwrap() + 1;
        setrlimit(Resource::RLIMIT_NOFILE, libc::rlim_t::try_from(lowest).unwrap(), hard).unwrap();
        let parent = std::sync::mpsc::sync_channel(0).0;
        let fillers: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        let refused = Nursery::of(nursery, &parent);
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        drop(fillers);
        assert!(matches!(refused, Err(LaunchError::Prepare(_))));
        wait_until("the end of both", || !process::has_children());
    }

    #[tokio::test]
    async fn finish_waits_for_all_background_work() {
        let work = async {
            let (mut retired, (done, has_finished)) = (Retired::default(), oneshot::channel());
            retired.add(std::future::ready(()));
            retired.add(async move {
                tokio::task::yield_now().await;
                done.send(()).expect("the receiver is kept");
            });
            retired.finish().await;
            has_finished.await.expect("the work has finished");
        };
        LocalSet::new().run_until(work).await;
    }
}
