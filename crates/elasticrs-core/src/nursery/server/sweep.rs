//! Ending all descendants until none is left.
//!
//! Each step reaps, looks at who is there, and signals by the phase: nobody while lingering, SIGTERM once to each
//! during the grace, SIGKILL after it. [Cleaners](crate::nursery::cleaner) come last. The only proof of the end is `ECHILD`. Where exempt processes keep it away, two
//! looks in a row that find nobody else take its place.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::Nursery;
use crate::nursery::cleaner::{LAST_MOMENT, LONGEST, Patience};
use crate::nursery::held;
use crate::nursery::protocol::Descendant;
use crate::nursery::token::Token;
use crate::nursery::tree::{self, Ended, Listed, Status, Target};

/// A process that descends from a child, not from us, ends without a signal to us; this often we look.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const FIRST_LOOK: Duration = Duration::from_micros(200);

/// When what happens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadlines {
    term: Instant,
    kill: Instant,
    give_up: Instant,
}

impl Deadlines {
    pub(super) fn new(now: Instant, linger: Duration, grace: Duration, give_up: Duration) -> Self {
        // A span beyond the clock's range is as good as a year.
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
    /// Only what this worker has left is ended, and those that live are spared.
    left_by: Option<i32>,
    /// Who got SIGTERM, and who SIGKILL, so far.
    termed: BTreeSet<i32>,
    killed: BTreeSet<i32>,
    ended: Ended,
    /// With cleaners, when nobody else is left.
    patience: Patience,
    /// So many looks in a row have found nobody but cleaners and exempt processes.
    quiet_looks: u8,
    /// Children that had ended at the last look. The next one finds only those that a tracer does not let go.
    corpses: BTreeSet<i32>,
    /// Since when there is nobody else.
    only_held: Option<Instant>,
    pause: Duration,
}

/// What a look has found.
#[derive(Debug, Default)]
struct Look {
    others: Vec<Listed>,
    exempt: Vec<i32>,
    /// Somebody is spared who cleans up.
    cleaners: bool,
    /// They have ended, and `wait4` does not give them.
    held: Vec<i32>,
    /// Somebody ended meanwhile, and may have left children to us that were not seen. A zombie that waits for another
    /// parent than us left them already.
    unsure: bool,
    /// Somebody was signalled for the first time.
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

    /// Takes the earlier one of each deadline, or becomes a sweep of all.
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

    /// How long nothing needs to be done unless a child changes.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        let until = self.deadlines.next(now).map_or(Duration::ZERO, |at| at - now);
        until.min(self.pause)
    }

    /// The number of the request, and who has ended; `stuck` have not.
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

    /// Nobody but those who clean up is left.
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
        // Of workers that live there is no end to wait for.
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
        // Whoever forks faster than we look must be looked at again at once; otherwise their ends wake us.
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

    /// True for the session of a worker that has ended, and whose turn it is not.
    fn is_left_by_another(&self, nursery: &Nursery, session: i32) -> bool {
        self.left_by.is_some_and(|worker| worker != session && nursery.sessions.contains(&session))
    }

    /// Says whether the process is one that had not got this signal before.
    fn signal(&mut self, nursery: &Nursery, pid: i32, target: &Target, signal: Signal) -> bool {
        let is_new = if signal == Signal::SIGKILL { self.killed.insert(pid) } else { self.termed.insert(pid) };
        let was_named = signal == Signal::SIGKILL && self.termed.contains(&pid);
        if signal == Signal::SIGKILL {
            // Every time: the pid may be another process by now, and a second SIGKILL does no harm.
            target.signal(signal);
        } else if is_new {
            target.signal(signal);
            // A stopped process does not see the signal before it goes on.
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
