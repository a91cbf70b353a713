//! The handle that the agent holds.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use elasticrs_runtime::runtime::{self, Spawn, Task};
use elasticrs_runtime::{lock, threads};
use tokio::sync::mpsc::{UnboundedSender, WeakUnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::command::{Adopted, Command, Config, Guarded, Reply, Shared, SupervisorError};
use super::counters::Counters;
use super::event::Heartbeat;
use super::evidence::EvidenceFiles;
use super::queue::{Next, Queue};
use super::task;
use super::task::exits::open_notices;
use crate::logs::{Console, LogStream, Logs, NotDrained};
use crate::nursery::connections::{LastWord, Release};
use crate::nursery::fence::Fence;
use crate::signal::Signal;
use crate::spec::{GroupSpec, ProcessSpec, StopPolicy};
use crate::sys::pidfd;
use crate::timer::hang::{Elsewhere, Limits};

/// For tasks on the runtime thread that hold a lease: the connection, and the deadline. Keeps nothing alive.
#[derive(Clone)]
pub struct Keeper {
    commands: WeakUnboundedSender<Command>,
    fence: Arc<Fence>,
}

impl Keeper {
    /// Same as [`Supervisor::guard_connection`]. This method and all other methods do nothing if the supervisor has
    /// ended.
    pub fn hold(&self, connection: OwnedFd) {
        self.send(Guarded::Hold(connection));
    }

    /// Gives the nursery a link with another agent. The nursery sends `word` on it when no process of this agent is
    /// left. The first link of a session (`is_first`) replaces the links of the previous session.
    pub fn hold_link(&self, link: OwnedFd, word: LastWord, is_first: bool) {
        self.send(Guarded::Link { link, word, is_first });
    }

    /// Gives the nursery a second connection to hold, because the session is about to move to it. Returns once the
    /// request is in the kernel's socket buffer, because the nursery then receives the connection even if this process
    /// is killed. Returns immediately if there is no nursery. Returns false if the connection is not held, because no
    /// descriptor was left to duplicate it.
    pub async fn hold_beside(&self, connection: OwnedFd) -> bool {
        let (held, is_held) = oneshot::channel();
        self.send(Guarded::Beside(connection, held));
        // An error means that there is no nursery, or that the nursery is exiting together with its workers. The next
        // nursery then gets the connection.
        is_held.await.unwrap_or(true)
    }

    /// Makes the nursery close some or all of the connections that it holds.
    pub fn release(&self, which: Release) {
        self.send(Guarded::Release(which));
    }

    fn send(&self, guarded: Guarded) {
        if let Some(commands) = self.commands.upgrade() {
            // Sending fails only if the runtime has ended. The nursery has then ended, too.
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
/// All methods return at once, except [`Self::next`], [`Self::drain`] and [`Self::close`]. In a child made by `fork` they
/// fail with [`SupervisorError::Forked`], and those that need the runtime with [`SupervisorError::Ended`] once it is gone.
pub struct Supervisor {
    commands: UnboundedSender<Command>,
    shared: Shared,
    thread: Mutex<Option<JoinHandle<()>>>,
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
            // A panic drops the task, and with it the link: the nursery then kills all workers.
            let tell = move |message| panicked.push(super::Event::Panicked { message });
            runtime::start(builder, move || task::run(config, inbox, shared, ready), tell)?
        };
        match started.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(SupervisorError::Ended),
        }
        let (thread, owner) = (Mutex::new(Some(thread)), std::process::id());
        Ok(Self { commands, shared, thread, owner })
    }

    /// The pid of the nursery, while there is one.
    pub fn nursery_pid(&self) -> Option<i32> {
        Some(self.shared.nursery_pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
    }

    /// Begins to start a group. [`super::Event::GroupStarted`] or [`super::Event::StartFailed`] follows.
    pub fn start(&self, group: GroupSpec) -> Result<(), SupervisorError> {
        self.ask(|reply| Command::Start(Box::new(group), reply))?
    }

    /// Begins to start a process in the place of a worker that has failed and was swept, in a running group that
    /// [replaces](GroupSpec::replaces). [`super::Event::WorkerReplaced`] or [`super::Event::ReplaceFailed`] follows, or the end
    /// of the group. `descriptors`: what [`ProcessSpec::pass_fds`] point into.
    pub fn replace(&self, process: ProcessSpec, descriptors: Vec<OwnedFd>) -> Result<(), SupervisorError> {
        self.ask(|reply| Command::Replace(Box::new(process), descriptors, reply))?
    }

    /// Makes a process that this process started a member of the running group.
    ///
    /// `status` is for a process whose parent is another one: a pipe into which that one writes, in four bytes, the
    /// status that `wait4` gave for it. `page` is for one that waits to begin and has a page for its heartbeats
    /// ([`crate::timer::pages::HeartbeatPage::share`]): it is watched like those that are started here. Such processes
    /// are adopted in the order of their ranks.
    pub fn adopt(
        &self,
        local_rank: u32,
        pid: i32,
        status: Option<OwnedFd>,
        page: Option<OwnedFd>,
    ) -> Result<(), SupervisorError> {
        let pidfd = pidfd::open(pid).map_err(|errno| SupervisorError::Adopt { pid, source: errno.into() })?;
        let adopted = Adopted { local_rank, pid, pidfd, status, page };
        self.ask(|reply| Command::Adopt(adopted, reply))?
    }

    /// Stops the group; a harder call overrides. [`super::Event::GroupEnded`] follows.
    pub fn stop(&self, policy: StopPolicy) -> Result<(), SupervisorError> {
        self.tell(Command::Stop(policy, None))
    }

    /// The same, because a worker of another node hangs. Where heartbeats are watched the evidence of all workers is taken
    /// first, and [`super::Event::WorkerHung`] names the one that may have kept it waiting.
    pub fn stop_for_hang(&self, policy: StopPolicy, elsewhere: Elsewhere) -> Result<(), SupervisorError> {
        self.tell(Command::Stop(policy, Some(elsewhere)))
    }

    /// Sends a signal to these workers, or to all of them if `local_ranks` is `None`. [`GroupSpec::stop_scope`] says
    /// which processes of each worker get it.
    pub fn signal(&self, signal: Signal, local_ranks: Option<Vec<u32>>) -> Result<(), SupervisorError> {
        self.tell(Command::Signal(signal, local_ranks))
    }

    /// Forwards a signal that this process received to these workers. [`GroupSpec::stop_scope`] says which processes of
    /// each worker get it. A worker that dies from the signal counts as failed. Nothing is sent while workers are being
    /// started.
    pub fn forward(&self, signal: Signal, local_ranks: Vec<u32>) -> Result<(), SupervisorError> {
        self.tell(Command::Forward(signal, local_ranks))
    }

    /// Suspends all groups with SIGSTOP and pauses their deadlines. Returns once the signals are sent.
    pub fn suspend(&self) -> Result<(), SupervisorError> {
        self.ask(Command::Suspend)
    }

    /// Starts to import the modules again, in a second warm nursery at the lowest priority, because files of modules
    /// that the current nursery has imported have changed. Replaces an earlier second nursery. The current nursery and
    /// its workers continue. [`super::Event::Warmed`] reports the end of the import, which may take `limit`.
    ///
    /// # Errors
    /// [`SupervisorError::Ended`], [`SupervisorError::Forked`].
    pub fn import_beside(&self, limit: Duration) -> Result<(), SupervisorError> {
        self.tell(Command::ImportBeside(limit))
    }

    /// Lets the second nursery start the next groups, and ends the first one. Returns false, and changes nothing, if no
    /// second nursery has finished its imports or if a group exists.
    ///
    /// # Errors
    /// [`SupervisorError::Ended`], [`SupervisorError::Forked`].
    pub fn take_over(&self) -> Result<bool, SupervisorError> {
        self.ask(Command::TakeOver)
    }

    /// Undoes [`Self::suspend`].
    pub fn resume(&self) -> Result<(), SupervisorError> {
        self.tell(Command::Resume)
    }

    /// Copies what is written to these files to the console, until their group has ended and all is copied. Opens the
    /// files, so it may block on a dead network file system.
    pub fn follow(&self, streams: Vec<LogStream>) -> Result<(), SupervisorError> {
        self.check_owner()?;
        self.shared.logs.follow(streams)?;
        Ok(())
    }

    /// Blocks until the files of ended groups are on the console, at most for `timeout`; returns those that are not.
    pub fn drain(&self, timeout: Duration) -> Result<Vec<NotDrained>, SupervisorError> {
        self.ask(|reply| Command::Drain(timeout, reply))
    }

    /// Runs a future of somebody else on the runtime thread, in its `LocalSet`.
    ///
    /// It goes on until it has ended or the supervisor is closed, which drops it after the nursery has ended: what it
    /// holds open outlives the workers. Its panic is told as [`super::Event::Degraded`], and hurts nobody else. It must
    /// not block: the stop of a group waits for it.
    pub fn spawn(&self, task: Task) -> Result<(), SupervisorError> {
        self.tell(Command::Spawn(task))
    }

    /// Reads expiration timers of workers from a FIFO from now on, until [`Self::close`] removes it: at `path`, or in a
    /// directory of its own. Returns where it is; see [`crate::timer`]. [`super::Event::TimerExpired`] tells what is due,
    /// [`super::Event::Degraded`] what was refused.
    pub fn watch_timers(&self, path: Option<PathBuf>) -> Result<PathBuf, SupervisorError> {
        self.ask(|reply| Command::WatchTimers(path, reply))?
    }

    /// Gives the workers of the groups that follow a page for their heartbeats (`ELASTICRS_HEARTBEAT`), and watches them;
    /// see [`crate::timer::hang`]. [`super::Event::WorkerHung`] tells who hangs.
    pub fn watch_hangs(&self, limits: Limits) -> Result<(), SupervisorError> {
        self.tell(Command::WatchHangs(limits))
    }

    /// Where the evidence of the workers goes, by local rank, when one of them hangs or a timer expires: for the group that
    /// is started next, and those after it. `py_spy` looks into workers that do not answer.
    pub fn keep_evidence(&self, files: Vec<EvidenceFiles>, py_spy: Option<PathBuf>) -> Result<(), SupervisorError> {
        self.tell(Command::KeepEvidence(files, py_spy))
    }

    /// Watches for workers of the group that is started next which record an uncaught exception and do not end within
    /// `limit`. [`super::Event::WorkerRaised`] tells of both. Returns the name of the abstract socket to which such a
    /// worker sends a datagram.
    pub fn watch_exits(&self, limit: Option<Duration>) -> Result<String, SupervisorError> {
        let (notices, name) = open_notices()?;
        self.tell(Command::WatchExits(notices, limit))?;
        Ok(name)
    }

    /// The last heartbeat of each worker that had any, of the group that runs or ran last.
    pub fn heartbeats(&self) -> Result<Vec<Heartbeat>, SupervisorError> {
        self.check_owner()?;
        Ok(self.shared.counters.heartbeats.all())
    }

    /// Gives the nursery this duplicate of the agent's connection to a store, in place of an earlier one.
    ///
    /// The nursery closes it when it ends, and outlives a dead agent until nothing of the workers is left: the connection
    /// ends then, not before. A nursery that replaces a lost one gets it as well. What goes wrong later is told as
    /// [`super::Event::Degraded`].
    pub fn guard_connection(&self, connection: OwnedFd) -> Result<(), SupervisorError> {
        self.tell(Command::Guard(Guarded::Hold(connection)))
    }

    /// Undoes [`Self::guard_connection`].
    pub fn release_connection(&self) -> Result<(), SupervisorError> {
        self.tell(Command::Guard(Guarded::Release(Release::All)))
    }

    /// What a task needs that holds this agent's lease.
    pub fn keeper(&self) -> Keeper {
        Keeper { commands: self.commands.downgrade(), fence: self.fence() }
    }

    /// The deadline of this agent's lease: whoever holds one must have ended all of its work when the lease ends, and may
    /// have been stopped, or be cut off, at that moment. The nursery kills all workers then. All nurseries of one
    /// supervisor share it; one that had passed counts for the group that ran, and none can be started until it is set again.
    pub fn fence(&self) -> Arc<Fence> {
        Arc::clone(&self.shared.fence)
    }

    /// What is counted; goes on being readable after the end.
    pub fn counters(&self) -> Counters {
        self.shared.counters.clone()
    }

    /// Tells the agent what it should say to its user, from tasks given to [`Self::spawn`], as
    /// [`super::Event::Degraded`].
    pub fn teller(&self) -> impl Fn(String) + Send + 'static {
        let queue = Arc::clone(&self.shared.queue);
        move |message| queue.push(super::Event::Degraded { message })
    }

    /// The queue of events.
    pub fn queue(&self) -> Result<&Queue, SupervisorError> {
        self.check_owner()?;
        Ok(&self.shared.queue)
    }

    /// Waits for the next thing; see [`Queue::next`].
    pub fn next(&self, timeout: Option<Duration>) -> Result<Next, SupervisorError> {
        let queue = self.queue()?;
        self.shared.counters.turn.waits();
        let next = queue.next(timeout);
        self.shared.counters.turn.works();
        Ok(next?)
    }

    /// Kills what is left (unless `keep_descendants`), ends the nursery and the runtime thread. Idempotent.
    pub fn close(&self, keep_descendants: bool) -> Result<(), SupervisorError> {
        self.check_owner()?;
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // A runtime that has ended by itself has nothing left to close.
            let _ = self.commands.send(Command::Close { keep_descendants });
            // Its panics were told as an event.
            let _ = thread.join();
            self.shared.logs.close();
        }
        Ok(())
    }

    fn check_owner(&self) -> Result<(), SupervisorError> {
        if std::process::id() == self.owner { Ok(()) } else { Err(SupervisorError::Forked { owner: self.owner }) }
    }

    fn tell(&self, command: Command) -> Result<(), SupervisorError> {
        self.check_owner()?;
        self.commands.send(command).map_err(|_| SupervisorError::Ended)
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, SupervisorError> {
        self.check_owner()?;
        threads::ask(&self.commands, command).ok_or(SupervisorError::Ended)
    }
}

/// For what must not wait for a store: the client that holds a lease, and the look for the first client.
impl Spawn for Supervisor {
    fn spawn(&self, task: Task) -> bool {
        Self::spawn(self, task).is_ok()
    }
}

impl Drop for Supervisor {
    /// As `close(false)`: a supervisor that is forgotten leaves nothing behind. In a forked child it does nothing.
    fn drop(&mut self) {
        if self.close(false).is_err() {
            // Leak the logs, because dropping them would wait for a thread that only exists in the parent process.
            std::mem::forget(Arc::clone(&self.shared.logs));
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::wait;

    use super::*;
    use crate::nursery::launch::NurseryImage;
    use crate::supervisor::Event;

    #[test]
    fn a_panic_of_the_runtime_is_an_error_and_not_a_hang() {
        // A nursery that does nothing and exits when its link is closed.
        let args = ["sh", "-c", "cat <&3 >/dev/null"].map(Into::into).to_vec();
        let nursery = vec![NurseryImage::Program { path: "/bin/sh".into(), args }];
        let supervisor = Supervisor::new(Config { nursery, owns_process: true }).unwrap();
        supervisor.tell(Command::Panic).unwrap();
        let hang = Some(Duration::from_secs(60));
        let Next::Event(Event::Panicked { message }) = supervisor.next(hang).unwrap() else {
            panic!("the panic is not reported")
        };
        assert_eq!(message, "out of luck");
        let kill = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };
        assert!(matches!(supervisor.stop(kill), Err(SupervisorError::Ended)));
        supervisor.close(false).unwrap();
        wait().unwrap();
        assert_eq!(wait(), Err(nix::errno::Errno::ECHILD), "a process was left behind");
    }
}
