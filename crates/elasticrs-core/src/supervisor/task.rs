//! Event loop of the supervisor on the runtime thread. It owns the link to the nursery, the pidfds and the deadlines,
//! feeds events to the group's state machine, and carries out the effects.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use elasticrs_nursery::connections::Connections;
use elasticrs_nursery::protocol::{PROTOCOL, Reply as FromLink};
use elasticrs_nursery::token::Token;
use elasticrs_runtime::threads::panic_message;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::features::Features;
use elasticrs_sys::procfs;
use elasticrs_sys::signal::Signal;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinHandle, JoinSet};

use super::command::{Command, Config, Reply, Shared, SupervisorError};
use super::deadlines::{Deadlines, Timer, after};
use super::event::{Event, StartFailure, Swept};
use super::evidence::Found;
use super::nursery_io::{FromNursery, Guard, Import, Nursery};
use super::start::{Starting, Terms};
use super::state::{Effect, End, Group, Input};
use super::watch::{self, Watched};
use super::zombies;
use crate::spec::{GroupSpec, StopPolicy};
use crate::timer::hang::Elsewhere;

mod beside;
mod check;
mod ending;
pub(super) mod exits;
mod guard;
mod hang;
mod loss;
mod members;
mod replacing;
mod warm;
mod watchdog;

use beside::Beside;
use check::CHECK_INTERVAL;
use exits::Exits;
use hang::{Gathering, Hangs};
use loss::FENCE_AFTER;
use watchdog::{Ring, Watchdog};

/// When the supervisor is closed, time limit for a nursery to kill its remaining processes and exit.
const CLOSE_LIMIT: Duration = Duration::from_secs(35);

/// Creates the supervisor's task and runs it until the supervisor is closed. Sends `Ok`, or the error of the creation,
/// through `ready`.
pub(super) async fn run(
    config: Config,
    inbox: UnboundedReceiver<Command>,
    shared: Shared,
    ready: Reply<Result<(), SupervisorError>>,
) {
    let task = match Task::new(config, shared) {
        Ok(task) => task,
        Err(error) => return drop(ready.send(Err(error))),
    };
    // Ignore an error, which means that the creator has stopped waiting. The inbox is then closed as well, so the task
    // ends.
    let _ = ready.send(Ok(()));
    // Run the loop as a separate task. Otherwise, whenever another task on this thread wakes up, everything that this
    // loop waits for would be polled, too.
    or_panic(tokio::task::spawn_local(task.serve(inbox)).await);
}

/// A running group, and the descriptors used to signal its members.
struct Running {
    group: Group,
    members: Vec<Member>,
    terms: Terms,
    /// Error to report once a replacement's start that hung and was killed has failed. `None` if no start hangs.
    hung: Option<StartFailure>,
    /// Pids of the members that were found dead by the last check although their exits had not been reported.
    unreported: Vec<i32>,
    /// Pids of the members that the last check found to have exited but to be held by a tracer.
    held: Vec<i32>,
}

struct Member {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    adopted: bool,
    leads_a_group: bool,
}

#[expect(clippy::large_enum_variant, reason = "there is only one")]
enum Current {
    Idle,
    Starting(Starting),
    Running(Running),
}

struct Task {
    config: Config,
    features: Features,
    shared: Shared,
    nursery: Option<Nursery>,
    beside: Option<Beside>,
    /// Token of the last nursery, used to find the processes that the nursery left behind.
    token: Token,
    current: Current,
    /// The group that waits for the nursery to finish its imports. `None` if no group is waiting.
    waits_for_import: Option<GroupSpec>,
    deadlines: Deadlines,
    watched: JoinSet<Watched>,
    /// Futures of other components. See [`super::Supervisor::spawn`]. This field is declared after `nursery`, so that
    /// the futures are dropped after the nursery.
    tasks: JoinSet<()>,
    /// Background work that closing the supervisor waits for: nurseries and evidence threads that are no longer needed.
    retired: JoinSet<()>,
    /// Sockets that the nursery holds. This process keeps them, so that it can pass them to the next nursery.
    guard: Connections,
    /// Number of the most recent sweep request.
    sweeps: u32,
    /// Combined results of earlier sweeps. They are reported with the result of the most recent one.
    swept: Swept,
    /// Number of the pending request to clean up after a failed worker, and the worker's local rank. `None` if there is
    /// no such request.
    sweeps_left: Option<(u32, u32)>,
    own_sweep: Option<JoinHandle<Swept>>,
    watchdog: Option<Watchdog>,
    hangs: Hangs,
    gathering: Option<Gathering>,
    exits: Exits,
    /// Maximum time limit for a sweep by this process after the loss of a nursery. It is short if the nursery itself
    /// could not be killed.
    sweep_limit: Duration,
    /// Pids of the exited processes that were already reported as held by a tracer.
    held: BTreeSet<i32>,
    zombies: Arc<Mutex<zombies::Scanner>>,
}

/// Event that wakes the loop.
enum Wake {
    Nursery(FromNursery),
    Beside(FromNursery),
    Member(Watched),
    Swept(Swept),
    Task(Result<(), JoinError>),
    Command(Command),
    Deadline,
    Timers(Ring),
    Evidence(Vec<Found>),
    Exits(exits::Woken),
    Close { keep_descendants: bool },
}

impl Task {
    fn new(config: Config, shared: Shared) -> Result<Self, SupervisorError> {
        let features = Features::get();
        if config.owns_process {
            nix::sys::prctl::set_child_subreaper(true).map_err(io::Error::from)?;
        }
        let nursery = Nursery::launch(&config.nursery)?;
        let mut task = Self {
            config,
            features,
            shared,
            token: nursery.token,
            nursery: None,
            beside: None,
            current: Current::Idle,
            waits_for_import: None,
            deadlines: Deadlines::default(),
            watched: JoinSet::new(),
            tasks: JoinSet::new(),
            retired: JoinSet::new(),
            guard: Connections::default(),
            sweeps: 0,
            swept: Swept::default(),
            sweeps_left: None,
            own_sweep: None,
            watchdog: None,
            hangs: Hangs::default(),
            gathering: None,
            exits: Exits::default(),
            sweep_limit: Duration::MAX,
            held: BTreeSet::new(),
            zombies: Arc::default(),
        };
        task.use_nursery(nursery);
        if !procfs::is_own() {
            task.shared.queue.push(Event::Degraded { message: procfs::MISSING.to_owned() });
        }
        Ok(task)
    }

    fn use_nursery(&mut self, mut nursery: Nursery) {
        self.equip(&mut nursery);
        if let Some(guard) = &mut nursery.sentinel {
            self.equip(&mut guard.sentinel);
        }
        self.shared.nursery_pid.store(nursery.pid, Ordering::Relaxed);
        self.token = nursery.token;
        self.sweep_limit = Duration::MAX;
        self.nursery = Some(nursery);
        self.arm_import();
    }

    async fn serve(mut self, mut inbox: UnboundedReceiver<Command>) {
        loop {
            match self.wake(&mut inbox).await {
                Wake::Nursery(FromNursery::Reply(reply, fds)) => self.on_reply(reply, fds),
                Wake::Nursery(FromNursery::Died(exit)) => self.on_nursery_death(exit),
                Wake::Nursery(FromNursery::GivenUp) => self.give_up_nursery(),
                Wake::Beside(from) => self.on_beside(&from),
                Wake::Member(Watched { pid, exit, seen }) => {
                    self.on_notices();
                    self.input(Input::Exited { pid, exit, usage: None, seen });
                }
                Wake::Swept(swept) => self.on_swept(swept),
                Wake::Task(ended) => self.on_task_end(ended),
                Wake::Command(command) => {
                    // Report recorded exceptions first. After a command that stops the group, they would no longer be
                    // reported.
                    self.on_notices();
                    self.on_command(command);
                }
                Wake::Deadline => self.on_deadline(),
                Wake::Timers(ring) => self.on_ring(&ring).await,
                Wake::Evidence(found) => {
                    self.gathering = None;
                    self.input(Input::Evidence(found));
                }
                Wake::Exits(woken) => self.on_exits(woken).await,
                Wake::Close { keep_descendants } => return self.close(keep_descendants).await,
            }
        }
    }

    async fn wake(&mut self, inbox: &mut UnboundedReceiver<Command>) -> Wake {
        let deadline = self.deadlines.next();
        let is_starting = matches!(self.current, Current::Starting(_));
        let reads_timers = self.watchdog.is_some() && !is_starting;
        tokio::select! {
            biased;
            from = async { self.nursery.as_mut().expect("guarded below").next().await }, if self.nursery.is_some() => {
                Wake::Nursery(from)
            }
            Some(watched) = self.watched.join_next() => Wake::Member(or_panic(watched)),
            swept = async { self.own_sweep.as_mut().expect("guarded below").await }, if self.own_sweep.is_some() => {
                self.own_sweep = None;
                Wake::Swept(or_panic(swept))
            }
            Some(ended) = self.tasks.join_next() => Wake::Task(ended),
            found = async { self.gathering.as_mut().expect("guarded below").found().await }, if self.gathering.is_some() => {
                Wake::Evidence(found)
            }
            command = inbox.recv() => match command {
                Some(Command::Close { keep_descendants }) => Wake::Close { keep_descendants },
                Some(command) => Wake::Command(command),
                None => Wake::Close { keep_descendants: false },
            },
            () = async { tokio::time::sleep_until(deadline.expect("guarded below").into()).await }, if deadline.is_some() => {
                Wake::Deadline
            }
            // Poll notices after commands and deadlines, because any process may flood the socket.
            woken = self.exits.next(), if self.exits.are_watched() && !is_starting => Wake::Exits(woken),
            from = async { self.beside.as_mut().expect("guarded below").next().await }, if self.beside.is_some() => {
                Wake::Beside(from)
            }
            ring = async { self.watchdog.as_mut().expect("guarded below").next().await }, if reads_timers => {
                Wake::Timers(ring)
            }
        }
    }

    fn on_reply(&mut self, reply: FromLink, fds: Vec<OwnedFd>) {
        match reply {
            FromLink::Ready { protocol: PROTOCOL, .. } => self.on_ready(),
            FromLink::Ready { .. } => self.on_other_build(),
            FromLink::Spawned { local_rank, pid } => self.on_spawned(local_rank, pid, fds.into_iter().next()),
            FromLink::SpawnFailed { local_rank, stage, errno, subject } => {
                let failure = StartFailure::Worker { local_rank, stage, errno, subject };
                match &mut self.current {
                    Current::Idle => {}
                    Current::Starting(starting) => {
                        starting.failed(failure);
                        self.start_when_answered();
                    }
                    Current::Running(_) => self.replace_has_failed(failure),
                }
            }
            FromLink::Exited { pid, exit, usage, seen } => {
                self.on_notices();
                self.input(Input::Exited { pid, exit, usage: Some(usage), seen });
            }
            FromLink::Stopped { pid, signal } => self.input(Input::Paused { pid, signal }),
            FromLink::Continued { pid } => self.input(Input::Continued { pid }),
            FromLink::Swept { number, ended, more, stuck, spared, held }
                if self.sweeps_left.is_some_and(|(left, _)| left == number) =>
            {
                self.on_left_swept(Swept { ended, more, stuck, spared, held });
            }
            FromLink::Swept { number, ended, more, stuck, spared, held } => {
                self.swept.follow_up(Swept { ended, more, stuck, spared, held });
                if number == self.sweeps {
                    let swept = std::mem::take(&mut self.swept);
                    self.on_swept(swept);
                }
            }
            FromLink::Fenced { seen } => {
                self.shared.queue.push(Event::Fenced { at: seen });
                self.input(Input::Fenced);
            }
            FromLink::NotGuarded { errno } => self.tell_not_guarded(errno),
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Start(group, reply) => answer(&reply, self.begin_start(*group)),
            Command::Replace(process, descriptors, reply) => answer(&reply, self.replace(*process, descriptors)),
            Command::Adopt(adopted, reply) => answer(&reply, self.adopt(adopted)),
            Command::Stop(policy, elsewhere) => self.stop(policy, elsewhere),
            Command::Signal(signal, local_ranks) => self.input(Input::Signal(signal, local_ranks)),
            // Ignore the signal while workers are being started, because they have no signal handlers and nothing to
            // save yet.
            Command::Forward(signal, local_ranks) if matches!(self.current, Current::Running(_)) => {
                self.input(Input::Forward(signal, local_ranks));
            }
            Command::Forward(..) => {}
            Command::Suspend(reply) => {
                self.input(Input::Suspend);
                answer(&reply, ());
            }
            Command::Resume => self.input(Input::Resume),
            Command::ImportBeside(limit) => self.import_beside(limit),
            Command::TakeOver(reply) => answer(&reply, self.take_over()),
            Command::Drain(limit, reply) => {
                let logs = Arc::clone(&self.shared.logs);
                // If this task panics, the reply is dropped and the caller gets an error.
                tokio::task::spawn_local(
                    async move { answer(&reply, logs.drained(after(Instant::now(), limit)).await) },
                );
            }
            Command::Spawn(task) => {
                // Create the future inside the task, so that a panic in `task()` is handled like a panic of the future.
                self.tasks.spawn_local(async move { task().await });
            }
            Command::WatchTimers(fifo, reply) => answer(&reply, self.watch_timers(fifo)),
            Command::WatchHangs(limits) => self.hangs.limits = Some(limits),
            Command::KeepEvidence(files, py_spy) => (self.hangs.files, self.hangs.py_spy) = (files, py_spy),
            Command::WatchExits(notices, limit) => self.watch_exits(notices, limit),
            Command::Guard(guarded) => self.guard(guarded),
            Command::Close { .. } => unreachable!("taken by `wake`"),
            #[cfg(test)]
            Command::Panic => panic!("out of luck"),
        }
    }

    fn on_task_end(&self, ended: Result<(), JoinError>) {
        if let Err(error) = ended {
            let message = format!("a task of the runtime panicked: {}", panic_message(error.into_panic().as_ref()));
            self.shared.queue.push(Event::Degraded { message });
        }
    }

    // --- starting ---------------------------------------------------------------------------------------------

    fn begin_start(&mut self, mut spec: GroupSpec) -> Result<(), SupervisorError> {
        if !matches!(self.current, Current::Idle) {
            return Err(SupervisorError::Busy);
        }
        if self.nursery.is_none() {
            let nursery = Nursery::launch(&self.images_for(&spec))?;
            self.use_nursery(nursery);
        }
        self.hangs.give_pages(&mut spec).map_err(SupervisorError::Heartbeats)?;
        self.shared.counters.heartbeats.set(self.hangs.pages());
        self.current = Current::Starting(Starting::new(&spec));
        if self.is_warming() {
            self.await_import(spec);
        } else {
            self.request_start(&spec).inspect_err(|_| self.current = Current::Idle)?;
        }
        Ok(())
    }

    fn request_start(&mut self, spec: &GroupSpec) -> io::Result<()> {
        let terms = Terms::of(spec);
        let requests = spec.processes.iter().map(|process| terms.spawn_request(process, &spec.descriptors));
        let requests = requests.collect::<io::Result<Vec<_>>>()?;
        self.check_sentinel();
        let Some(nursery) = self.nursery.as_mut() else { return Ok(()) };
        // Discard the stages that were reported by earlier starts.
        nursery.stage_reached();
        for (request, fds) in requests {
            nursery.send(&request, fds);
        }
        self.deadlines.arm(Timer::Start, spec.start_deadline, Instant::now());
        self.deadlines.arm(Timer::Fence, FENCE_AFTER, Instant::now());
        self.start_when_answered();
        Ok(())
    }

    fn on_spawned(&mut self, local_rank: u32, pid: i32, pidfd: Option<OwnedFd>) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.spawned(local_rank, pid, pidfd);
                self.start_when_answered();
            }
            Current::Running(_) => self.on_replaced(local_rank, pid, pidfd),
        }
    }

    fn start_when_answered(&mut self) {
        let Current::Starting(starting) = &mut self.current else { return };
        if !starting.all_answered() {
            return;
        }
        self.deadlines.disarm(Timer::Start);
        self.deadlines.disarm(Timer::Fence);
        if starting.has_failed() {
            // Kill the workers that were started, because a group starts completely or not at all (**SUP-1**).
            return self.sweep(Duration::ZERO, Duration::ZERO, super::deadlines::GIVE_UP_AFTER);
        }
        let Current::Starting(starting) = std::mem::replace(&mut self.current, Current::Idle) else { return };
        let (group, workers, terms, early) = starting.into_group();
        let members = workers
            .into_iter()
            .map(|(pid, pidfd)| Member { pid, pidfd: Arc::new(pidfd), adopted: false, leads_a_group: true })
            .collect::<Vec<_>>();
        self.shared
            .queue
            .push(Event::GroupStarted { pids: members.iter().map(|m| m.pid).collect(), started: Stamp::now() });
        self.current =
            Current::Running(Running { group, members, terms, hung: None, unreported: Vec::new(), held: Vec::new() });
        self.deadlines.arm(Timer::Check, CHECK_INTERVAL, Instant::now());
        self.begin_watch();
        for input in early {
            self.input(input);
        }
    }

    fn start_has_failed(&mut self, failure: StartFailure) {
        self.current = Current::Idle;
        self.deadlines.clear();
        self.shared.logs.finish_all();
        self.shared.queue.push(Event::StartFailed(failure));
    }

    // --- running ----------------------------------------------------------------------------------------------

    fn stop(&mut self, policy: StopPolicy, elsewhere: Option<Elsewhere>) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => {
                starting.stop(policy);
                if self.waits_for_import.take().is_some() {
                    // The nursery has not been asked to start any worker yet, so there is nothing to sweep.
                    self.on_swept(Swept::default());
                } else {
                    let grace = if policy.signal == Signal::KILL { Duration::ZERO } else { policy.grace };
                    self.deadlines.hasten(Timer::Kill, grace, Instant::now());
                }
            }
            Current::Running(_) => self.input(match elsewhere {
                Some(elsewhere) => Input::StopForHang(policy, elsewhere),
                None => Input::Stop(policy),
            }),
        }
    }

    fn on_deadline(&mut self) {
        while let Some(timer) = self.deadlines.expired(Instant::now()) {
            match timer {
                Timer::Start => self.on_hung_start(),
                Timer::Fence => self.fence_start(),
                Timer::Warm => self.on_hung_import(),
                Timer::SlowImport => self.on_slow_import(),
                Timer::Kill if matches!(self.current, Current::Starting(_)) => self.kill_start(),
                Timer::Sweep => self.on_overdue_sweep(),
                Timer::Replace(local_rank) => self.on_hung_replace(local_rank),
                // Do not sample the worker. The process that recorded the exception has exited. If it was only a
                // descendant of the worker, the worker itself may continue.
                Timer::Exit(local_rank) if self.exits.has_ended(local_rank) => {}
                Timer::Exit(local_rank) => self.sample_exit(local_rank),
                Timer::Check => {
                    self.check();
                    self.input(Input::Expired(timer));
                }
                Timer::Hang | Timer::Kill | Timer::GiveUp | Timer::Paused(_) | Timer::Condemned(_) => {
                    self.input(Input::Expired(timer));
                }
            }
        }
    }

    // --- effects ----------------------------------------------------------------------------------------------

    fn input(&mut self, input: Input) {
        match &mut self.current {
            Current::Idle => {}
            Current::Starting(starting) => starting.early(input),
            Current::Running(running) => {
                if running.group.may_signal(&input) {
                    // Ignore the result, because `Input::Dead` has no effects.
                    let _ = running.group.on_input(Input::Dead(running.dead()));
                }
                if running.group.needs_sight(&input) {
                    let sight = self.hangs.sight(running, &self.shared.logs);
                    let _ = running.group.on_input(Input::Sight(sight));
                }
                for effect in running.group.on_input(input) {
                    self.carry_out(effect);
                }
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        let now = Instant::now();
        match effect {
            Effect::Signal { pid, to, signal } => self.signal(pid, to, signal),
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
            Effect::Sweep { linger, grace, give_up } => self.sweep(linger, grace, give_up),
            Effect::SweepLeft { local_rank, pid, give_up } => self.sweep_left(local_rank, pid, give_up),
            Effect::TakeEvidence { title } => self.take_evidence(&title),
            Effect::TellFailure { local_rank, seen, siblings } => {
                self.shared.queue.push(Event::FailureSeen { local_rank, seen, signalled: Stamp::now(), siblings });
            }
            Effect::Tell(event) => self.shared.queue.push(event),
            Effect::TellEnd(end) => self.tell_end(end),
        }
    }

    fn tell_end(&mut self, end: End) {
        let End { outcome, nursery, stuck_workers, swept } = end;
        let stuck_workers =
            stuck_workers.into_iter().map(|(local_rank, pid)| (local_rank, watch::wait_channel(pid))).collect();
        self.current = Current::Idle;
        self.deadlines.clear();
        self.watched = JoinSet::new();
        self.give_up_evidence();
        self.sweeps_left = None;
        self.exits = Exits::default();
        if let Some(message) = self.watchdog.as_mut().and_then(Watchdog::clear) {
            self.shared.queue.push(Event::Degraded { message });
        }
        self.shared.logs.finish_all();
        let at = Stamp::now();
        self.shared.queue.push(Event::GroupEnded { outcome, nursery, stuck_workers, swept, at });
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
