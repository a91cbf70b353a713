//! Kills all descendants until none is left.
//!
//! Each step reaps exited children, lists the remaining processes, and signals them according to the phase: none during
//! the linger time, SIGTERM once during the grace time, and SIGKILL after that. [Cleaners](crate::nursery::cleaner) are
//! killed last. Only `ECHILD` proves that no process is left. If exempt processes prevent `ECHILD`, two checks in a row
//! that find no other process count instead.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::Nursery;
use crate::nursery::cleaner::{LAST_MOMENT, LONGEST, Patience};
use crate::nursery::held;
use crate::nursery::protocol::Descendant;
use crate::nursery::token::Token;
use crate::nursery::tree::{self, Ended, Listed, Status, Target};

/// Interval for checking processes that are not children of this process, because their exit causes no signal here.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const FIRST_LOOK: Duration = Duration::from_micros(200);

/// Deadlines of the phases of a sweep.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadlines {
    term: Instant,
    kill: Instant,
    give_up: Instant,
}

impl Deadlines {
    pub(super) fn new(now: Instant, linger: Duration, grace: Duration, give_up: Duration) -> Self {
        // Limit a duration that exceeds the clock's range to a year.
        let after = |start: Instant, span| start.checked_add(span).unwrap_or(start + Duration::from_secs(31_536_000));
        let term = after(now, linger);
        let kill = after(term, grace);
        Self { term, kill, give_up: after(now, give_up).max(kill) }
    }

    fn next(&self, now: Instant) -> Option<Instant> {
        [self.term, self.kill, self.give_up].into_iter().find(|&at| at > now)
    }
}

#[derive(Debug)]
pub(super) enum Verdict {
    GoOn,
    Over { stuck: Vec<Descendant>, spared: Vec<Descendant>, held: Vec<i32> },
}

#[derive(Debug)]
pub(super) struct Sweep {
    deadlines: Deadlines,
    /// The last request that this answers.
    number: Option<u32>,
    /// If set, the sweep kills only leftover processes of this worker, and spares living workers.
    left_by: Option<i32>,
    /// Pids to which SIGTERM was sent, and those to which SIGKILL was sent.
    termed: BTreeSet<i32>,
    killed: BTreeSet<i32>,
    ended: Ended,
    /// State of waiting for cleaners when no other processes are left.
    patience: Patience,
    /// Number of checks in a row that have found only cleaners and exempt processes.
    quiet_looks: u8,
    /// Children that had exited by the last check. If the next check finds them again, a tracer holds them.
    corpses: BTreeSet<i32>,
    /// Time since which only such children have been left.
    only_held: Option<Instant>,
    pause: Duration,
}

/// Result of checking the processes once.
#[derive(Debug, Default)]
struct Look {
    others: Vec<Listed>,
    exempt: Vec<i32>,
    /// True if a cleaner was spared.
    cleaners: bool,
    /// Exited children that `wait4` does not return.
    held: Vec<i32>,
    /// True if a process exited during the check. Its children, which are now children of this process, may have been
    /// missed. A zombie whose parent is another process has passed on its children already.
    unsure: bool,
    /// True if a process was signalled for the first time.
    new: bool,
}

impl Sweep {
    pub(super) fn new(deadlines: Deadlines, number: Option<u32>, left_by: Option<i32>, ended: Ended) -> Self {
        Self {
            deadlines,
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
        }
    }

    /// Does nothing if `left_by` is set. Otherwise moves each deadline forward if the new one is earlier, and extends
    /// the sweep to all workers.
    pub(super) fn bring_forward(&mut self, by: Deadlines, number: Option<u32>, left_by: Option<i32>) {
        if left_by.is_some() {
            return;
        }
        if self.left_by.take().is_some() {
            let (termed, killed) = (std::mem::take(&mut self.termed), std::mem::take(&mut self.killed));
            *self = Self { termed, killed, ..Self::new(by, number, None, std::mem::take(&mut self.ended)) };
            return;
        }
        self.number = number.or(self.number);
        let now = &mut self.deadlines;
        now.term = now.term.min(by.term);
        now.kill = now.kill.min(by.kill);
        now.give_up = now.give_up.min(by.give_up).max(now.kill);
        self.pause = Duration::ZERO;
    }

    /// Returns the time until the sweep must act, unless a child changes state before.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        let until = self.deadlines.next(now).map_or(Duration::ZERO, |at| at - now);
        until.min(self.pause)
    }

    /// Returns the number of the request and the processes that have exited, which are those not in `stuck`.
    pub(super) fn into_answer(self, stuck: &[Descendant]) -> (Option<u32>, Ended) {
        let stuck: Vec<i32> = stuck.iter().map(|stuck| stuck.pid).collect();
        (self.number, self.ended.without(&stuck))
    }

    /// Workers that live are ended as well.
    pub(super) fn ends_workers(&self) -> bool {
        self.left_by.is_none()
    }

    /// See [`Self::new`].
    pub(super) fn left_by(&self) -> Option<i32> {
        self.left_by
    }

    /// True if only cleaners are left.
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet_looks >= 2
    }

    pub(super) fn step(&mut self, nursery: &Nursery, has_children: bool) -> Verdict {
        if !has_children {
            return Verdict::Over { stuck: Vec::new(), spared: Vec::new(), held: Vec::new() };
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
            // The others do not end. These do.
            self.deadlines.give_up = now + LAST_MOMENT;
            self.pause = Duration::ZERO;
            return Verdict::GoOn;
        }
        // Do not wait for processes of living workers, because those continue to run.
        let may_stay = self.left_by.is_some() || !look.exempt.is_empty() || !look.held.is_empty();
        let only_harmless = is_quiet && !look.cleaners && may_stay;
        self.only_held = only_harmless.then(|| self.only_held.unwrap_or(now));
        let waits_for_tracer = look.held.iter().any(|pid| !nursery.held_by_tracers.contains(pid))
            && self.only_held.is_some_and(|since| now < since + held::LIMIT);
        if self.is_quiet() && only_harmless && !waits_for_tracer || now >= self.deadlines.give_up {
            let describe = |pids: Vec<i32>| pids.into_iter().map(tree::describe).collect();
            let stuck = look.others.iter().map(|listed| listed.pid).collect();
            return Verdict::Over { stuck: describe(stuck), spared: describe(look.exempt), held: look.held };
        }
        // Check again at once while new processes appear, because they may fork faster than this process checks.
        // Otherwise their exits wake this process up.
        self.pause = match (look.new, self.pause) {
            (true, _) => Duration::ZERO,
            (false, pause) if pause.is_zero() => FIRST_LOOK,
            (false, pause) => (2 * pause).min(LOOK_AGAIN),
        };
        Verdict::GoOn
    }

    /// Looks at all descendants, and signals those that are due.
    fn look(&mut self, nursery: &Nursery, signal: Option<Signal>, now: Instant) -> Look {
        let mut look = Look::default();
        let corpses = std::mem::take(&mut self.corpses);
        let living: Vec<i32> = self.left_by.iter().flat_map(|_| &nursery.workers).copied().collect();
        let mut others = BTreeSet::new();
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
            if let Some(signal) = signal {
                look.new |= self.signal(nursery, listed.pid, &target, signal);
            }
        }
        look
    }

    /// True if this session belongs to another worker that has exited, whose leftover processes this sweep does not
    /// kill.
    fn is_left_by_another(&self, nursery: &Nursery, session: i32) -> bool {
        self.left_by.is_some_and(|worker| worker != session && nursery.sessions.contains(&session))
    }

    /// Signals the process. Returns true if this signal was not sent to the process before.
    fn signal(&mut self, nursery: &Nursery, pid: i32, target: &Target, signal: Signal) -> bool {
        let is_new = if signal == Signal::SIGKILL { self.killed.insert(pid) } else { self.termed.insert(pid) };
        let was_named = signal == Signal::SIGKILL && self.termed.contains(&pid);
        if signal == Signal::SIGKILL {
            // Send SIGKILL every time, because the pid may belong to another process now. A second SIGKILL does no
            // harm.
            target.signal(signal);
        } else if is_new {
            target.signal(signal);
            // Continue the process as well, because a stopped process does not handle the signal.
            target.signal(Signal::SIGCONT);
        }
        if is_new && !was_named && !nursery.workers.contains(&pid) && !nursery.orphaned {
            self.ended.add(target);
        }
        is_new
    }
}

impl Nursery {
    /// True if the process has left its worker's session and reset the token: it is meant to stay.
    fn is_exempt(&self, pid: i32, status: Status) -> bool {
        self.marked && !self.sessions.contains(&status.session) && Token::is_reset(pid)
    }
}
