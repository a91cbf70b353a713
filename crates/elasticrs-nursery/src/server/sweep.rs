//! Kills all descendants of the nursery, or the leftover processes of one worker, and waits until they have exited.
//!
//! Each step reaps exited children, lists the remaining processes, and signals them according to the phase: no signal
//! during the linger time, SIGTERM once during the grace time, and SIGKILL after that. [Cleaners](crate::cleaner) are
//! killed last. Only `ECHILD` proves that all processes have exited. A process that has left its worker's session and
//! has reset its token is exempt. `ECHILD` cannot occur while an exempt process is running. In that case, the sweep
//! stops after two consecutive checks that find no process to kill.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::NurseryServer;
use crate::cleaner::{LAST_MOMENT, LONGEST, Patience};
use crate::held;
use crate::protocol::{Descendant, Savers, SweepLimits};
use crate::token::Token;
use crate::tree::{self, Listed, Signalled, Status, Target};

/// Maximum interval between checks. Polling is necessary, because a process that is not a child of this process
/// causes no SIGCHLD when it exits.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const FIRST_LOOK: Duration = Duration::from_micros(200);

/// Deadlines of the phases of a sweep.
#[derive(Debug)]
struct Deadlines {
    term: Instant,
    kill: Instant,
    give_up: Instant,
}

impl Deadlines {
    fn new(now: Instant, limits: SweepLimits) -> Self {
        // If a deadline is beyond the range of the clock, wait for one year instead.
        let after = |start: Instant, span| start.checked_add(span).unwrap_or(start + Duration::from_secs(31_536_000));
        let term = after(now, limits.linger);
        let kill = after(term, limits.grace);
        Self { term, kill, give_up: after(now, limits.give_up).max(kill) }
    }

    fn next(&self, now: Instant) -> Option<Instant> {
        [self.term, self.kill, self.give_up].into_iter().find(|&at| at > now)
    }
}

#[derive(Debug)]
pub(super) enum SweepStep {
    GoOn,
    Over { stuck: Vec<Descendant>, spared: Vec<Descendant>, held: Vec<i32> },
}

#[derive(Debug)]
pub(super) struct Sweep {
    deadlines: Deadlines,
    /// Number of the latest unanswered kill request. `None` if there is no unanswered request.
    number: Option<u32>,
    /// Pid of an exited worker, to kill only its leftover processes and to spare running workers. `None` to kill all
    /// descendants.
    left_by: Option<i32>,
    /// Pids to which SIGTERM was sent. The field `killed` contains the pids to which SIGKILL was sent.
    termed: BTreeSet<i32>,
    killed: BTreeSet<i32>,
    ended: Signalled,
    /// Tracks how long to wait for processes that unlink shared memory, after all other processes have exited.
    patience: Patience,
    /// Number of consecutive checks that have found no process to kill, except processes that unlink shared memory.
    quiet_looks: u8,
    /// Children that had exited but could not be reaped at the last check. If the next check finds them again, a tracer
    /// holds them.
    corpses: BTreeSet<i32>,
    /// Time at which a check first found no more processes to kill. `None` if a process still has to be killed.
    only_held: Option<Instant>,
    pause: Duration,
    savers: Option<Savers>,
}

/// Result of one pass over all processes that may have to be killed.
#[derive(Debug, Default)]
struct SweepPass {
    others: Vec<Listed>,
    exempt: Vec<i32>,
    /// True if a process was found that still [unlinks shared memory](crate::cleaner) and was therefore not killed.
    cleaners: bool,
    /// Exited children that `wait4` does not return, because a tracer holds them.
    held: Vec<i32>,
    /// True if a process exited during the search for processes. The search may have missed the children of that
    /// process, because they became children of the nursery in the meantime.
    ///
    /// Zombies with another parent than the nursery do not count, because their children were already reparented.
    unsure: bool,
    /// True if at least one process was sent SIGTERM or SIGKILL for the first time.
    new: bool,
}

impl Sweep {
    pub(super) fn new(limits: SweepLimits, number: Option<u32>, left_by: Option<i32>, ended: Signalled) -> Self {
        Self {
            deadlines: Deadlines::new(Instant::now(), limits),
            number,
            left_by,
            termed: BTreeSet::new(),
            killed: BTreeSet::new(),
            ended,
            patience: Patience::default(),
            quiet_looks: 0,
            corpses: BTreeSet::new(),
            only_held: None,
            pause: Duration::ZERO,
            savers: None,
        }
    }

    /// Combines a new request to kill processes with the request in progress.
    ///
    /// Ignores a new request to clean up after one worker (`left_by`). A new request to kill all descendants replaces a
    /// clean-up after one worker. If all descendants are already being killed, the earlier deadlines apply.
    pub(super) fn bring_forward(&mut self, limits: SweepLimits, number: Option<u32>, left_by: Option<i32>) {
        if left_by.is_some() {
            return;
        }
        if self.left_by.take().is_some() {
            let (termed, killed) = (std::mem::take(&mut self.termed), std::mem::take(&mut self.killed));
            *self = Self { termed, killed, ..Self::new(limits, number, None, std::mem::take(&mut self.ended)) };
            return;
        }
        self.number = number.or(self.number);
        let by = Deadlines::new(Instant::now(), limits);
        let now = &mut self.deadlines;
        now.term = now.term.min(by.term);
        now.kill = now.kill.min(by.kill);
        now.give_up = now.give_up.min(by.give_up).max(now.kill);
        self.pause = Duration::ZERO;
    }

    /// Sets the processes that the sweep does not kill. The sweep still waits until they exit.
    pub(super) fn spare(&mut self, savers: Option<Savers>) {
        self.savers = savers;
        self.pause = Duration::ZERO;
    }

    /// Returns how long to wait before checking the processes again. The caller checks them earlier if a child changes
    /// its state.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        let until = self.deadlines.next(now).map_or(Duration::ZERO, |at| at - now);
        until.min(self.pause)
    }

    /// Returns the contents of the answer: the ID of the request, and the signalled processes except those in `stuck`.
    pub(super) fn into_answer(self, stuck: &[Descendant]) -> (Option<u32>, Signalled) {
        let stuck: Vec<i32> = stuck.iter().map(|stuck| stuck.pid).collect();
        (self.number, self.ended.without(&stuck))
    }

    /// True if running workers are killed, and not only the leftover processes of an exited worker.
    pub(super) fn ends_workers(&self) -> bool {
        self.left_by.is_none()
    }

    /// Returns the pid of the exited worker whose leftover processes are killed. `None` if all descendants of the
    /// nursery process are killed.
    pub(super) fn left_by(&self) -> Option<i32> {
        self.left_by
    }

    /// True if the last two checks have found no process to kill, except processes that unlink shared memory.
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet_looks >= 2
    }

    pub(super) fn step(&mut self, nursery: &NurseryServer, has_children: bool) -> SweepStep {
        if !has_children {
            return SweepStep::Over { stuck: Vec::new(), spared: Vec::new(), held: Vec::new() };
        }
        let now = Instant::now();
        let signal = match now {
            now if now < self.deadlines.term => None,
            now if now < self.deadlines.kill => Some(Signal::SIGTERM),
            _ => Some(Signal::SIGKILL),
        };
        let look = self.look(nursery, signal, now);
        let is_quiet = look.others.is_empty() && !look.unsure;
        self.quiet_looks = if is_quiet { self.quiet_looks.saturating_add(1) } else { 0 };
        if is_quiet && look.cleaners && self.patience.begin(now) {
            self.deadlines.give_up = self.deadlines.give_up.max(now + LONGEST);
        }
        if now >= self.deadlines.give_up && look.cleaners && self.patience.end() {
            // Processes that unlink shared memory have exceeded the time limit. Kill them too, and briefly wait for
            // them to exit.
            self.deadlines.give_up = now + LAST_MOMENT;
            self.pause = Duration::ZERO;
            return SweepStep::GoOn;
        }
        // Do not wait for `ECHILD` if some children may remain. They can be running workers, processes that are meant
        // to outlive the job, or zombies that a tracer has not released.
        let may_stay = self.left_by.is_some() || !look.exempt.is_empty() || !look.held.is_empty();
        let only_harmless = is_quiet && !look.cleaners && may_stay;
        self.only_held = only_harmless.then(|| self.only_held.unwrap_or(now));
        let waits_for_tracer = look.held.iter().any(|pid| !nursery.held_by_tracers.contains(pid))
            && self.only_held.is_some_and(|since| now < since + held::LIMIT);
        if self.is_quiet() && only_harmless && !waits_for_tracer || now >= self.deadlines.give_up {
            let describe = |pids: Vec<i32>| pids.into_iter().map(tree::describe).collect();
            let stuck = look.others.iter().map(|listed| listed.pid).collect();
            return SweepStep::Over { stuck: describe(stuck), spared: describe(look.exempt), held: look.held };
        }
        // Check again immediately while new processes appear, because they may fork faster than this process checks.
        // Otherwise, pause. The exit of a child ends the pause.
        self.pause = match (look.new, self.pause) {
            (true, _) => Duration::ZERO,
            (false, pause) if pause.is_zero() => FIRST_LOOK,
            (false, pause) => (2 * pause).min(LOOK_AGAIN),
        };
        SweepStep::GoOn
    }

    /// Checks all descendants once, and sends `signal` to those that must exit.
    fn look(&mut self, nursery: &NurseryServer, signal: Option<Signal>, now: Instant) -> SweepPass {
        let mut look = SweepPass::default();
        let corpses = std::mem::take(&mut self.corpses);
        let living: Vec<i32> = self.left_by.iter().flat_map(|_| &nursery.workers).copied().collect();
        let (mut others, mut savers) = (BTreeSet::new(), BTreeSet::new());
        for listed in tree::descendants(nursery.pid, &living) {
            let Some(target) = Target::open(nursery.pid, listed) else {
                look.unsure = true;
                continue;
            };
            if self.is_left_by_another(nursery, target.status.session) || others.contains(&listed.parent) {
                others.insert(listed.pid);
                continue;
            }
            if tree::has_died(listed.pid, target.status) {
                if listed.parent == nursery.pid {
                    self.corpses.insert(listed.pid);
                    if corpses.contains(&listed.pid) { look.held.push(listed.pid) } else { look.unsure = true }
                }
                continue;
            }
            if nursery.is_exempt(listed.pid, target.status) {
                look.exempt.push(listed.pid);
                continue;
            }
            if !nursery.workers.contains(&listed.pid) && self.patience.spares(&target, now) {
                look.cleaners = true;
                continue;
            }
            if self.left_by.is_none() || !nursery.given_up.contains(&listed.pid) {
                look.others.push(listed);
            }
            if savers.contains(&listed.parent) || self.saves(&target) {
                savers.insert(listed.pid);
                continue;
            }
            if let Some(signal) = signal {
                look.new |= self.signal(nursery, listed.pid, &target, signal);
            }
        }
        look
    }

    /// Returns true if the process may still be writing a checkpoint, see [`Savers`].
    fn saves(&self, target: &Target) -> bool {
        self.savers.as_ref().is_some_and(|savers| {
            let signal = Signal::try_from(savers.signal).ok();
            savers.workers.contains(&target.status.session) && signal.is_some_and(|signal| target.handles(signal))
        })
    }

    /// True if processes in `session` are spared, because they belong to another worker than `left_by`.
    fn is_left_by_another(&self, nursery: &NurseryServer, session: i32) -> bool {
        self.left_by.is_some_and(|worker| worker != session && nursery.sessions.contains(&session))
    }

    /// Sends a signal to a process. Returns true if `self` has not sent the same signal to this pid before.
    fn signal(&mut self, nursery: &NurseryServer, pid: i32, target: &Target, signal: Signal) -> bool {
        let is_new = if signal == Signal::SIGKILL { self.killed.insert(pid) } else { self.termed.insert(pid) };
        let was_named = signal == Signal::SIGKILL && self.termed.contains(&pid);
        if signal == Signal::SIGKILL {
            // Send SIGKILL even if it was already sent to this pid, because a new process may have reused the pid.
            target.signal(signal);
        } else if is_new {
            target.signal(signal);
            // Also continue the process, because a stopped process does not handle SIGTERM.
            target.signal(Signal::SIGCONT);
        }
        if is_new && !was_named && !nursery.workers.contains(&pid) && !nursery.orphaned {
            self.ended.add(target);
        }
        is_new
    }
}

impl NurseryServer {
    /// Returns true if the process is meant to outlive the job: it has left its worker's session and has reset its
    /// token.
    fn is_exempt(&self, pid: i32, status: Status) -> bool {
        self.marked && !self.sessions.contains(&status.session) && Token::is_reset(pid)
    }
}
