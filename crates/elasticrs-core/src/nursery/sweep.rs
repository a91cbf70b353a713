//! Ending what a lost nursery has left behind, from the agent or a sentinel.
//!
//! Workers die with their nursery, but what they had started goes to the next subreaper (the agent, where the process
//! is its own) or to init. Both functions block for as long as the processes take to end, at most `give_up`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::cleaner::{LAST_MOMENT, LONGEST, Patience};
use super::held;
use super::protocol::Descendant;
use super::token::Token;
use super::tree::{self, Ended, Listed, Target};
use crate::sys::wait::{self, Waited};

const FIRST_PAUSE: Duration = Duration::from_micros(200);
/// A process that forks, exits and goes on in its child is always among the newest: those are looked at first, and
/// several times, because reading all of `/proc` takes longer than such a process lives.
const NEWEST: i32 = 3;
const NEWEST_ROUNDS: u32 = 20;
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
/// How long a look may take before it does nothing more.
const GRACE_OF_A_LOOK: Duration = Duration::from_millis(500);

/// What a sweep has done.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Who had to be killed.
    pub ended: Ended,
    /// Who was not gone after `give_up`.
    pub stuck: Vec<Descendant>,
    /// Children that have ended and that a tracer does not let go.
    pub held: Vec<i32>,
}

/// One look at the processes that may have to go.
#[derive(Debug, Default)]
struct Look {
    alive: BTreeSet<i32>,
    /// Somebody is spared who cleans up.
    cleaners: bool,
    /// Children that have ended and that cannot be collected.
    held: Vec<i32>,
    /// Somebody vanished while we looked, and may have left children that were not seen.
    unsure: bool,
}

/// Kills every other process that carries the token, wherever it is in the tree: the nursery too, if it lives.
///
/// For host applications, whose children may not be reaped by anybody else. Two looks in a row that find nobody count
/// as the end; that is no proof: a process that forks and exits faster than a look can slip through. A look costs
/// about 15 µs for each process of the machine.
pub fn kill_by_token(token: Token, give_up: Duration) -> Outcome {
    let me = std::process::id().cast_signed();
    repeat(give_up, |ended| {
        let mut look = Look::default();
        for _ in 0..NEWEST_ROUNDS {
            let newest = tree::newest_pid();
            for pid in (newest - NEWEST..=newest + 1).rev().filter(|&pid| pid != me) {
                look.kill_by_token(token, pid, ended);
            }
        }
        for pid in tree::pids().into_iter().rev().filter(|&pid| pid != me) {
            look.kill_by_token(token, pid, ended);
        }
        look
    })
}

/// Kills and reaps every process below this one, apart from the `known` children and what is below them.
///
/// For an agent that is a child subreaper and owns its process. Spared is what carries no token and is in no session
/// of `workers`: it left on purpose, or was never a nursery's.
pub fn sweep_children_of_self(known: &[i32], workers: &[i32], give_up: Duration) -> Outcome {
    let me = std::process::id().cast_signed();
    repeat(give_up, |ended| {
        let mut look = Look::default();
        for listed in tree::descendants(me, known) {
            let Listed { pid, parent } = listed;
            let Some(target) = Target::open(me, listed) else {
                look.unsure = true;
                continue;
            };
            if Token::of(pid).is_none() && !workers.contains(&target.status.session) {
                continue;
            }
            if !tree::has_died(pid, target.status) {
                look.kill(pid, &target, ended);
            } else if parent == me {
                match wait::try_reap(pid) {
                    Waited::Pending => look.held.push(pid),
                    Waited::Changed { .. } | Waited::NoChildren => look.unsure = true,
                }
            }
        }
        look
    })
}

impl Look {
    fn kill_by_token(&mut self, token: Token, pid: i32, ended: &mut Tally) {
        if Token::of(pid) != Some(token) {
            return;
        }
        // The token is read again behind the descriptor: the pid may have changed its owner.
        match Target::open_any(pid) {
            Some(target) if Token::of(pid) == Some(token) => {
                if !tree::has_died(pid, target.status) {
                    self.kill(pid, &target, ended);
                }
            }
            // It ended while we looked.
            _ => self.unsure = true,
        }
    }

    fn kill(&mut self, pid: i32, target: &Target, ended: &mut Tally) {
        let now = Instant::now();
        if ended.patience.spares(target, now) {
            self.cleaners = true;
            return;
        }
        if now > ended.acts_until {
            // Something held this look up, and whoever waited for it has gone on.
            return;
        }
        target.signal(Signal::SIGKILL);
        self.alive.insert(pid);
        if ended.seen.insert(pid) {
            ended.ended.add(target);
        }
    }
}

#[derive(Debug)]
struct Tally {
    seen: BTreeSet<i32>,
    ended: Ended,
    /// With cleaners, when nobody else is left.
    patience: Patience,
    acts_until: Instant,
}

fn repeat(give_up: Duration, mut look: impl FnMut(&mut Tally) -> Look) -> Outcome {
    let mut give_up = Instant::now() + give_up;
    let (seen, ended, patience) = (BTreeSet::new(), Ended::default(), Patience::default());
    let mut tally = Tally { seen, ended, patience, acts_until: give_up + GRACE_OF_A_LOOK };
    let mut empty = 0;
    let mut held_since: Option<Instant> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let known = tally.seen.len();
        let look = look(&mut tally);
        let now = Instant::now();
        let is_quiet = look.alive.is_empty() && !look.unsure;
        let is_over = is_quiet && !look.cleaners;
        empty = if is_over && look.held.is_empty() { empty + 1 } else { 0 };
        held_since = is_over.then(|| held_since.unwrap_or(now));
        if is_quiet && look.cleaners && tally.patience.begin(now) {
            give_up = give_up.max(now + LONGEST);
        } else if now >= give_up && look.cleaners && tally.patience.end() {
            // The others do not end. These do.
            give_up = now + LAST_MOMENT;
        }
        tally.acts_until = give_up + GRACE_OF_A_LOOK;
        let is_over = empty == 2 || held_since.is_some_and(|since| now >= since + held::LIMIT);
        if is_over || now >= give_up {
            let stuck: Vec<i32> = if is_over { Vec::new() } else { look.alive.into_iter().collect() };
            let ended = tally.ended.without(&stuck);
            return Outcome { ended, stuck: stuck.into_iter().map(tree::describe).collect(), held: look.held };
        }
        // Whoever forks faster than we look must be looked at again at once; nobody tells us when the others end.
        if empty == 0 && tally.seen.len() == known {
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}
