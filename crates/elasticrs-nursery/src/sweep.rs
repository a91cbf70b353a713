//! Kills the leftover processes of a dead nursery. Used by the agent and by sentinels.
//!
//! The kernel kills the workers when their nursery dies. Processes that the workers started become children of the next
//! subreaper (the agent, unless it runs in a host application) or of init. The functions of this module block until
//! these processes have exited, or until `give_up` has elapsed. Cleaners can extend this time limit.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use elasticrs_sys::process::{self, Waited};
use nix::sys::signal::Signal;

use super::cleaner::{LAST_MOMENT, LONGEST, Patience};
use super::held;
use super::protocol::SweepOutcome;
use super::token::Token;
use super::tree::{self, Listed, Signalled, Target};

const FIRST_PAUSE: Duration = Duration::from_micros(200);
/// Number of pids, counted back from the newest one, that are searched for processes to kill.
///
/// These pids are searched first and repeatedly, because a program that forks and exits in a loop always has a new pid
/// and evades a search through all processes.
const NEWEST: i32 = 3;
const NEWEST_ROUNDS: u32 = 20;
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
/// Grace period after the `give_up` deadline. A check that started before the deadline may kill processes during the
/// grace period, because a check of all processes may be slow.
const GRACE_OF_A_LOOK: Duration = Duration::from_millis(500);

/// Result of one pass over all processes that may have to be killed.
#[derive(Debug, Default)]
struct TokenPass {
    alive: BTreeSet<i32>,
    /// True if a process was found that still [unlinks shared memory](super::cleaner) and was therefore not killed.
    cleaners: bool,
    /// Exited children that cannot be reaped, because a tracer holds them.
    held: Vec<i32>,
    /// True if a process exited during the check. The check may then have missed the children of that process.
    unsure: bool,
}

/// Kills every process that carries the token, wherever it is in the process tree, except this process. If the nursery
/// is alive, it is killed as well.
///
/// Used by sentinels, and by agents in a host application, where only the application may reap its children. Stops
/// after two consecutive checks that find no process. This does not prove that all processes have exited, because a
/// program that repeatedly forks and exits can be too fast for the checks. A check takes about 15 µs for each process
/// on the machine.
pub fn kill_by_token(token: Token, give_up: Duration) -> SweepOutcome {
    let me = std::process::id().cast_signed();
    repeat(give_up, |ended| {
        let mut look = TokenPass::default();
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

/// Kills and reaps all descendants of this process, except the children in `known` and their descendants.
///
/// Used by an agent that is a child subreaper and does not run in a host application. Does not kill processes that
/// carry no token and are in no session of `workers`, because they left the job on purpose or never belonged to a
/// nursery.
pub fn sweep_children_of_self(known: &[i32], workers: &[i32], give_up: Duration) -> SweepOutcome {
    let me = std::process::id().cast_signed();
    repeat(give_up, |ended| {
        let mut look = TokenPass::default();
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
                match process::try_reap(pid) {
                    Waited::Pending => look.held.push(pid),
                    Waited::Changed { .. } | Waited::NoChildren => look.unsure = true,
                }
            }
        }
        look
    })
}

impl TokenPass {
    fn kill_by_token(&mut self, token: Token, pid: i32, ended: &mut Tally) {
        if Token::of(pid) != Some(token) {
            return;
        }
        // Check the process's token again, because the pid may have been reused before the pidfd was opened.
        match Target::open_any(pid) {
            Some(target) if Token::of(pid) == Some(token) => {
                if !tree::has_died(pid, target.status) {
                    self.kill(pid, &target, ended);
                }
            }
            // The process exited during the check, or the pid was reused.
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
            // Send no signal, because the check took so long that the caller's time limit has passed.
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
    ended: Signalled,
    /// Tracks how long to wait for processes that unlink shared memory, after all other processes have exited.
    patience: Patience,
    acts_until: Instant,
}

fn repeat(give_up: Duration, mut look: impl FnMut(&mut Tally) -> TokenPass) -> SweepOutcome {
    let mut give_up = Instant::now() + give_up;
    let (seen, ended, patience) = (BTreeSet::new(), Signalled::default(), Patience::default());
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
            // Processes that unlink shared memory have exceeded the time limit. Kill them too, and briefly wait for
            // them to exit.
            give_up = now + LAST_MOMENT;
        }
        tally.acts_until = give_up + GRACE_OF_A_LOOK;
        let is_over = empty == 2 || held_since.is_some_and(|since| now >= since + held::LIMIT);
        if is_over || now >= give_up {
            let stuck: Vec<i32> = if is_over { Vec::new() } else { look.alive.into_iter().collect() };
            let ended = tally.ended.without(&stuck);
            let stuck = stuck.into_iter().map(tree::describe).collect();
            let (more, spared) = (ended.more(), Vec::new());
            return SweepOutcome { ended: ended.named, more, stuck, spared, held: look.held };
        }
        // Check again immediately while new processes appear, because they may fork faster than this process checks.
        // Otherwise, sleep between checks, because nothing notifies this process when one of them exits.
        if empty == 0 && tally.seen.len() == known {
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}
