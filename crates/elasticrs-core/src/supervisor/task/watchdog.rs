//! Handles the expiration timers of the running group: reads the FIFO, finds the process that wrote each record, and
//! reports timers that have expired.
//!
//! The FIFO is not read while a group is being started, because a worker may write to it before the pids of all workers
//! are known. See [`crate::timer`] for the invariants.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use elasticrs_runtime::notices::Rate;
use elasticrs_runtime::readiness::register;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process;
use elasticrs_sys::procfs::{START_TIME, Stat};
use elasticrs_sys::signal::Signal;
use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{AbortHandle, JoinSet};

use super::running::Running;
use crate::supervisor::counters::TimerCounters;
use crate::supervisor::event::TimerExpired;
use crate::timer::fifo::CAPACITY;
use crate::timer::record::{
    self, Complaints, INTERVAL, Lines, MAX_REPORTED, Record, Refusal, Request, excerpt, more_timers,
};
use crate::timer::table::{Due, Terms, Timers, on_monotonic};

/// Number of bytes to read before the elapsed time is compared with [`SLICE`].
const PIECE: usize = libc::PIPE_BUF;
/// Maximum time to read before other tasks of the runtime get their turn, so that reading does not delay the stop
/// of a group. The last read may exceed this limit. The limit is a time rather than a number of records, because
/// some records take much longer to process than others.
const SLICE: Duration = Duration::from_millis(1);
/// Maximum number of bytes to read before expired timers are handled. Without this limit, a process that writes all the
/// time could prevent a hung worker from being killed.
const MAX_DRAIN: usize = 2 * CAPACITY as usize;
/// Maximum number of processes that can have timers at the same time. Each process occupies a descriptor.
const MAX_PROCESSES: usize = 512;

/// A process that may set timers: a worker or a descendant of one.
struct Bound {
    pidfd: Arc<OwnedFd>,
    start_time: Option<u64>,
    local_rank: u32,
    /// True if the process is about to be signalled because its timer has expired. Its entry must be kept, because the
    /// entry contains the pidfd for the signal.
    is_due: bool,
    /// Handle that cancels the wait for the process's exit.
    wait: AbortHandle,
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.wait.abort();
    }
}

/// Event that [`Watchdog::next`] returns.
#[derive(Debug)]
pub(super) enum WatchdogEvent {
    Readable,
    Due,
    Exited,
}

pub(super) struct Watchdog {
    /// Descriptor of the FIFO. Another thread creates and removes the FIFO's file, because these operations may block.
    input: AsyncFd<OwnedFd>,
    alarm: TimerFd,
    rings: AsyncFd<OwnedFd>,
    armed: Option<Stamp>,
    lines: Lines,
    timers: Timers,
    bound: HashMap<i32, Bound>,
    /// Pids that were found not to belong to any worker during the current read. Caching them avoids reading `/proc`
    /// more than once for each pid.
    strangers: HashSet<i32>,
    exits: JoinSet<()>,
    complaints: Complaints,
    reported: Rate,
    buffer: Box<[u8]>,
    counts: Arc<TimerCounters>,
}

impl Watchdog {
    /// Creates a watchdog that reads records from this FIFO.
    pub(super) fn new(fifo: OwnedFd, counts: Arc<TimerCounters>) -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let alarm = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        Ok(Self {
            input: register(fifo, Interest::READABLE)?,
            rings: register(alarm.as_fd().try_clone_to_owned()?, Interest::READABLE)?,
            alarm,
            armed: None,
            lines: Lines::default(),
            timers: Timers::default(),
            bound: HashMap::new(),
            strangers: HashSet::new(),
            exits: JoinSet::new(),
            complaints: Complaints::default(),
            reported: Rate::new(MAX_REPORTED, INTERVAL),
            buffer: vec![0; PIECE].into(),
            counts,
        })
    }

    /// Waits for the next event. Cancel-safe, because every consumed event is returned at once.
    pub(super) async fn next(&mut self) -> WatchdogEvent {
        let Self { input, rings, exits, .. } = self;
        loop {
            tokio::select! {
                biased;
                // Ignore an error, because the runtime is then shutting down and no longer polls this future.
                Ok(mut ready) = rings.readable() => {
                    ready.clear_ready();
                    return WatchdogEvent::Due;
                }
                Some(exited) = exits.join_next() => {
                    // An error means that the wait was cancelled because the process was removed from the table.
                    if exited.is_ok() {
                        return WatchdogEvent::Exited;
                    }
                }
                // The FIFO stays marked as readable until a read finds no data.
                Ok(_) = input.readable() => return WatchdogEvent::Readable,
            }
        }
    }

    /// Handles an event, and returns the timers that have expired. Passes messages for the user to `report`. `running` is
    /// `None` if no group is running.
    pub(super) fn handle(
        &mut self,
        event: &WatchdogEvent,
        running: Option<&Running>,
        report: &mut impl FnMut(String),
    ) -> Vec<TimerExpired> {
        match event {
            WatchdogEvent::Readable => self.read(MAX_DRAIN, SLICE, running, report),
            // The kernel timer has fired, so it is not armed anymore.
            WatchdogEvent::Due => self.armed = None,
            WatchdogEvent::Exited => self.forget_ended(),
        }
        let mut expired = self.expired(running, report);
        self.arm();
        // Limit how often timers that send no signal are reported, because a worker can set many timers (**TIM-4**).
        expired.retain(|timer| {
            if timer.signal.is_some() {
                return true;
            }
            let left_out = self.reported.admit(Instant::now());
            left_out.and_then(more_timers).into_iter().for_each(&mut *report);
            left_out.is_some()
        });
        expired
    }

    /// Removes all timers after the process group has ended. Returns a message with the number of expired timers that
    /// were not reported individually. `None` if there are none.
    pub(super) fn clear(&mut self) -> Option<String> {
        self.timers.clear();
        self.bound.clear();
        self.arm();
        more_timers(self.reported.take_left_out())
    }

    pub(super) fn freeze(&mut self) {
        self.timers.freeze(Stamp::now());
        self.arm();
    }

    pub(super) fn thaw(&mut self) {
        self.timers.thaw(Stamp::now());
        self.arm();
    }

    /// Sends a signal to the process `pid`, whose timer has expired. Does nothing if the process has already exited.
    pub(super) fn signal(&self, pid: i32, signal: Signal) {
        if let Some(bound) = self.bound.get(&pid) {
            // Ignore errors. ESRCH means that the process has exited. After any other error, for example because the
            // process runs a set-uid program, the process keeps running and is reported later.
            let _ = process::send_signal(&bound.pidfd, signal.number());
        }
    }

    fn forget(&mut self, pid: i32) {
        self.bound.remove(&pid);
        self.timers.remove_process(pid);
    }

    /// Removes the timers of exited processes, because the kernel may reuse their pids (**TIM-5**). The exits may not
    /// have been reported yet.
    fn forget_ended(&mut self) {
        let pids: Vec<i32> = self.bound.keys().copied().collect();
        let pidfds: Vec<_> = pids.iter().map(|pid| self.bound[pid].pidfd.as_fd()).collect();
        let ended = process::have_ended(&pidfds);
        for (pid, _) in pids.into_iter().zip(ended).filter(|(_, ended)| *ended) {
            self.forget(pid);
        }
    }

    /// Sets the kernel timer to the earliest deadline.
    fn arm(&mut self) {
        self.counts.set_live(self.timers.len());
        let next = self.timers.next();
        if self.armed == next {
            return;
        }
        self.armed = next;
        // Use at least one nanosecond, because zero would disarm the timer.
        let at = next.map(|at| Expiration::OneShot(TimeSpec::from_duration(Duration::from_nanos(at.0.max(1)))));
        // Ignore an error, because the kernel rejects only times that are many decades in the future.
        let _ = match at {
            Some(at) => self.alarm.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME),
            None => self.alarm.unset(),
        };
    }

    /// Reads records from the FIFO until it is empty, about `limit` bytes have been read, or `slice` has elapsed.
    /// Passes messages about rejected records to `report`.
    fn read(&mut self, limit: usize, slice: Duration, running: Option<&Running>, report: &mut impl FnMut(String)) {
        self.forget_ended();
        self.strangers.clear();
        let began = Instant::now();
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut lines = std::mem::take(&mut self.lines);
        let mut left = limit;
        while left > 0 {
            let read = self.input.try_io(Interest::READABLE, |fd| Ok(nix::unistd::read(fd, &mut buffer)?));
            let Ok(count) = read else { break };
            let clocks = Clocks::now();
            lines.feed(&buffer[..count], |line| match line {
                None => self.refuse(Refusal::TooLong, report, String::new),
                Some(line) => record::read(line, |record| {
                    let refused = record.and_then(|record| self.apply(&record, clocks, running));
                    if let Err(refusal) = refused {
                        self.refuse(refusal, report, || excerpt(line));
                    }
                }),
            });
            left = left.saturating_sub(count.max(1));
            if began.elapsed() >= slice {
                break;
            }
        }
        (self.buffer, self.lines) = (buffer, lines);
    }

    fn refuse(&mut self, refusal: Refusal, report: &mut impl FnMut(String), claim: impl FnOnce() -> String) {
        if let Some(message) = self.complaints.add(refusal, Instant::now(), claim) {
            report(message);
        }
    }

    fn apply(&mut self, record: &Record, clocks: Clocks, running: Option<&Running>) -> Result<(), Refusal> {
        match &record.request {
            Request::Release => {
                if let Some(bound) = self.bound.get(&record.pid) {
                    bound.check(record)?;
                    self.timers.release(record.pid, &record.scope);
                }
            }
            Request::Acquire { expires, deadline_ns, signal, at } => {
                if !self.bind(record.pid, running)? {
                    return Ok(());
                }
                self.bound[&record.pid].check(record)?;
                let deadline = deadline_ns.map_or_else(|| on_monotonic(*expires, clocks.wall, clocks.now), Stamp);
                let terms = Terms { expires: *expires, signal: *signal, at: at.clone() };
                if !self.timers.acquire(record.pid, &record.scope, deadline, terms) {
                    return Err(Refusal::Full);
                }
            }
        }
        Ok(())
    }

    /// Opens a pidfd for a process that sets a timer, and finds the worker to which the process belongs. Returns false
    /// if the process has exited.
    fn bind(&mut self, pid: i32, running: Option<&Running>) -> Result<bool, Refusal> {
        if self.bound.contains_key(&pid) {
            return Ok(true);
        }
        if self.strangers.contains(&pid) {
            return Err(Refusal::Stranger);
        }
        let pidfd = match process::open_pidfd(pid) {
            Ok(pidfd) => Arc::new(pidfd),
            Err(Errno::ESRCH) => return Ok(false),
            Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => return Err(Refusal::Full),
            Err(_) => return Err(Refusal::Stranger),
        };
        let local_rank = running.and_then(|running| running.worker_of(pid));
        let start_time = Stat::of(pid).and_then(|stat| stat.field(START_TIME));
        // Check that the process is still alive, because the data from `/proc` may otherwise be about another process
        // with the same pid.
        if process::have_ended(&[pidfd.as_fd()]) == [true] {
            return Ok(false);
        }
        let Some(local_rank) = local_rank else {
            self.strangers.insert(pid);
            return Err(Refusal::Stranger);
        };
        if self.bound.len() >= MAX_PROCESSES {
            self.bound.retain(|pid, bound| bound.is_due || self.timers.has(*pid));
            if self.bound.len() >= MAX_PROCESSES {
                return Err(Refusal::Full);
            }
        }
        let watched = register(Arc::clone(&pidfd), Interest::READABLE).map_err(|_| Refusal::Full)?;
        let wait = self.exits.spawn(async move {
            // Ignore an error, because it only means that the runtime is shutting down.
            let _ = watched.readable().await;
        });
        self.bound.insert(pid, Bound { pidfd, start_time, local_rank, is_due: false, wait });
        Ok(true)
    }

    /// Returns the timers that have expired. Reads the FIFO first, so that timers that were released in time are not
    /// among them (**TIM-2**).
    fn expired(&mut self, running: Option<&Running>, report: &mut impl FnMut(String)) -> Vec<TimerExpired> {
        let mut expired = Vec::new();
        if self.timers.next().is_some_and(|at| at <= Stamp::now()) {
            self.read(MAX_DRAIN, Duration::MAX, running, report);
            let seen = Stamp::now();
            while let Some((deadline, Due { pid, scope, terms, others })) =
                self.timers.next().zip(self.timers.expired(seen))
            {
                self.counts.add_expired(seen.0.saturating_sub(deadline.0));
                let Some(bound) = self.bound.get_mut(&pid) else { continue };
                bound.is_due |= terms.signal.is_some();
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts of floats saturate")]
                let deadline_ms = (terms.expires * 1000.0) as u64;
                expired.push(TimerExpired {
                    local_rank: bound.local_rank,
                    pid,
                    scope: scope.to_string(),
                    at: terms.at.map(String::from),
                    deadline_ms,
                    others: u32::try_from(others).unwrap_or(u32::MAX),
                    signal: terms.signal,
                    seen,
                });
            }
        }
        expired
    }
}

impl Bound {
    fn check(&self, record: &Record) -> Result<(), Refusal> {
        match (record.start_time, self.start_time) {
            (Some(claimed), Some(actual)) if claimed != actual => Err(Refusal::Recycled),
            _ => Ok(()),
        }
    }
}

/// Readings of the wall clock and the monotonic clock at the same moment.
#[derive(Clone, Copy)]
struct Clocks {
    wall: f64,
    now: Stamp,
}

impl Clocks {
    fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        Self { wall, now: Stamp::now() }
    }
}
