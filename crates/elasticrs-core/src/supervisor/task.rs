//! Event loop of the supervisor on the runtime thread. The loop passes events to the group's state machine, and carries
//! out the effects that the state machine returns. All other state is in the submodules.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_nursery::launch::LaunchError;
use elasticrs_nursery::protocol::{PROTOCOL, Reply as NurseryReply, Savers, SweepLimits};
use elasticrs_runtime::threads::panic_message;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::features::{Features, check_floor};
use elasticrs_sys::procfs;
use elasticrs_sys::signal::Signal;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinSet};

use super::command::{Command, Config, Reply, Shared, SupervisorError};
use super::deadlines::{Deadline, Deadlines, GIVE_UP_AFTER};
use super::event::{Event, StartFailure, SweepOutcome};
use super::state::{Effect, GroupOutcome, Input};
use crate::spec::StopPolicy;
use crate::timer::hang::RemoteHang;

mod check;
mod gathering;
mod guarded_sockets;
mod heartbeats;
mod keepers;
mod launches;
mod nursery;
mod nursery_changes;
pub(super) mod raised_workers;
mod running;
mod starts;
mod sweeps;
mod watchdog;

use check::{HeldReports, Orphans};
use gathering::{Evidence, Gathered};
use guarded_sockets::GuardedSockets;
use heartbeats::Heartbeats;
use keepers::Keepers;
use launches::{Finished, Images, Launches};
use nursery::{CurrentNursery, NurseryEvent, Retired};
use raised_workers::{Notice, RaisedEvent, RaisedWorkers};
use running::{Current, MemberExit, Running};
use sweeps::{Completed, Sweeps};
use watchdog::{Watchdog, WatchdogEvent};

/// Time limit for a nursery to kill its remaining processes and exit when the supervisor is closed.
const CLOSE_LIMIT: Duration = Duration::from_secs(35);
/// Extra time before the supervisor checks the deadline for killing all workers, so that the nursery can notice the
/// deadline first.
const FENCE_SLACK: Duration = Duration::from_millis(100);
/// Extra time that a clean-up of leftover processes may take beyond its time limits. After the extra time, the nursery
/// or thread that performs the clean-up is considered hung.
const SWEEP_SLACK: Duration = Duration::from_secs(5);

/// Creates the supervisor's task and runs it until the supervisor is closed. Sends the result of the creation through
/// `ready`.
pub(super) async fn run(
    config: Config,
    inbox: UnboundedReceiver<Command>,
    shared: Shared,
    ready: Reply<Result<(), SupervisorError>>,
) {
    let mut task = match Task::new(config, shared) {
        Ok(task) => task,
        Err(error) => return drop(ready.send(Err(error))),
    };
    if let Err(error) = task.launch_first().await {
        return drop(ready.send(Err(error.into())));
    }
    // Ignore an error. It means that the creator has stopped waiting, and the task stops because its inbox is closed.
    let _ = ready.send(Ok(()));
    // Run the loop as a separate task. Otherwise, each wake-up of another task on this thread would poll everything
    // that this loop waits for.
    or_panic(tokio::task::spawn_local(task.serve(inbox)).await);
}

struct Task {
    /// True if the supervisor may change settings of the whole process, such as the child subreaper attribute. See
    /// [`Config::owns_process`].
    owns_process: bool,
    features: Features,
    shared: Shared,
    images: Images,
    nursery: CurrentNursery,
    launches: Launches,
    guard: GuardedSockets,
    current: Current,
    deadlines: Deadlines,
    /// Futures of other components. See [`super::Supervisor::spawn`]. This field is declared after the nurseries,
    /// because fields are dropped in order and the futures must be dropped after the nurseries.
    tasks: JoinSet<()>,
    retired: Retired,
    sweeps: Sweeps,
    watchdog: Option<Watchdog>,
    heartbeats: Heartbeats,
    evidence: Evidence,
    raised: RaisedWorkers,
    keepers: Keepers,
    held: HeldReports,
    orphans: Orphans,
}

/// Event that wakes the loop.
enum Wake {
    Nursery(NurseryEvent),
    Launched(Box<Finished>),
    Member(MemberExit),
    Swept(SweepOutcome),
    Task(Result<(), JoinError>),
    Command(Command),
    Deadline,
    Watchdog(WatchdogEvent),
    Gathered(Gathered),
    Raised(RaisedEvent),
    Close { keep_descendants: bool },
}

impl Task {
    fn new(config: Config, shared: Shared) -> Result<Self, SupervisorError> {
        // Check the kernel first, because the error of a missing system call would not explain the cause.
        check_floor().map_err(LaunchError::from)?;
        if config.owns_process {
            nix::sys::prctl::set_child_subreaper(true).map_err(io::Error::from)?;
        }
        let images = Images::new(config.nursery);
        let guard = GuardedSockets::new(Arc::clone(&shared.fence), Arc::clone(&shared.queue));
        if !procfs::is_own() {
            shared.queue.degraded(procfs::MISSING);
        }
        Ok(Self {
            owns_process: config.owns_process,
            features: Features::get(),
            images,
            nursery: CurrentNursery::new(Arc::clone(&shared.nursery_pid)),
            launches: Launches::new(Arc::clone(&shared.queue)),
            guard,
            current: Current::Idle,
            deadlines: Deadlines::default(),
            tasks: JoinSet::new(),
            retired: Retired::default(),
            sweeps: Sweeps::default(),
            watchdog: None,
            heartbeats: Heartbeats::new(Arc::clone(&shared.counters.heartbeats)),
            evidence: Evidence::default(),
            raised: RaisedWorkers::default(),
            keepers: Keepers::default(),
            held: HeldReports::new(Arc::clone(&shared.queue)),
            orphans: Orphans::default(),
            shared,
        })
    }

    // --- the loop ---------------------------------------------------------------------------------------------

    async fn serve(mut self, mut inbox: UnboundedReceiver<Command>) {
        loop {
            match self.wake(&mut inbox).await {
                Wake::Nursery(NurseryEvent::Reply(reply, fds)) => self.on_reply(reply, fds),
                Wake::Nursery(NurseryEvent::Died(exit)) => self.on_nursery_death(exit),
                Wake::Nursery(NurseryEvent::GivenUp) => self.give_up_nursery(),
                Wake::Launched(finished) => self.on_launched(*finished),
                Wake::Member(MemberExit { pid, exit, seen }) => {
                    self.on_notices();
                    self.input(Input::Exited { pid, exit, seen });
                }
                Wake::Swept(swept) => self.on_swept(swept),
                Wake::Task(result) => self.on_task_end(result),
                Wake::Command(command) => {
                    // Report recorded exceptions before the command runs, because the command may stop the group. While
                    // a group is being stopped, exceptions are not reported.
                    self.on_notices();
                    self.on_command(command);
                }
                Wake::Deadline => self.on_deadline(),
                Wake::Watchdog(event) => {
                    self.on_watchdog(&event);
                    // Yield to the runtime, because reading a FIFO that is always readable does not use up the task's
                    // budget. Without the yield, a process that keeps writing to the FIFO would keep this task running,
                    // and sockets and timers would not be polled.
                    tokio::task::yield_now().await;
                }
                Wake::Gathered(Gathered::Evidence(evidence)) => self.input(Input::Evidence(evidence)),
                Wake::Gathered(Gathered::Records) => self.input(Input::Recorded),
                Wake::Raised(event) => {
                    self.on_raised(event);
                    // Yield to the runtime. Otherwise, a sender that never stops could prevent the runtime from polling
                    // sockets and timers.
                    tokio::task::yield_now().await;
                }
                Wake::Close { keep_descendants } => return self.close(keep_descendants).await,
            }
        }
    }

    async fn wake(&mut self, inbox: &mut UnboundedReceiver<Command>) -> Wake {
        let deadline = self.deadlines.next();
        let is_starting = self.current.is_starting();
        let reads_timers = self.watchdog.is_some() && !is_starting;
        tokio::select! {
            biased;
            event = self.nursery.next() => Wake::Nursery(event),
            Some(exit) = self.current.next_exit() => Wake::Member(exit),
            swept = self.sweeps.own_completed() => Wake::Swept(swept),
            finished = self.launches.finished() => Wake::Launched(Box::new(finished)),
            Some(result) = self.tasks.join_next() => Wake::Task(result),
            gathered = self.evidence.gathered() => Wake::Gathered(gathered),
            command = inbox.recv() => match command {
                Some(Command::Close { keep_descendants }) => Wake::Close { keep_descendants },
                Some(command) => Wake::Command(command),
                None => Wake::Close { keep_descendants: false },
            },
            () = async { tokio::time::sleep_until(deadline.expect("guarded below").into()).await }, if deadline.is_some() => {
                Wake::Deadline
            }
            // Give the notices of uncaught exceptions a lower priority than commands and deadlines, because any process
            // may flood the socket with notices.
            event = self.raised.next(), if self.raised.are_watched() && !is_starting => Wake::Raised(event),
            event = async { self.watchdog.as_mut().expect("guarded below").next().await }, if reads_timers => {
                Wake::Watchdog(event)
            }
        }
    }

    fn on_reply(&mut self, reply: NurseryReply, fds: Vec<OwnedFd>) {
        match reply {
            NurseryReply::Ready { protocol: PROTOCOL, .. } => self.on_ready(),
            NurseryReply::Ready { .. } => {
                if let Some(nursery) = self.nursery.get() {
                    nursery_changes::refuse(nursery);
                }
            }
            NurseryReply::Spawned { local_rank, pid } => self.on_spawned(local_rank, pid, fds.into_iter().next()),
            NurseryReply::SpawnFailed { local_rank, stage, errno, subject } => {
                self.on_spawn_failed(StartFailure::Worker { local_rank, stage, errno, subject });
            }
            NurseryReply::Exited { pid, exit, seen } => {
                self.on_notices();
                self.input(Input::Exited { pid, exit, seen });
            }
            NurseryReply::Stopped { pid, signal } => self.input(Input::Paused { pid, signal }),
            NurseryReply::Continued { pid } => self.input(Input::Continued { pid }),
            NurseryReply::Swept { number, outcome } => match self.sweeps.answered(number, outcome) {
                Some(Completed::Group(swept)) => self.on_swept(swept),
                Some(Completed::Worker(local_rank, swept)) => self.on_worker_swept(local_rank, swept),
                None => {}
            },
            NurseryReply::Fenced => {
                self.shared.queue.push(Event::Fenced);
                self.input(Input::Fenced);
            }
            NurseryReply::NotGuarded { errno } => self.guard.report_not_guarded(errno),
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Start(group, reply) => answer(&reply, self.begin_start(*group)),
            Command::Replace(process, descriptors, reply) => answer(&reply, self.replace(*process, descriptors)),
            Command::Adopt(adopted, reply) => answer(&reply, self.adopt(adopted)),
            Command::Stop(policy, remote) => self.stop(policy, remote),
            Command::Signal(signal, local_ranks) => self.input(Input::Signal(signal, local_ranks)),
            // Ignore the signal while workers are being started, because they have no signal handlers and nothing to
            // save yet.
            Command::Forward(signal, local_ranks) if self.current.running().is_some() => {
                self.input(Input::Forward(signal, local_ranks));
            }
            Command::Forward(..) => {}
            Command::Suspend(reply) => {
                self.input(Input::Suspend);
                answer(&reply, ());
            }
            Command::Resume => self.input(Input::Resume),
            Command::RenewNursery(reply) => answer(&reply, self.renew_nursery()),
            Command::Spawn(task) => {
                // Create the future inside the task, so that a panic in `task()` is handled like a panic of the future.
                self.tasks.spawn_local(async move { task().await });
            }
            Command::WatchTimers(fifo, reply) => {
                let watchdog = Watchdog::new(fifo, Arc::clone(&self.shared.counters.timers));
                answer(&reply, watchdog.map(|watchdog| self.watchdog = Some(watchdog)));
            }
            Command::WatchHangs(limits) => self.heartbeats.limits = Some(limits),
            Command::KeepEvidence(files, py_spy) => self.evidence.keep_in(files, py_spy),
            Command::WatchExits(notices, limit) => {
                if let Err(error) = self.raised.watch(notices, limit) {
                    let message =
                        format!("workers that raise an exception and do not exit will not be detected: {error}");
                    self.shared.queue.degraded(message);
                }
            }
            Command::Guard(guarded) => self.guard.change(guarded, self.nursery.get()),
            Command::Close { .. } => unreachable!("taken by `wake`"),
            #[cfg(test)]
            Command::Panic => panic!("out of luck"),
        }
    }

    fn on_task_end(&self, result: Result<(), JoinError>) {
        if let Err(error) = result {
            let panic = error.into_panic();
            self.shared.queue.degraded(format!("a task of the runtime panicked: {}", panic_message(panic.as_ref())));
        }
    }

    fn on_deadline(&mut self) {
        while let Some(timer) = self.deadlines.expired(Instant::now()) {
            match timer {
                Deadline::Start => self.on_hung_start(),
                Deadline::Fence => self.fence_start(),
                Deadline::Warm => self.on_overdue_import(),
                Deadline::SlowImport => {
                    self.nursery.slow_import().into_iter().for_each(|m| self.shared.queue.degraded(m));
                }
                Deadline::Kill if self.current.is_starting() => self.kill_start(),
                Deadline::Sweep => self.on_overdue_sweep(),
                Deadline::Replace(local_rank) => self.on_hung_replace(local_rank),
                Deadline::Exit(local_rank) => self.sample_exit(local_rank),
                Deadline::Check => {
                    self.check();
                    self.input(Input::Expired(timer));
                }
                Deadline::Hang
                | Deadline::Kill
                | Deadline::GiveUp
                | Deadline::Copies
                | Deadline::Paused(_)
                | Deadline::Condemned(_) => {
                    self.input(Input::Expired(timer));
                }
            }
        }
    }

    // --- exceptions, timers and hangs -------------------------------------------------------------------------

    fn on_raised(&mut self, event: RaisedEvent) {
        match event {
            RaisedEvent::Notices => self.on_notices(),
            // Ignore the sample if the process that recorded the exception has exited.
            RaisedEvent::Sampled { local_rank, .. } if self.raised.has_exited(local_rank) => {}
            RaisedEvent::Sampled { local_rank, sample } => {
                let progressed = self.raised.progressed(local_rank, sample);
                self.input(Input::ExitSampled { local_rank, progressed });
            }
        }
    }

    /// Handles received notices of workers. Also called before a worker's exit is recorded, because an unread notice may
    /// contain the worker's exception.
    fn on_notices(&mut self) {
        if self.current.is_starting() {
            // Read no notices yet, because a sender can be identified only if the pids of all workers are known.
            return;
        }
        let Current::Running(running) = &self.current else { return };
        // Handle all notices together, so that no worker is stopped whose exception was reported at the same time.
        let (mut workers, mut inputs) = (Vec::new(), Vec::new());
        for notice in self.raised.take() {
            match notice {
                Notice::Exception(notice) => workers.extend(self.raised.add(notice, running)),
                Notice::Keep(pid, notice) => {
                    let local_rank = self.raised.worker_of(pid, running);
                    inputs.extend(local_rank.and_then(|local_rank| self.keepers.input(local_rank, notice)));
                }
            }
        }
        if !workers.is_empty() {
            let dying = running.dying();
            inputs.push(Input::Raised { workers, dying });
        }
        for input in inputs {
            self.input(input);
        }
    }

    fn sample_exit(&mut self, local_rank: u32) {
        // Check for progress only while the process that recorded the exception is still running.
        if !self.raised.has_exited(local_rank)
            && let Some(worker) = self.current.running().and_then(|running| running.pid_of(local_rank))
        {
            self.raised.sample(local_rank, worker);
        }
    }

    fn on_watchdog(&mut self, event: &WatchdogEvent) {
        let Some(watchdog) = &mut self.watchdog else { return };
        let mut report = |message| self.shared.queue.push(Event::Degraded { message });
        for timer in watchdog.handle(event, self.current.running(), &mut report) {
            self.input(Input::TimerExpired(timer));
        }
    }

    fn watch_for_hangs(&mut self) {
        if let Some(limits) = self.heartbeats.limits {
            self.input(Input::Watch(limits));
        }
    }

    // --- the group's state machine ----------------------------------------------------------------------------

    fn stop(&mut self, policy: StopPolicy, remote: Option<RemoteHang>) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.stop(policy);
                if !self.end_waiting() {
                    let grace = if policy.signal == Signal::KILL { Duration::ZERO } else { policy.grace };
                    self.deadlines.hasten(Deadline::Kill, grace, Instant::now());
                }
            }
            Current::Running(_) => self.input(match remote {
                Some(remote) => Input::StopForHang(policy, remote),
                None => Input::Stop(policy),
            }),
        }
    }

    fn input(&mut self, input: Input) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => starting.early(input),
            Current::Running(running) => {
                if running.group.may_signal(&input) {
                    // Ignore the result, because `Input::Dead` has no effects.
                    let _ = running.group.on_input(Input::Dead(running.dead()));
                }
                if running.group.needs_snapshot(&input) {
                    let snapshot = self.heartbeats.snapshot(running, &self.shared.logs);
                    let _ = running.group.on_input(Input::Snapshot(snapshot));
                }
                for effect in running.group.on_input(input) {
                    self.carry_out(effect);
                }
                for local_rank in self.keepers.take_unreachable() {
                    self.input(Input::Copied { local_rank });
                }
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let now = Instant::now();
        match effect {
            Effect::Signal { pid, to, signal } => {
                if let Some(running) = self.current.running() {
                    running.signal(pid, to, signal, self.features.pidfd_group_signal, self.nursery.get());
                }
            }
            Effect::SignalProcess { pid, signal } => {
                if let Some(watchdog) = &self.watchdog {
                    watchdog.signal(pid, signal);
                }
            }
            Effect::Arm(timer, delay) => self.deadlines.arm(timer, delay, now),
            Effect::Hasten(timer, delay) => self.deadlines.hasten(timer, delay, now),
            Effect::Disarm(timer) => self.deadlines.disarm(timer),
            Effect::Freeze => {
                self.deadlines.freeze(now);
                if let Some(watchdog) = &mut self.watchdog {
                    watchdog.freeze();
                }
            }
            Effect::Thaw => {
                self.deadlines.thaw(now);
                if let Some(watchdog) = &mut self.watchdog {
                    watchdog.thaw();
                }
            }
            Effect::Sweep(limits) => self.sweep(limits),
            Effect::SweepOthers(limits, savers) => self.sweep_others(limits, Some(savers)),
            Effect::SweepWorker { local_rank, pid } => self.sweep_worker(local_rank, pid),
            Effect::TakeEvidence { title, measures_work, spared } => {
                if let Some(running) = self.current.running() {
                    self.evidence.gather(running, &title, measures_work, &spared);
                }
            }
            Effect::TakeRecords => {
                if let Some(running) = self.current.running() {
                    self.evidence.take_records(running);
                }
            }
            Effect::OrderCopies(local_ranks) => self.keepers.order(&local_ranks, self.raised.socket()),
            Effect::ReportCopies { asked, answered } => {
                let (begun, ended) = (self.keepers.ordered(), Stamp::now());
                self.shared.queue.push(Event::StateKept { asked, answered, begun, ended });
            }
            Effect::ReportFailure { local_rank, seen, siblings } => {
                self.shared.queue.push(Event::FailureSeen { local_rank, seen, signalled: Stamp::now(), siblings });
            }
            Effect::Report(event) => self.shared.queue.push(event),
            Effect::ReportEnd(outcome) => self.report_end(outcome),
        }
    }

    fn report_end(&mut self, group: GroupOutcome) {
        let GroupOutcome { outcome, nursery, stuck_workers, swept } = group;
        let stuck_workers =
            stuck_workers.into_iter().map(|(local_rank, pid)| (local_rank, procfs::wait_channel(pid))).collect();
        self.current = Current::Idle;
        self.deadlines.clear();
        self.evidence.cancel(&mut self.retired);
        self.sweeps.drop_worker();
        self.raised = RaisedWorkers::default();
        self.keepers = Keepers::default();
        if let Some(message) = self.watchdog.as_mut().and_then(Watchdog::clear) {
            self.shared.queue.degraded(message);
        }
        self.shared.logs.finish_all();
        let at = Stamp::now();
        self.shared.queue.push(Event::GroupEnded { outcome, nursery, stuck_workers, swept, at });
    }

    // --- clean-up of leftover processes -----------------------------------------------------------------------

    /// Makes the nursery clean up the processes that the workers left behind. If there is no nursery, this process
    /// cleans them up on another thread.
    fn sweep(&mut self, limits: SweepLimits) {
        self.sweep_others(limits, None);
    }

    /// Same as [`Self::sweep`], but the nursery does not kill processes that may be saving.
    fn sweep_others(&mut self, limits: SweepLimits, savers: Option<Savers>) {
        if let Some(nursery) = self.nursery.get() {
            self.sweeps.request(nursery, limits, savers);
        } else {
            let running = self.current.running();
            let spared = running.map(Running::adopted).unwrap_or_default();
            let sessions = running.map(Running::started).unwrap_or_default();
            // If no nursery has been launched yet, there are no leftover processes.
            let Some(token) = self.nursery.token() else { return self.on_swept(SweepOutcome::default()) };
            let owns_process = self.owns_process;
            self.sweeps.start_own(limits.give_up, move |limit| {
                sweeps::sweep_after_loss(token, owns_process, &spared, &sessions, limit)
            });
        }
        let SweepLimits { linger, grace, give_up } = limits;
        let limit = linger.saturating_add(grace).saturating_add(give_up).saturating_add(SWEEP_SLACK);
        self.deadlines.arm(Deadline::Sweep, limit, Instant::now());
    }

    fn sweep_worker(&mut self, local_rank: u32, worker: i32) {
        let Some(nursery) = self.nursery.get() else { return };
        self.sweeps.request_for_worker(nursery, local_rank, worker);
        self.deadlines.arm(Deadline::Sweep, GIVE_UP_AFTER + SWEEP_SLACK, Instant::now());
    }

    /// Handles a clean-up of leftover processes that has exceeded its deadline. If the nursery performs the clean-up,
    /// kills the nursery. Otherwise, reports that the clean-up has failed.
    fn on_overdue_sweep(&mut self) {
        if let Some(nursery) = self.nursery.get() {
            nursery.kill_hung();
        } else if self.sweeps.take_own().is_some() {
            let message = "could not kill the leftover processes of the lost nursery, because reading /proc hangs";
            self.shared.queue.degraded(message);
            self.on_swept(SweepOutcome::default());
        }
    }

    fn on_swept(&mut self, swept: SweepOutcome) {
        self.held.report_all(&swept);
        self.deadlines.disarm(Deadline::Sweep);
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => match starting.take_outcome() {
                Ok(failure) => self.start_has_failed(failure),
                Err((outcome, nursery)) => {
                    self.report_end(GroupOutcome { outcome, nursery, stuck_workers: Vec::new(), swept });
                }
            },
            Current::Running(_) => self.input(Input::Swept(swept)),
        }
    }

    fn on_worker_swept(&mut self, local_rank: u32, swept: SweepOutcome) {
        self.deadlines.disarm(Deadline::Sweep);
        self.held.report_all(&swept);
        // Finish the log files of this rank, because all processes that could write to them are gone.
        self.shared.logs.finish_rank(local_rank);
        self.raised.forget(local_rank);
        self.input(Input::WorkerSwept(swept));
    }

    // --- closing ----------------------------------------------------------------------------------------------

    /// Closes the supervisor. The nursery kills all remaining processes, unless `keep_descendants` is true and no group
    /// exists.
    async fn close(mut self, keep_descendants: bool) {
        self.evidence.cancel(&mut self.retired);
        self.launches.cancel(|_| true);
        if let Some(nursery) = self.nursery.take() {
            let leave = keep_descendants && self.current.is_idle();
            let message = nursery.left_behind();
            if nursery.end(leave, CLOSE_LIMIT).await.is_none() {
                self.shared.queue.degraded(message);
            }
        } else if let Some(sweep) = self.sweeps.take_own() {
            // Only wait for the lost nursery's processes, because SIGKILL has already been sent to all of them.
            let _ = tokio::time::timeout(CLOSE_LIMIT, sweep).await;
        }
        for unwanted in self.launches.finish().await {
            self.retired.add_nursery(unwanted);
        }
        self.retired.finish().await;
    }
}

fn answer<T>(reply: &Reply<T>, value: T) {
    // Ignore an error. It means that the caller has stopped waiting, for example because another thread raised an
    // exception.
    let _ = reply.send(value);
}

/// Returns the result of a task. If the task panicked, resumes the panic on this thread, because it must stop the whole
/// runtime.
fn or_panic<T>(joined: Result<T, JoinError>) -> T {
    match joined {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
