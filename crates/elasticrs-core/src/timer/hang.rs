//! Decides which ranks hang, from the heartbeats and output lines of the ranks. The result of a check is either the
//! ranks that hang, or the time of the next check. This module uses no clock and no I/O.
//!
//! A heartbeat is a sign of activity of its rank. If no rank sends heartbeats, an output line of any rank is a sign of
//! activity of all ranks. All times are nanoseconds of the monotonic clock. Invariants, cited by the tests:
//!
//! - **HANG-1** a rank is hung only if its limit has passed since its last sign of activity. Before its first sign of
//!   activity, it is hung only if there is a limit for the start and that limit has passed;
//! - **HANG-2** time in which the ranks were possibly unable to run does not count. This is the time for which the
//!   group was suspended and, if a call to [`Watch::look`] is more than a second late, the time since the previous
//!   call. Calls are due at least every [`LOOK_EVERY`];
//! - **HANG-3** the next check is due no later than the earliest time at which a rank can exceed its limit for steps.
//!   It is never due sooner than after [`LEAST_WAIT`], so that a very short limit does not keep the caller busy;
//! - **HANG-4** output lines count only while no rank has sent a heartbeat, and then only if all ranks are silent;
//! - **HANG-5** no rank is blamed because of a check that was made before or during a suspension of the group. Instead,
//!   the ranks are checked again;
//! - **HANG-6** a rank that has given a sign of activity since the check is not hung, see [`still_late`];
//! - **HANG-7** [`Watch::unwatched`] only returns ranks to which no limit applies, and only once for each group;
//! - **HANG-8** time in which a rank is being replaced does not count for the other ranks, because they may be waiting
//!   for that rank. A replacement lasts until the first sign of activity of the new process. For the other ranks, the
//!   time from their last sign of activity to the start of the replacement does not count either. During a replacement,
//!   at least [`LOOK_FOR_ABSENT`] passes between two checks;
//! - **HANG-9** once the program of a rank has returned, the limit for the exit applies to the rank instead of the
//!   limit for steps. If another heartbeat follows, the limit for steps applies again, because a background thread is
//!   still training;
//! - **HANG-10** a rank that waits for other ranks is not hung while another rank is in a section whose time limit has
//!   not passed, see [`Watch::excuse`]. The time limit of the waiting rank restarts when that section ends;
//! - **HANG-11** a rank that exits with code 0 before it was signalled is not hung. If the rank exits while its hang is
//!   being examined, the time limits of the other ranks restart, because they may have been waiting for this rank;
//! - **HANG-12** the late ranks are slow, not hung, if at least one of them works outside of collectives and each of
//!   the others works or waits in a collective, see [`slow`]. Slow ranks are examined again after each limit for steps.
//!   They count as hung when the longer limit for slow ranks has passed since their last sign of activity.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticrs_sys::clock::nanoseconds;
use elasticrs_sys::named_enum;

/// Maximum time between two calls to [`Watch::look`].
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Minimum time between two calls to [`Watch::look`].
pub(crate) const LEAST_WAIT: Duration = Duration::from_millis(1);
/// Minimum time between two calls to [`Watch::look`] while a rank is being replaced.
pub(crate) const LOOK_FOR_ABSENT: Duration = Duration::from_millis(100);
/// Tolerated delay of a call to [`Watch::look`]. After a longer delay, the agent or the whole machine must have been
/// stopped for a while.
const SLACK: Duration = Duration::from_secs(1);
/// Default minimum of the time limit for a step, if the limit is computed from the durations of earlier steps.
pub const LEAST_LEARNED: Duration = Duration::from_secs(60);
/// Time limit for a step until the durations of [`ENOUGH_STEPS`] steps are known.
pub(crate) const UNLEARNED: Duration = Duration::from_secs(30 * 60);
/// Factor by which a fixed limit for steps is multiplied for slow ranks.
const SLOWER: u32 = 10;
/// Number of step durations that must be known before a limit is learned.
pub(crate) const ENOUGH_STEPS: usize = 16;

/// Maximum time between two heartbeats of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepLimit {
    /// The limit is always this duration.
    Fixed(Duration),
    /// A limit computed from the durations of earlier steps, but never less than this duration. See [`learned`].
    Learned(Duration),
}

impl StepLimit {
    /// Returns the time limit for slow ranks. `step` is the current limit for a step. The result is never less than
    /// `step`.
    ///
    /// A fixed limit is multiplied by [`SLOWER`], but the product is capped at [`UNLEARNED`]. For a learned limit, the
    /// result is [`UNLEARNED`] or the minimum of the learned limit, whichever is longer.
    fn generous(self, step: Duration) -> Duration {
        match self {
            Self::Fixed(limit) => step.max(limit.saturating_mul(SLOWER).min(UNLEARNED)),
            Self::Learned(least) => step.max(UNLEARNED).max(least),
        }
    }
}

/// Time limits for the ranks of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Time limit between two heartbeats of a rank or, if no rank sends heartbeats, between two output lines.
    pub step: StepLimit,
    /// Time limit from the start of a rank's process to its first sign of activity. `None` if there is no limit.
    pub startup: Option<Duration>,
    /// Time limit from the return of a rank's program to the exit of its process. `None` if there is no limit.
    pub exit: Option<Duration>,
    /// Delay between reporting a hang and stopping the workers, so that the other nodes can collect diagnostics about
    /// their workers. Zero if there are no other nodes.
    pub stop_delay: Duration,
}

/// The last heartbeat of a rank, and the step and section in which it was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Beat {
    pub last: u64,
    pub step: Option<u64>,
    /// True if the worker counts its steps across restarts.
    pub is_global: bool,
    /// True if `step` is the number of optimizer steps that this library has counted.
    pub is_automatic: bool,
    pub section: Option<Section>,
    /// True if the program has returned and the process is exiting. In that case, `last` is the time at which the
    /// program returned.
    pub is_exiting: bool,
    /// Time of the last heartbeat before the main program finished. `None` if the main program is still running or sent
    /// no heartbeat.
    pub before_exit: Option<u64>,
    /// Durations of the most recent steps, in nanoseconds.
    pub steps: Vec<u64>,
}

/// A section of the program with its own time limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    pub name: String,
    /// Time limit in nanoseconds, measured from the start of the section or from the last heartbeat in it. `None` if
    /// there is no limit.
    pub limit: Option<u64>,
}

/// State of a rank at the time of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankState {
    Exited,
    /// The rank is running but has sent no heartbeat yet.
    NoHeartbeat,
    /// The rank is running, and this is the last heartbeat that it sent.
    Heartbeat(Beat),
}

named_enum! {
    /// Event that did not occur within its time limit.
    pub enum Missed {
        /// The first heartbeat of the rank.
        Startup = "startup",
        /// The next heartbeat of the rank.
        Step = "step",
        /// In a program section that has its own time limit: the next heartbeat, or the end of the section.
        Section = "section",
        /// The exit of the rank's process after the program had returned.
        Exit = "exit",
        /// The next output line of any rank. If no rank sends heartbeats, an output line counts as a sign of activity of
        /// all ranks.
        Line = "line",
    }
}

/// A rank that may be hanging. Usually, the rank has shown no activity for at least half of its time limit.
/// [`Watch::suspects`] may also return ranks with a shorter inactivity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overdue {
    /// Index of the rank in the group.
    pub rank: usize,
    pub missed: Missed,
    /// Time of the rank's last sign of activity. If there was none, the start time of the rank.
    pub since: u64,
    pub limit: Duration,
    /// True if the whole limit has passed.
    pub is_due: bool,
}

/// Result of [`Watch::look`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// No rank hangs. The next check is due at this time.
    LookAgain(u64),
    /// At least one rank hangs. The field contains all ranks that have been silent for at least half of their time
    /// limit, starting with the longest silence.
    Hung(Vec<Overdue>),
}

/// Learns the limit for a step from the durations of earlier steps. Returns ten times the median, three times the
/// longest step, or `least`, whichever is the longest. `None` if fewer than [`ENOUGH_STEPS`] durations are known.
///
/// The median adapts the limit to the job and is robust against single outliers. The longest step accounts for regular
/// events that take longer, such as an evaluation every hundred steps.
pub fn learned(mut steps: Vec<u64>, least: Duration) -> Option<Duration> {
    if steps.len() < ENOUGH_STEPS {
        return None;
    }
    let middle = steps.len() / 2;
    let (_, median, above) = steps.select_nth_unstable(middle);
    let longest = above.iter().copied().max().unwrap_or(*median);
    let nanoseconds = median.saturating_mul(10).max(longest.saturating_mul(3));
    Some(Duration::from_nanos(nanoseconds).max(least))
}

/// Time to subtract from a rank's inactive time, for example because the group was suspended.
///
/// Applies only if `since` is still the time of the rank's last activity. After new activity, nothing is subtracted.
#[derive(Debug, Clone, Copy, Default)]
struct Credit {
    since: u64,
    amount: u64,
}

impl Credit {
    fn of(self, since: u64) -> u64 {
        if self.since == since { self.amount } else { 0 }
    }

    /// Adds `amount` to the time that is subtracted from a rank's inactive time. The sum is at most the time from
    /// `since`, the rank's last activity, to `now`.
    fn add(&mut self, since: u64, amount: u64, now: u64) {
        let amount = self.of(since).saturating_add(amount).min(now.saturating_sub(since));
        *self = Self { since, amount };
    }
}

/// State of the hang detection for one group.
#[derive(Debug)]
pub struct Watch {
    limits: Limits,
    started: u64,
    /// Start time of each rank's process.
    starts: Vec<u64>,
    /// Failed ranks whose replacements have shown no activity yet.
    absent: BTreeSet<usize>,
    /// True if a rank has failed since the last check.
    has_lost: bool,
    /// Time to subtract from the inactive time of each rank. The last entry is subtracted from the time since the last
    /// output line of any rank.
    credits: Vec<Credit>,
    looked: u64,
    frozen_at: Option<u64>,
    thawed: u64,
    unwatched_reported: bool,
    /// Ranks that [`Watch::still_exiting`] has already returned.
    exits_reported: BTreeSet<usize>,
    excuse: Option<Excuse>,
    /// Slow ranks. Each value contains the time of the rank's last sign of activity, and the extended time limit that
    /// started at that time.
    slow: BTreeMap<usize, (u64, Duration)>,
}

/// Ranks that are not considered hung, because they wait for a rank in a section.
#[derive(Debug)]
struct Excuse {
    ranks: BTreeSet<usize>,
    /// Rank that is in the section, and the time of its last heartbeat. Its next heartbeat ends the section.
    section_of: (usize, u64),
}

impl Watch {
    /// Creates the state for a group of `ranks` ranks that was started at the time `started`.
    pub fn new(limits: Limits, ranks: usize, started: u64) -> Self {
        Self {
            limits,
            started,
            starts: vec![started; ranks],
            absent: BTreeSet::new(),
            has_lost: false,
            credits: vec![Credit::default(); ranks + 1],
            looked: started,
            frozen_at: None,
            thawed: started,
            unwatched_reported: false,
            exits_reported: BTreeSet::new(),
            excuse: None,
            slow: BTreeMap::new(),
        }
    }

    /// Records that this rank has failed while the other ranks continue.
    pub fn lose(&mut self, rank: usize) {
        self.absent.insert(rank);
        self.has_lost = true;
    }

    /// Records that a replacement for this rank has started.
    pub fn restart(&mut self, rank: usize, now: u64) {
        (self.starts[rank], self.credits[rank]) = (now, Credit::default());
        self.exits_reported.remove(&rank);
    }

    /// Returns the time limit for a process to exit after its program has returned. `None` if there is no limit.
    pub fn exit_limit(&self) -> Option<Duration> {
        self.limits.exit
    }

    /// Returns the delay between reporting a hang and stopping the workers.
    pub fn stop_delay(&self) -> Duration {
        self.limits.stop_delay
    }

    /// Records that the group is suspended from now on.
    pub fn freeze(&mut self, now: u64) {
        self.frozen_at.get_or_insert(now);
    }

    /// Records that the group is resumed.
    pub(crate) fn thaw(&mut self, now: u64, seen: &[RankState], line: Option<u64>) {
        if let Some(since) = self.frozen_at.take() {
            self.forgive(now.saturating_sub(since), now, seen, line);
            (self.looked, self.thawed) = (now, now);
        }
    }

    /// Returns true if a hang check made at the time `looked` is still valid. A suspension of the group during or after
    /// the check makes it invalid, because suspended ranks cannot send heartbeats.
    pub fn holds(&self, looked: u64) -> bool {
        self.frozen_at.is_none() && self.thawed <= looked
    }

    /// Checks at the time `now` whether a rank hangs. `line` is the time of the last output line of any rank.
    pub fn look(&mut self, now: u64, seen: &[RankState], line: Option<u64>) -> Verdict {
        if self.frozen_at.is_some() {
            return Verdict::LookAgain(now.saturating_add(nanoseconds(LOOK_EVERY)));
        }
        let (late, next) = self.late(now, seen, line, u64::MAX);
        if !late.iter().any(|overdue| overdue.is_due) {
            let least = if self.absent.is_empty() { LEAST_WAIT } else { LOOK_FOR_ABSENT };
            return Verdict::LookAgain(next.max(now.saturating_add(nanoseconds(least))));
        }
        Verdict::Hung(late)
    }

    /// Records that `ranks` wait for other ranks while the rank `busy` is in a section. The inactive time of `ranks`
    /// does not count until the next heartbeat of `busy`, or until the time limit of its section passes (**HANG-10**).
    ///
    /// Returns false if `busy` is not in a section.
    pub(crate) fn excuse(&mut self, ranks: BTreeSet<usize>, busy: usize, seen: &[RankState]) -> bool {
        let Some(last) = seen.get(busy).and_then(in_section) else { return false };
        self.excuse = Some(Excuse { ranks, section_of: (busy, last) });
        true
    }

    /// Extends the time limits of these slow ranks by one limit for steps, up to the limit for slow ranks
    /// (**HANG-12**). When an extended limit has passed, the rank is examined again.
    ///
    /// Returns `None` if no time limit can be extended, because all of them have already reached the limit for slow
    /// ranks. Otherwise, returns that limit and a flag. The flag is true if at least one rank was not known to be slow
    /// since its last sign of activity.
    pub fn slow(&mut self, ranks: &[Overdue], seen: &[RankState]) -> Option<(Duration, bool)> {
        let step = self.step_limit(seen);
        let generous = self.limits.step.generous(step);
        if !ranks.iter().any(|overdue| overdue.limit < generous) {
            return None;
        }
        let mut is_new = false;
        for overdue in ranks {
            let known =
                self.slow.insert(overdue.rank, (overdue.since, overdue.limit.saturating_add(step).min(generous)));
            is_new |= known.is_none_or(|(since, _)| since != overdue.since);
        }
        Some((generous, is_new))
    }

    /// Does not count the time for which ranks waited for a rank in a section. Stops excusing them when the section has
    /// ended or exceeded its time limit. `terms` contains the time limits of all ranks.
    fn forgive_excused(&mut self, now: u64, seen: &[RankState], terms: &[Overdue]) {
        let Some(Excuse { ranks, section_of: (busy, last) }) = self.excuse.take() else { return };
        let limit = terms.iter().find(|term| term.rank == busy).map(|term| term.limit);
        let silent = now.saturating_sub(last).saturating_sub(self.credits[busy].of(last));
        let is_open = seen.get(busy).and_then(in_section) == Some(last);
        for term in terms.iter().filter(|term| ranks.contains(&term.rank) && term.missed == Missed::Step) {
            self.credits[term.rank].add(term.since, u64::MAX, now);
        }
        if is_open && limit.is_none_or(|limit| silent < nanoseconds(limit)) {
            self.excuse = Some(Excuse { ranks, section_of: (busy, last) });
        }
    }

    /// Returns the local ranks that may have caused a hang on another node, in order of decreasing inactive time.
    ///
    /// A rank is returned if it has been inactive for at least half of its own time limit, or for at least half of
    /// `silence`. `silence` is the inactive time of the hung rank in nanoseconds.
    pub(crate) fn suspects(&mut self, now: u64, seen: &[RankState], line: Option<u64>, silence: u64) -> Vec<Overdue> {
        if self.frozen_at.is_some() { Vec::new() } else { self.late(now, seen, line, silence).0 }
    }

    /// Returns the ranks that hang detection does not cover, and the time limit of a training step.
    ///
    /// Each such rank has no time limit, and sent no heartbeat within the limit of a step after its start. `None` if
    /// there is no such rank, if the group is suspended, or if an earlier call has returned ranks.
    pub fn unwatched(&mut self, now: u64, seen: &[RankState], line: Option<u64>) -> Option<(Vec<usize>, Duration)> {
        let limit = self.step_limit(seen);
        if self.unwatched_reported || self.frozen_at.is_some() {
            return None;
        }
        let watched: Vec<usize> = self.terms(seen, line, limit).iter().map(|term| term.rank).collect();
        let has_run = |rank: usize| {
            now.saturating_sub(self.starts[rank]).saturating_sub(self.credits[rank].of(self.starts[rank]))
        };
        let is_unwatched = |rank: usize| {
            seen[rank] == RankState::NoHeartbeat && !watched.contains(&rank) && has_run(rank) >= nanoseconds(limit)
        };
        let ranks: Vec<usize> = (0..seen.len()).filter(|rank| is_unwatched(*rank)).collect();
        self.unwatched_reported = !ranks.is_empty();
        self.unwatched_reported.then_some((ranks, limit))
    }

    /// Returns the ranks whose exit has taken longer than the time limit of a training step. Also returns the limit.
    ///
    /// The exit of a rank starts when its program has returned. Ranks that an earlier call has returned are omitted.
    /// `None` if no ranks remain or the group is suspended.
    pub(crate) fn still_exiting(&mut self, now: u64, seen: &[RankState]) -> Option<(Vec<usize>, Duration)> {
        if self.frozen_at.is_some() {
            return None;
        }
        let limit = self.step_limit(seen);
        let is_late = |rank: usize, last: u64| {
            now.saturating_sub(last).saturating_sub(self.credits[rank].of(last)) >= nanoseconds(limit)
        };
        let is_new = |(rank, seen): (usize, &RankState)| match seen {
            RankState::Heartbeat(Beat { last, section: None, is_exiting: true, .. }) if is_late(rank, *last) => {
                (!self.exits_reported.contains(&rank)).then_some(rank)
            }
            _ => None,
        };
        let ranks: Vec<usize> = seen.iter().enumerate().filter_map(is_new).collect();
        self.exits_reported.extend(&ranks);
        (!ranks.is_empty()).then_some((ranks, limit))
    }

    /// Returns the ranks that were inactive for half of their time limit or half of `silence`, and the earliest time at
    /// which a rank can reach its limit. `silence` is the inactive time of a hung rank on another node.
    fn late(&mut self, now: u64, seen: &[RankState], line: Option<u64>, silence: u64) -> (Vec<Overdue>, u64) {
        let is_first = std::mem::take(&mut self.has_lost);
        let gap = if is_first { u64::MAX } else { now.saturating_sub(self.looked) };
        if !is_first && gap > nanoseconds(LOOK_EVERY + SLACK) {
            self.forgive(gap, now, seen, line);
        } else if is_first || !self.absent.is_empty() {
            let own: Vec<(usize, Credit)> = self.absent.iter().map(|&rank| (rank, self.credits[rank])).collect();
            self.forgive(gap, now, seen, line);
            for (rank, credit) in own {
                self.credits[rank] = credit;
            }
            self.find_absent(seen, line);
        }
        self.looked = now;
        let limit = self.step_limit(seen);
        let mut next = now.saturating_add(nanoseconds(limit));
        let mut late = Vec::new();
        let terms = self.terms(seen, line, limit);
        self.forgive_excused(now, seen, &terms);
        for mut overdue in terms {
            let credit = match overdue.missed {
                Missed::Line => self.credits[self.credits.len() - 1].of(overdue.since),
                _ => self.credits[overdue.rank].of(overdue.since),
            };
            let silent = now.saturating_sub(overdue.since).saturating_sub(credit);
            let left = nanoseconds(overdue.limit).saturating_sub(silent);
            overdue.is_due = left == 0;
            next = next.min(now.saturating_add(left));
            if silent >= left || silent >= silence.div_ceil(2) {
                late.push(overdue);
            }
        }
        late.sort_by_key(|overdue| overdue.since);
        (late, next)
    }

    /// Removes ranks from the set of absent ranks once their replacements have shown activity.
    fn find_absent(&mut self, seen: &[RankState], line: Option<u64>) {
        let nobody_beats = !seen.iter().any(|seen| matches!(seen, RankState::Heartbeat(_)));
        let starts = &self.starts;
        self.absent.retain(|&rank| match seen.get(rank) {
            Some(RankState::Heartbeat(_)) => false,
            Some(RankState::NoHeartbeat) => !(nobody_beats && line.is_some_and(|line| line > starts[rank])),
            Some(RankState::Exited) | None => true,
        });
    }

    fn step_limit(&self, seen: &[RankState]) -> Duration {
        match self.limits.step {
            StepLimit::Fixed(limit) => limit,
            StepLimit::Learned(least) => {
                let steps = seen.iter().filter_map(|seen| match seen {
                    RankState::Heartbeat(beat) => Some(&beat.steps),
                    RankState::Exited | RankState::NoHeartbeat => None,
                });
                learned(steps.flatten().copied().collect(), least).unwrap_or(UNLEARNED.max(least))
            }
        }
    }

    /// Returns the expected event, the start of the time limit, and the limit, for each rank that has a limit.
    fn terms(&self, seen: &[RankState], line: Option<u64>, step: Duration) -> Vec<Overdue> {
        let nobody_beats = !seen.iter().any(|seen| matches!(seen, RankState::Heartbeat(_)));
        let mut terms = Vec::new();
        for (rank, seen) in seen.iter().enumerate() {
            let (missed, since, limit) = match (seen, line) {
                (RankState::Exited, _) => continue,
                (RankState::Heartbeat(Beat { last, section: None, is_exiting: true, .. }), _) => {
                    (Missed::Exit, *last, self.limits.exit)
                }
                (RankState::Heartbeat(Beat { last, section: None, .. }), _) => (Missed::Step, *last, Some(step)),
                (RankState::Heartbeat(Beat { last, section: Some(section), .. }), _) => {
                    (Missed::Section, *last, section.limit.map(Duration::from_nanos))
                }
                (RankState::NoHeartbeat, Some(line)) if nobody_beats => (Missed::Line, line, Some(step)),
                (RankState::NoHeartbeat, _) => (Missed::Startup, self.starts[rank], self.limits.startup),
            };
            let slow = self.slow.get(&rank).filter(|_| matches!(missed, Missed::Step | Missed::Line));
            let longer = slow.filter(|(of, _)| *of == since).map_or(Duration::ZERO, |(_, longer)| *longer);
            let limit = limit.map(|limit| limit.max(longer));
            terms.extend(limit.map(|limit| Overdue { rank, missed, since, limit, is_due: false }));
        }
        terms
    }

    /// Restarts the time limits of all ranks at the time `now`.
    pub(crate) fn forgive_all(&mut self, now: u64, seen: &[RankState], line: Option<u64>) {
        self.forgive(u64::MAX, now, seen, line);
    }

    fn forgive(&mut self, gap: u64, now: u64, seen: &[RankState], line: Option<u64>) {
        let signs = seen.iter().zip(&self.starts).map(|(seen, started)| match seen {
            RankState::Heartbeat(beat) => beat.last,
            RankState::NoHeartbeat | RankState::Exited => *started,
        });
        let signs: Vec<u64> = signs.chain([line.unwrap_or(self.started)]).collect();
        for (credit, since) in self.credits.iter_mut().zip(signs) {
            credit.add(since, gap, now);
        }
    }
}

/// Returns the time of the rank's last heartbeat if the rank is in a section. Otherwise returns `None`.
pub(crate) fn in_section(seen: &RankState) -> Option<u64> {
    match seen {
        RankState::Heartbeat(Beat { last, section: Some(_), is_exiting: false, .. }) => Some(*last),
        _ => None,
    }
}

/// Drops the ranks from `late` that have shown activity since they were found to be late.
///
/// `seen` contains the latest heartbeats. `line` is the time of the last output line of any rank, which counts as
/// activity if no rank sends heartbeats.
pub(crate) fn still_late(mut late: Vec<Overdue>, seen: &[RankState], line: Option<u64>) -> Vec<Overdue> {
    let somebody_beats = seen.iter().any(|seen| matches!(seen, RankState::Heartbeat(_)));
    late.retain(|overdue| match (overdue.missed, seen.get(overdue.rank)) {
        (Missed::Line, _) => !somebody_beats && line.is_none_or(|line| line <= overdue.since),
        // If the process is exiting, use its last heartbeat before the exit. The exit does not prove progress, because
        // the signal that requests stack traces may have interrupted a hung call and caused the exit.
        (_, Some(RankState::Heartbeat(beat))) if beat.is_exiting => {
            beat.before_exit.is_none_or(|last| last <= overdue.since)
        }
        (_, Some(RankState::Heartbeat(beat))) => beat.last <= overdue.since,
        (_, Some(RankState::NoHeartbeat | RankState::Exited) | None) => true,
    });
    late
}

/// State of the collectives in the flight record of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Collectives {
    /// The state is unknown, for example because the process has imported torch but has written no flight record.
    #[default]
    Unknown,
    /// The process has not imported torch.
    Unused,
    /// At least one collective is not complete.
    Pending,
    /// All collectives are complete.
    Complete,
}

/// Activity of a rank whose heartbeat is late.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activity {
    #[default]
    Unknown,
    /// The rank is in a collective. The rank may still use a CPU, because some collectives wait in a busy loop.
    Waits,
    /// The rank is outside of collectives, and uses a CPU, reads or writes.
    Works,
    /// The rank is outside of collectives, and is idle.
    Blocked,
}

/// Returns the activity of a rank. `works` measures whether the rank uses a CPU, reads or writes. It is called only if
/// the rank is outside of collectives, because the measurement takes time.
///
/// `frame` is the innermost frame of the rank's Python program. `None` if the frame is unknown. If the rank uses torch,
/// a frame outside of torch's collectives is not sufficient. NCCL runs collectives in the background, so the program
/// may wait for them in other code.
pub fn activity(frame: Option<&str>, collectives: Collectives, works: impl FnOnce() -> bool) -> Activity {
    let Some(frame) = frame else { return Activity::Unknown };
    let is_call = frame.contains("/torch/distributed/") && !frame.contains("/torch/distributed/checkpoint/");
    match collectives {
        Collectives::Pending => Activity::Waits,
        _ if is_call => Activity::Waits,
        Collectives::Unknown => Activity::Unknown,
        Collectives::Unused | Collectives::Complete => {
            if works() {
                Activity::Works
            } else {
                Activity::Blocked
            }
        }
    }
}

/// Returns the working ranks in `late` if these ranks explain why all heartbeats are late (**HANG-12**). Returns an
/// empty list if a rank may be hung. `activity` returns the activity of a rank.
///
/// The ranks in `late` are slow, not hung, if each of them works or waits in a collective, and at least one of them
/// works. If all ranks wait, their collectives do not match or the network hangs. If a rank is blocked, the other ranks
/// may be waiting for that rank. Only the limit for steps is extended. The limits for sections, the start and the exit
/// are never extended.
pub fn slow(late: &[Overdue], activity: impl Fn(usize) -> Activity) -> Vec<usize> {
    let is_slow = |overdue: &Overdue| {
        matches!(overdue.missed, Missed::Step | Missed::Line)
            && matches!(activity(overdue.rank), Activity::Works | Activity::Waits)
    };
    if !late.iter().all(is_slow) {
        return Vec::new();
    }
    late.iter().map(|overdue| overdue.rank).filter(|rank| activity(*rank) == Activity::Works).collect()
}

/// State of one rank, from which [`blame`] decides whether the rank caused a hang.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Suspect {
    /// True if the rank has been silent for at least half of its limit.
    pub is_late: bool,
    /// True if the whole limit has passed.
    pub is_due: bool,
    pub is_stopped: bool,
    pub step: Option<u64>,
    pub last: u64,
    /// Innermost frame of the rank's Python program. `None` if it is unknown.
    pub frame: Option<String>,
}

/// A rank that hangs on another node, as reported by that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteHang {
    /// Time since the rank's last sign of activity.
    pub silence: Duration,
    pub step: Option<u64>,
    /// Innermost frame of the rank's Python program. `None` if it is unknown.
    pub frame: Option<String>,
}

named_enum! {
    /// Reason for blaming a rank, ordered from the strongest to the weakest.
    pub enum Ground {
        /// The rank was stopped by a signal.
        Stopped = "stopped",
        /// The rank is at an earlier step than all others.
        Behind = "behind",
        /// The other inactive ranks are all at one place in the program, or are all waiting in torch.
        Elsewhere = "elsewhere",
        /// The rank has been silent the longest, and no other late rank is at the same place in the program.
        Apart = "apart",
        /// The rank has been silent the longest.
        Oldest = "oldest",
    }
}

/// Returns the index of the rank that the others are waiting for, and the reason for blaming it. Usually, most of the
/// late ranks hang only because they are waiting in a collective for the rank to blame.
///
/// The first criterion that applies decides: a rank that was stopped by a signal; the only rank at the earliest step;
/// the only one of three or more ranks that is at a different place in the program; the only rank that is not waiting
/// for other ranks in torch; the rank that has been silent the longest, with a preference for ranks whose whole limit
/// has passed. Except for stopped ranks, only ranks at the earliest step and ranks without a known step are blamed.
/// Returns `None` if no rank is late.
pub fn blame(suspects: &[Suspect]) -> Option<(usize, Ground)> {
    let late = || suspects.iter().enumerate().filter(|(_, suspect)| suspect.is_late);
    if let Some((stopped, _)) = late().find(|(_, suspect)| suspect.is_stopped) {
        return Some((stopped, Ground::Stopped));
    }
    let least = late().filter_map(|(_, suspect)| suspect.step).min();
    let behind: Vec<usize> = late().filter(|(_, suspect)| suspect.step == least).map(|(index, _)| index).collect();
    // If a rank has not reported its step, do not compare the steps, because that rank may be at an earlier step.
    let are_comparable = late().count() > 1 && late().all(|(_, suspect)| suspect.step.is_some());
    if let ([only], true) = (behind.as_slice(), are_comparable) {
        return Some((*only, Ground::Behind));
    }
    let may_be = |suspect: &Suspect| suspect.step == least || suspect.step.is_none();
    let oldest =
        || late().filter(|(_, suspect)| may_be(suspect)).min_by_key(|(_, suspect)| (!suspect.is_due, suspect.last));
    let odd = odd_one_out(suspects).filter(|odd| may_be(&suspects[*odd])).map(|odd| (odd, Ground::Elsewhere));
    odd.or_else(|| {
        let (index, suspect) = oldest()?;
        let others = || late().filter(|(other, _)| *other != index).filter_map(|(_, other)| other.frame.as_ref());
        let is_apart =
            suspect.frame.as_ref().is_some_and(|frame| others().count() > 0 && others().all(|at| at != frame));
        Some((index, if is_apart { Ground::Apart } else { Ground::Oldest }))
    })
}

/// Returns the index of the local rank for which `remote`, a hung rank on another node, is waiting. Also returns the
/// reason for blaming the local rank. `None` if `remote` itself caused the hang.
pub(crate) fn blame_beside(suspects: &[Suspect], remote: &RemoteHang) -> Option<(usize, Ground)> {
    let RemoteHang { step, frame, .. } = remote;
    // Put `remote` first, because `blame` returns the first of several equally suspect ranks.
    let named = Suspect { is_late: true, is_due: true, step: *step, frame: frame.clone(), ..Suspect::default() };
    let all: Vec<Suspect> = [named].into_iter().chain(suspects.iter().cloned()).collect();
    let (index, ground) = blame(&all)?;
    Some((index.checked_sub(1)?, ground))
}

/// Finds the rank whose heartbeat is late and whose stack frame differs from the frame that all other late ranks share.
/// At least three frames must be known.
///
/// If there is no such rank, finds the only late rank that is not waiting in torch.
fn odd_one_out(suspects: &[Suspect]) -> Option<usize> {
    let late = || suspects.iter().enumerate().filter(|(_, suspect)| suspect.is_late);
    let placed: Vec<(usize, &str)> =
        late().filter_map(|(index, suspect)| suspect.frame.as_deref().map(|frame| (index, frame))).collect();
    let alone = |frame: &str| placed.iter().filter(|(_, other)| *other == frame).count() == 1;
    let odd = only(&placed, alone).filter(|(_, frame)| {
        let mut others = placed.iter().map(|(_, other)| other).filter(|other| other != &frame);
        let first = others.next();
        placed.len() >= 3 && others.all(|other| Some(other) == first)
    });
    // Blame the only inactive rank that is not waiting in torch. Do not blame it if the stack frame of another inactive
    // rank is unknown, because that rank may not be waiting in torch either.
    let are_known = placed.len() > 1 && placed.len() == late().count();
    odd.or_else(|| only(&placed, |frame| !waits(frame)).filter(|_| are_known)).map(|(index, _)| index)
}

fn only<'a>(placed: &[(usize, &'a str)], is: impl Fn(&str) -> bool) -> Option<(usize, &'a str)> {
    let mut found = placed.iter().filter(|(_, frame)| is(frame));
    found.next().copied().filter(|_| found.next().is_none())
}

/// Returns true if torch waits for other ranks in this frame: in a collective, or during a backward pass.
pub fn waits(frame: &str) -> bool {
    frame.contains("/torch/distributed/") || frame.ends_with(" in _engine_run_backward")
}

#[cfg(test)]
mod tests;
