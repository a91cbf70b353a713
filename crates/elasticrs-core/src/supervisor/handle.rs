//! The supervisor's handle, through which the agent controls the runtime thread.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use elasticrs_nursery::connections::{LastWord, Release};
use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_runtime::readings::Heartbeat;
use elasticrs_runtime::runtime::{self, Spawn, Task};
use elasticrs_runtime::{lock, threads};
use elasticrs_sys::process;
use elasticrs_sys::signal::Signal;
use nix::errno::Errno;
use tokio::sync::mpsc::{UnboundedSender, WeakUnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::command::{Adopted, Command, Config, Guarded, Reply, Shared, SupervisorError};
use super::counters::Counters;
use super::evidence::EvidenceFiles;
use super::queue::{Next, Queue};
use super::task;
use super::task::raised_workers::open_notices;
use crate::logs::{Console, LogStream, Logs};
use crate::spec::{GroupSpec, StopPolicy};
use crate::timer::fifo::Fifo;
use crate::timer::hang::{Limits, RemoteHang};

/// Handle to the supervisor for the task that holds the agent's lease. The task runs on the runtime thread. It uses the
/// handle to control the connections that the nursery holds, and to set the fence deadline. All methods except
/// [`Self::fence`] do nothing if the supervisor has ended. The handle does not keep the supervisor alive.
#[derive(Clone)]
pub struct Keeper {
    commands: WeakUnboundedSender<Command>,
    fence: Arc<Fence>,
}

impl Keeper {
    /// Gives the nursery a duplicate of `connection`, like [`Supervisor::guard_connection`]. If no descriptor is free
    /// for the duplicate, an [`super::Event::Degraded`] reports that the nursery does not hold the connection.
    pub fn hold(&self, connection: BorrowedFd<'_>) {
        self.send_duplicate(connection, false, Guarded::Hold);
    }

    /// Gives the nursery a duplicate of a connection to another agent. The nursery sends `word` on the connection after
    /// all processes of this agent have exited.
    ///
    /// If `is_first` is true, the nursery first closes all connections that it holds, because they belong to the
    /// previous session.
    pub fn hold_link(&self, link: BorrowedFd<'_>, word: LastWord, is_first: bool) {
        self.send_duplicate(link, true, |link| Guarded::Link { link, word, is_first });
    }

    /// Gives the nursery a duplicate of a second connection, because the session is about to move to that connection.
    /// The future completes once the request is in the kernel's socket buffer, from where the nursery receives it even
    /// if this process is killed. If there is no nursery, the future completes immediately. The result of the future is
    /// false if no descriptor was free for the duplicate. In that case, the nursery does not hold the connection.
    pub fn hold_beside(&self, connection: BorrowedFd<'_>) -> impl Future<Output = bool> + use<> {
        let (held, is_held) = oneshot::channel();
        let is_sent = self.send_duplicate(connection, false, |connection| Guarded::Beside(connection, held));
        // The channel is closed without a result if there is no nursery, or if the nursery is exiting. This counts as
        // success, because the supervisor passes the connection to the nursery that it launches next.
        async move { is_sent && is_held.await.unwrap_or(true) }
    }

    /// Makes the nursery close some or all of the connections that it holds.
    pub fn release(&self, which: Release) {
        self.send(Guarded::Release(which));
    }

    /// Sends a request with a duplicate of `socket`. If no descriptor is free for the duplicate, returns false, and the
    /// supervisor reports that the nursery does not hold the socket.
    fn send_duplicate(&self, socket: BorrowedFd<'_>, is_link: bool, request: impl FnOnce(OwnedFd) -> Guarded) -> bool {
        let duplicate = socket.try_clone_to_owned();
        let is_duplicated = duplicate.is_ok();
        self.send(match duplicate {
            Ok(duplicate) => request(duplicate),
            Err(error) => Guarded::NotDuplicated { errno: error.raw_os_error().unwrap_or(libc::EMFILE), is_link },
        });
        is_duplicated
    }

    fn send(&self, guarded: Guarded) {
        if let Some(commands) = self.commands.upgrade() {
            // Ignore an error, because sending fails only if the runtime and the nursery have already exited.
            let _ = commands.send(Command::Guard(guarded));
        }
    }

    /// Same as [`Fence::set`].
    pub fn fence(&self, boot_ns: Option<u64>) -> bool {
        self.fence.set(boot_ns)
    }
}

/// Starts, watches and stops the workers of one agent, one group at a time.
///
/// All methods return immediately, except [`Self::next`], [`Self::drain`] and [`Self::close`]. [`Self::watch_timers`]
/// and [`Self::follow`] block if a file system hangs. In a child made by `fork`, methods that return a `Result` fail
/// with [`SupervisorError::Forked`]. Methods that need the runtime fail with [`SupervisorError::Closed`] once the
/// runtime has ended.
pub struct Supervisor {
    commands: UnboundedSender<Command>,
    shared: Shared,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// FIFO for timer records. The runtime thread only has a descriptor of the FIFO. It neither creates nor removes the
    /// FIFO, because both operations can block.
    timers: Mutex<Option<Fifo>>,
    owner: u32,
}

impl Supervisor {
    /// Starts the runtime thread and the nursery.
    pub fn new(config: Config) -> Result<Self, SupervisorError> {
        let queue = Arc::new(Queue::new()?);
        let (noticed, panicked) = (Arc::clone(&queue), Arc::clone(&queue));
        let logs = Arc::new(Logs::new(Console::inherited(), move |notice| noticed.push(notice.into()))?);
        let counters = Counters { logs: logs.totals(), ..Counters::default() };
        let shared = Shared { queue, logs, nursery_pid: Arc::default(), fence: Arc::new(Fence::new()?), counters };
        let (commands, inbox) = unbounded_channel();
        let (ready, started) = sync_channel(1);
        let thread = {
            let shared = shared.clone();
            let builder = Builder::new().name("elasticrs".into()).stack_size(512 * 1024);
            // A panic drops the task, which closes the link to the nursery. The nursery then kills all workers.
            let report = move |message| panicked.push(super::Event::Panicked { message });
            runtime::start(builder, move || task::run(config, inbox, shared, ready), report)?
        };
        match started.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(SupervisorError::Closed),
        }
        let (thread, owner) = (Mutex::new(Some(thread)), std::process::id());
        Ok(Self { commands, shared, thread, timers: Mutex::default(), owner })
    }

    /// Returns the pid of the nursery. `None` if there is no nursery.
    pub fn nursery_pid(&self) -> Option<i32> {
        Some(self.shared.nursery_pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
    }

    /// Requests the start of a group. [`super::Event::GroupStarted`] or [`super::Event::StartFailed`] follows.
    pub fn start(&self, group: GroupSpec) -> Result<(), SupervisorError> {
        self.ask(|reply| Command::Start(Box::new(group), reply))?
    }

    /// Requests the start of a replacement for a failed worker, after the worker's leftover processes were cleaned up.
    /// The group must be running and must [replace](crate::spec::GroupPolicy::replaces) failed workers. The next event
    /// about this worker is [`super::Event::WorkerReplaced`] or [`super::Event::ReplaceFailed`], unless the group ends
    /// first. The entries of [`ProcessSpec::pass_fds`] are indices into `descriptors`.
    pub fn replace(&self, process: ProcessSpec, descriptors: Vec<OwnedFd>) -> Result<(), SupervisorError> {
        self.ask(|reply| Command::Replace(Box::new(process), descriptors, reply))?
    }

    /// Adds a process that Python started to the running group.
    ///
    /// `status` is needed only if the calling process is not the parent of the added process. In that case, it is a
    /// pipe to which the parent writes the four-byte status from `wait4`. `page` is the process's heartbeat page
    /// ([`crate::timer::pages::HeartbeatPage::share`]). With a page, the heartbeats of the process are watched like
    /// those of other workers. Processes with a page must be adopted before they start to work, in the order of their
    /// local ranks.
    pub fn adopt(
        &self,
        local_rank: u32,
        pid: i32,
        status: Option<OwnedFd>,
        page: Option<OwnedFd>,
    ) -> Result<(), SupervisorError> {
        let pidfd = process::open_pidfd(pid).map_err(|errno| SupervisorError::Adopt { pid, source: errno.into() })?;
        let adopted = Adopted { local_rank, pid, pidfd, status, page };
        self.ask(|reply| Command::Adopt(adopted, reply))?
    }

    /// Stops the group. A later call can shorten the grace period or send a stronger signal.
    /// [`super::Event::GroupEnded`] follows.
    pub fn stop(&self, policy: StopPolicy) -> Result<(), SupervisorError> {
        self.send(Command::Stop(policy, None))
    }

    /// Stops the group because a worker on another node hangs. If hang detection is enabled, first gathers diagnostics
    /// about the local workers.
    ///
    /// If a local worker may have caused the hang, reports [`super::Event::WorkerHung`].
    pub fn stop_for_hang(&self, policy: StopPolicy, remote: RemoteHang) -> Result<(), SupervisorError> {
        self.send(Command::Stop(policy, Some(remote)))
    }

    /// Sends a signal to the workers with these local ranks, or to all workers if `local_ranks` is `None`.
    /// [`stop_scope`](crate::spec::GroupPolicy::stop_scope) determines which processes of a worker get the signal.
    pub fn signal(&self, signal: Signal, local_ranks: Option<Vec<u32>>) -> Result<(), SupervisorError> {
        self.send(Command::Signal(signal, local_ranks))
    }

    /// Forwards a signal that this process has received to the workers with these local ranks.
    /// [`stop_scope`](crate::spec::GroupPolicy::stop_scope) determines which processes of a worker get the signal. A
    /// worker that dies from the signal is considered failed. Does nothing while workers are being started.
    pub fn forward(&self, signal: Signal, local_ranks: Vec<u32>) -> Result<(), SupervisorError> {
        self.send(Command::Forward(signal, local_ranks))
    }

    /// Suspends the group with SIGSTOP and pauses its deadlines. Returns once the signals are sent.
    pub fn suspend(&self) -> Result<(), SupervisorError> {
        self.ask(Command::Suspend)
    }

    /// Stops the nursery. The next start launches a new nursery, which imports the modules again. Call this method
    /// after files of imported modules have changed.
    ///
    /// Returns false, and keeps the nursery, if a group exists or if the deadline for killing all workers has passed.
    ///
    /// # Errors
    ///
    /// [`SupervisorError::Closed`], [`SupervisorError::Forked`].
    pub fn renew_nursery(&self) -> Result<bool, SupervisorError> {
        self.ask(Command::RenewNursery)
    }

    /// Resumes a group that was suspended with [`Self::suspend`].
    pub fn resume(&self) -> Result<(), SupervisorError> {
        self.send(Command::Resume)
    }

    /// Copies these log files to the console as they are written. Copying stops once the group has finished and all
    /// output is copied. Opens the files, so it may block on a dead network file system.
    pub fn follow(&self, streams: Vec<LogStream>) -> Result<(), SupervisorError> {
        self.check_owner()?;
        self.shared.logs.follow(streams)?;
        Ok(())
    }

    /// Blocks until the log files of finished groups are fully copied to the console, or until `timeout` elapses.
    /// Returns the files that are not fully copied.
    pub fn drain(&self, timeout: Duration) -> Result<Vec<LogStream>, SupervisorError> {
        self.check_open()?;
        Ok(self.shared.logs.drain(timeout))
    }

    /// Runs a future of another component on the runtime thread, in its `LocalSet`.
    ///
    /// The future runs until it completes or the supervisor is closed. Closing the supervisor drops the future only
    /// after the nursery has exited, so the descriptors that the future holds stay open until all workers are gone. A
    /// panic of the future is reported as [`super::Event::Degraded`] and does not affect other tasks. The future must
    /// not block, because it would delay the stop of a group.
    pub fn spawn(&self, task: Task) -> Result<(), SupervisorError> {
        self.send(Command::Spawn(task))
    }

    /// Creates the FIFO for timer records and starts to read it. Returns its path, which is `path`, or a path in a new
    /// directory if `path` is `None`. [`Self::close`] removes the FIFO. [`super::Event::TimerExpired`] reports expired
    /// timers, and [`super::Event::Degraded`] reports rejected records. See [`crate::timer`].
    ///
    /// Creates the FIFO on the calling thread, which may block on a file system. The runtime thread only gets a
    /// descriptor.
    #[allow(clippy::disallowed_methods, reason = "runs on the caller's thread")]
    pub fn watch_timers(&self, path: Option<&Path>) -> Result<PathBuf, SupervisorError> {
        self.check_open()?;
        let mut timers = lock(&self.timers);
        let failed = |source| SupervisorError::Timers { path: path.map(Path::to_owned).unwrap_or_default(), source };
        if timers.is_some() {
            return Err(failed(Errno::EALREADY.into()));
        }
        let fifo = Fifo::create(path).map_err(failed)?;
        let input = fifo.descriptor().map_err(failed)?;
        self.ask(|reply| Command::WatchTimers(input, reply))?.map_err(failed)?;
        Ok(timers.insert(fifo).path().to_owned())
    }

    /// Enables hang detection for all later groups. See [`crate::timer::hang`].
    ///
    /// A worker sends heartbeats through the shared memory page that its environment variable `ELASTICRS_HEARTBEAT`
    /// identifies. [`super::Event::WorkerHung`] reports a worker that hangs.
    pub fn watch_hangs(&self, limits: Limits) -> Result<(), SupervisorError> {
        self.send(Command::WatchHangs(limits))
    }

    /// Sets the files to which diagnostics about the workers of later groups are written. `files` is ordered by local
    /// rank.
    ///
    /// Diagnostics are written if a worker hangs, does not release an expiration timer in time, or stalls during its
    /// exit.
    ///
    /// `py_spy` is the path of `py-spy`, which inspects workers that do not write their own stack traces.
    pub fn keep_evidence(&self, files: Vec<EvidenceFiles>, py_spy: Option<PathBuf>) -> Result<(), SupervisorError> {
        self.send(Command::KeepEvidence(files, py_spy))
    }

    /// Watches the workers of the next group for uncaught exceptions. [`super::Event::WorkerRaised`] reports an
    /// exception, and is sent again if the worker does not exit within `limit`.
    ///
    /// Returns the name of an abstract Unix socket. Workers send a datagram to the socket when they record an
    /// exception.
    pub fn watch_exits(&self, limit: Option<Duration>) -> Result<String, SupervisorError> {
        let (notices, name) = open_notices()?;
        self.send(Command::WatchExits(notices, limit))?;
        Ok(name)
    }

    /// Returns the last heartbeat of each worker that has sent one. If no group is running, these are heartbeats of the
    /// last group.
    pub fn heartbeats(&self) -> Result<Vec<Heartbeat>, SupervisorError> {
        self.check_owner()?;
        Ok(self.shared.counters.heartbeats.all())
    }

    /// Gives the nursery a duplicate of the agent's connection to a store. Replaces an earlier connection.
    ///
    /// The nursery keeps the connection open as long as it runs. If the agent dies, the nursery runs until all
    /// processes of the workers are gone. Only then does the store see the connection close. If the nursery is lost,
    /// its replacement gets the connection, too. Later problems are reported as [`super::Event::Degraded`].
    pub fn guard_connection(&self, connection: OwnedFd) -> Result<(), SupervisorError> {
        self.send(Command::Guard(Guarded::Hold(connection)))
    }

    /// Makes the nursery send its final message on each link to another agent, and close all connections that it holds.
    pub fn release_connection(&self) -> Result<(), SupervisorError> {
        self.send(Command::Guard(Guarded::Release(Release::All)))
    }

    /// Returns a handle for the task that holds this agent's lease.
    pub fn keeper(&self) -> Keeper {
        Keeper { commands: self.commands.downgrade(), fence: self.fence() }
    }

    /// Returns the fence, which is the deadline of this agent's lease. All workers must be gone when the lease expires,
    /// but the agent may be paused or disconnected by then. The nursery therefore kills all workers at the deadline.
    /// All nurseries of a supervisor share the fence. Once the deadline has passed, no group can be started until a new
    /// deadline is set.
    pub fn fence(&self) -> Arc<Fence> {
        Arc::clone(&self.shared.fence)
    }

    /// Returns the counters. They can still be read after the supervisor has been closed.
    pub fn counters(&self) -> Counters {
        self.shared.counters.clone()
    }

    /// Returns a function that reports a message to the user as [`super::Event::Degraded`]. Tasks that are passed to
    /// [`Self::spawn`] use it.
    pub fn teller(&self) -> impl Fn(String) + Send + 'static {
        let queue = Arc::clone(&self.shared.queue);
        move |message| queue.push(super::Event::Degraded { message })
    }

    /// Returns the queue of events.
    pub fn queue(&self) -> Result<&Queue, SupervisorError> {
        self.check_owner()?;
        Ok(&self.shared.queue)
    }

    /// Waits until there is an event, a watched descriptor is readable, or a signal arrives. See [`Queue::next`].
    pub fn next(&self, timeout: Option<Duration>) -> Result<Next, SupervisorError> {
        let queue = self.queue()?;
        self.shared.counters.turn.waits();
        let next = queue.next(timeout);
        self.shared.counters.turn.works();
        Ok(next?)
    }

    /// Kills all remaining workers and their descendants, and stops the nursery and the runtime thread. Later calls do
    /// nothing.
    ///
    /// However, if `keep_descendants` is true and no group exists, processes left by earlier groups keep running.
    pub fn close(&self, keep_descendants: bool) -> Result<(), SupervisorError> {
        self.check_owner()?;
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // Ignore an error, because it only means that the runtime has already stopped.
            let _ = self.commands.send(Command::Close { keep_descendants });
            // Ignore an error, because a panic of the thread was already reported as an event.
            let _ = thread.join();
            // Remove the FIFO here and not on the runtime thread, because removing a file may block.
            drop(lock(&self.timers).take());
            self.shared.logs.close();
        }
        Ok(())
    }

    /// Returns [`SupervisorError::Forked`] in a forked child, because only the process that created the supervisor may
    /// use it.
    pub fn check_owner(&self) -> Result<(), SupervisorError> {
        if std::process::id() == self.owner { Ok(()) } else { Err(SupervisorError::Forked { owner: self.owner }) }
    }

    fn check_open(&self) -> Result<(), SupervisorError> {
        self.check_owner()?;
        if self.commands.is_closed() { Err(SupervisorError::Closed) } else { Ok(()) }
    }

    fn send(&self, command: Command) -> Result<(), SupervisorError> {
        self.check_owner()?;
        self.commands.send(command).map_err(|_| SupervisorError::Closed)
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, SupervisorError> {
        self.check_owner()?;
        threads::ask(&self.commands, command).ok_or(SupervisorError::Closed)
    }
}

/// Runs tasks on the runtime thread, so that a busy store cannot delay them. Examples are the client that holds
/// the lease, and the task that waits for the first client of the workers' store.
impl Spawn for Supervisor {
    fn spawn(&self, task: Task) -> bool {
        Self::spawn(self, task).is_ok()
    }
}

impl Drop for Supervisor {
    /// Same as `close(false)`, so that no processes are left behind. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.close(false).is_err() {
            // Leak the logs. Dropping them would wait for the logs thread, which exists only in the parent process.
            std::mem::forget(Arc::clone(&self.shared.logs));
            // Leak the FIFO. Dropping it would remove the file, which the parent process still uses.
            let timers = self.timers.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(timers.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use elasticrs_nursery::launch::NurseryImage;
    use nix::sys::wait::wait;

    use super::*;
    use crate::supervisor::Event;

    /// Starts a supervisor whose nursery does nothing but exit when its link is closed.
    fn idle_supervisor() -> Supervisor {
        let args = [c"sh", c"-c", c"cat <&3 >/dev/null"].map(Into::into).to_vec();
        let nursery = vec![NurseryImage::Program { path: c"/bin/sh".into(), args }];
        Supervisor::new(Config { nursery, owns_process: true }).unwrap()
    }

    #[test]
    fn a_runtime_panic_is_reported_and_closes_the_supervisor() {
        let supervisor = idle_supervisor();
        supervisor.send(Command::Panic).unwrap();
        let hang = Some(Duration::from_secs(60));
        let Next::Event(Event::Panicked { message }) = supervisor.next(hang).unwrap() else {
            panic!("the panic is not reported")
        };
        assert_eq!(message, "out of luck");
        let kill = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };
        assert!(matches!(supervisor.stop(kill), Err(SupervisorError::Closed)));
        supervisor.close(false).unwrap();
        wait().unwrap();
        assert_eq!(wait(), Err(nix::errno::Errno::ECHILD), "a process was left behind");
    }

    #[test]
    fn a_forked_child_does_not_remove_the_timer_fifo_of_its_parent() {
        let mut supervisor = idle_supervisor();
        let directory = tempfile::tempdir().unwrap();
        let path = supervisor.watch_timers(Some(&directory.path().join("fifo"))).unwrap();
        // Imitate a forked child, which is recognized by a pid that differs from `owner`.
        supervisor.owner += 1;
        drop(supervisor);
        assert!(path.exists());
        // Dropping the last handle stops the runtime thread, so the nursery exits. Reap the nursery here unless the
        // runtime thread has already reaped it.
        while wait().is_ok() {}
    }
}
