//! Workers that hang: their heartbeats, the look at them when a limit passes, and the evidence before anybody is reaped.
//!
//! See [`crate::timer::hang`] for the rules and [`super::super::evidence`] for what is kept.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrs_runtime::clock::Stamp;
use tokio::task::JoinHandle;

use super::{Current, Running, Task};
use crate::exit::WorkerExit;
use crate::limits;
use crate::spec::{GroupSpec, PassedFd, StopPolicy};
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::{Event, Heartbeat, RankSeen, TimerExpired, WorkerHung};
use crate::supervisor::evidence::{self, EvidenceFiles, Found, Subject};
use crate::supervisor::state::Input;
use crate::timer::hang::{
    Elsewhere, Ground, Limits, Overdue, Seen, Suspect, Verdict, Watch, blame, blame_beside, still_late,
};
use crate::timer::pages::HeartbeatPage;

/// The number under which a worker gets its page, or the next free one below: out of the way of what programs number
/// themselves.
const PAGE_FD: i32 = 198;
/// A disk that does not answer must not keep a hung job.
const PATIENCE: Duration = Duration::from_millis(100);

/// What is known of the heartbeats of a group.
#[derive(Default)]
pub(super) struct Hangs {
    pub(super) limits: Option<Limits>,
    pub(super) files: Vec<EvidenceFiles>,
    pub(super) py_spy: Option<PathBuf>,
    /// By local rank; those of the last group stay until the next one.
    pages: Vec<Arc<HeartbeatPage>>,
    watch: Option<Watch>,
}

impl Hangs {
    /// Adds a page for each worker, if they are watched.
    pub(super) fn give_pages(&mut self, spec: &mut GroupSpec) -> io::Result<()> {
        self.pages.clear();
        if self.limits.is_none() {
            return Ok(());
        }
        // What is passed on is first moved above all targets: half of what a worker may number is left for that.
        let half = i32::try_from(limits::descriptors_of_workers() / 2).unwrap_or(i32::MAX);
        for process in &mut spec.processes {
            let page = HeartbeatPage::new(Stamp::now().0)?;
            let is_taken = |number: i32| process.pass_fds.iter().any(|passed| passed.target == number);
            let target = (3..=PAGE_FD.min(half)).rev().find(|number| !is_taken(*number));
            let target = target.ok_or_else(|| io::Error::other("no descriptor is free for a page of heartbeats"))?;
            let (descriptor, name) = page.share(target)?;
            let source = u32::try_from(spec.descriptors.len()).map_err(io::Error::other)?;
            spec.descriptors.push(descriptor);
            process.pass_fds.push(PassedFd { source, target });
            process.env.push(OsString::from(format!("ELASTICRS_HEARTBEAT={name}")));
            self.pages.push(Arc::new(page));
        }
        Ok(())
    }

    /// Takes the page of a worker that another process has started, the next one by rank.
    pub(super) fn take_page(&mut self, local_rank: u32, page: OwnedFd) -> io::Result<()> {
        if local_rank as usize != self.pages.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.pages.push(Arc::new(HeartbeatPage::of(page, Stamp::now().0)?));
        Ok(())
    }

    pub(super) fn pages(&self) -> Vec<Arc<HeartbeatPage>> {
        self.pages.clone()
    }

    pub(super) fn freeze(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.freeze(Stamp::now().0);
        }
    }

    pub(super) fn end(&mut self) {
        self.watch = None;
    }

    /// By member, as far as there are pages: what Python starts joins later, and has none.
    fn seen(&self, running: &Running, now: u64) -> Vec<Seen> {
        let read = |member: &super::Member| match running.group.rank_of(member.pid) {
            Some(local_rank) => self.pages.get(local_rank as usize).map_or(Seen::Nothing, |page| page.read(now)),
            None => Seen::Ended,
        };
        running.members.iter().take(self.pages.len()).map(read).collect()
    }
}

/// Evidence is being gathered, in a thread of its own.
pub(super) struct Gathering {
    task: JoinHandle<Vec<Found>>,
    deadline: Instant,
    then: Vec<Then>,
}

enum Then {
    Input(Input),
    Hung(Look),
    /// A rank of another node hangs: whoever of these keeps it waiting is told before they are stopped.
    Stop(StopPolicy, Elsewhere, Look),
}

/// What was found when the heartbeats were looked at.
struct Look {
    late: Vec<Overdue>,
    seen: Vec<Seen>,
    at: Stamp,
}

impl Then {
    /// Whose timer it is, if it is one.
    fn rank(&self) -> Option<u32> {
        match self {
            Self::Input(Input::TimerExpired(timer)) => Some(timer.local_rank),
            Self::Input(_) | Self::Hung(_) | Self::Stop(..) => None,
        }
    }

    fn is_of_rank(&self, local_rank: Option<u32>) -> bool {
        local_rank.is_some() && self.rank() == local_rank
    }

    /// Whether it concerns this member, which has ended after it, or is `overtaken` by what follows from that end.
    fn comes_before_exit_of(&self, member: Option<usize>, local_rank: Option<u32>, overtaken: bool) -> bool {
        match self {
            Self::Input(_) => overtaken || self.is_of_rank(local_rank),
            Self::Hung(look) | Self::Stop(_, _, look) => look.late.iter().any(|overdue| Some(overdue.rank) == member),
        }
    }
}

impl Gathering {
    /// What was found by the deadline. Cancel-safe.
    pub(super) async fn found(&mut self) -> Vec<Found> {
        match tokio::time::timeout_at(self.deadline.into(), &mut self.task).await {
            Ok(Ok(found)) => found,
            // It panicked, or a disk does not answer: the job goes on without.
            Ok(Err(_)) | Err(_) => Vec::new(),
        }
    }
}

impl Task {
    pub(super) fn begin_watch(&mut self) {
        let (Current::Running(running), Some(limits)) = (&self.current, self.hangs.limits) else { return };
        self.hangs.watch = Some(Watch::new(limits, running.members.len(), Stamp::now().0));
        self.look();
    }

    pub(super) fn thaw_watch(&mut self) {
        let Current::Running(running) = &self.current else { return };
        let now = Stamp::now();
        let (seen, line) = (self.hangs.seen(running, now.0), self.shared.logs.last_written(now));
        if let Some(watch) = &mut self.hangs.watch {
            watch.thaw(now.0, &seen, line.map(|at| at.0));
        }
        self.look();
    }

    /// Judges, and sets the time of the next look.
    pub(super) fn look(&mut self) {
        let Current::Running(running) = &self.current else { return };
        if !running.group.is_running() || self.gathering.is_some() || self.hangs.watch.is_none() {
            return;
        }
        let now = Stamp::now();
        let (seen, line) = (self.hangs.seen(running, now.0), self.shared.logs.last_written(now).map(|at| at.0));
        let Some(watch) = &mut self.hangs.watch else { return };
        match watch.look(now.0, &seen, line) {
            Verdict::LookAgain(at) => {
                if let Some((ranks, limit)) = watch.unwatched(now.0, &seen, line) {
                    let ranks = ranks.iter().filter_map(|rank| running.group.rank_of(running.members[*rank].pid));
                    self.shared.queue.push(Event::Degraded { message: unwatched(&ranks.collect::<Vec<_>>(), limit) });
                }
                let delay = Duration::from_nanos(at.saturating_sub(now.0));
                self.deadlines.arm(Timer::Hang, delay, Instant::now());
            }
            Verdict::Hung(late) => self.gather_for(Then::Hung(Look { late, seen, at: now })),
        }
    }

    /// Stops the group. When a rank hangs elsewhere, what it waits for may be here: the evidence comes first. Otherwise at
    /// once, and what is under way counts as if it had been found before: whoever had used up its limit has hung.
    pub(super) fn stop_running(&mut self, policy: StopPolicy, elsewhere: Option<Elsewhere>) {
        if let Some(elsewhere) = elsewhere
            && let Some(look) = self.look_for(elsewhere.silence)
        {
            return self.gather_for(Then::Stop(policy, elsewhere, look));
        }
        for then in self.gathering.take().map_or_else(Vec::new, |gathering| gathering.then) {
            self.follow_up(then, &[]);
        }
        self.input(Input::Stop(policy));
    }

    /// Who may keep a rank waiting that has been silent for so long; `None` when nobody is watched.
    fn look_for(&mut self, silence: Duration) -> Option<Look> {
        let Current::Running(running) = &self.current else { return None };
        let at = Stamp::now();
        let (seen, line) = (self.hangs.seen(running, at.0), self.shared.logs.last_written(at).map(|at| at.0));
        let watch = self.hangs.watch.as_mut().filter(|_| running.group.is_running())?;
        let silence = u64::try_from(silence.as_nanos()).unwrap_or(u64::MAX);
        Some(Look { late: watch.suspects(at.0, &seen, line, silence), seen, at })
    }

    /// Takes the evidence first, then the input.
    pub(super) fn gather(&mut self, input: Input) {
        self.gather_for(Then::Input(input));
    }

    fn gather_for(&mut self, then: Then) {
        if let Some(gathering) = &mut self.gathering {
            // The first timer of a rank decides what becomes of it. Others, of which there may be any number, do not wait.
            if !gathering.then.iter().any(|earlier| earlier.is_of_rank(then.rank())) {
                gathering.then.push(then);
            }
            return;
        }
        let Current::Running(running) = &self.current else { return };
        if !running.group.is_running() {
            return self.follow_up(then, &[]);
        }
        let title = title(&then);
        let subjects: Vec<Subject> = running
            .members
            .iter()
            .filter_map(|member| Some((member.pid, running.group.rank_of(member.pid)?)))
            .map(|(pid, local_rank)| Subject {
                local_rank,
                pid,
                files: self.hangs.files.get(local_rank as usize).cloned(),
                title: title.clone(),
            })
            .collect();
        let (py_spy, deadline) = (self.hangs.py_spy.clone(), Instant::now() + evidence::LIMIT);
        let task = tokio::task::spawn_blocking(move || evidence::gather(subjects, py_spy.as_deref(), deadline));
        self.gathering = Some(Gathering { task, deadline: deadline + PATIENCE, then: vec![then] });
    }

    pub(super) fn on_evidence(&mut self, found: &[Found]) {
        let Some(gathering) = self.gathering.take() else { return };
        for message in found.iter().filter_map(|found| found.problem.as_ref()) {
            let message = format!("the evidence of a hang could not be written: {message}");
            self.shared.queue.push(Event::Degraded { message });
        }
        self.follow_all_up(gathering.then, found);
        // Those that went on meanwhile are watched as before.
        self.look();
    }

    /// A worker has ended while evidence is gathered. The question itself may have ended its wait (`pause` returns on any
    /// signal), but not undone that its timer had expired, or that it had hung. One that has ended well leaves the others
    /// the time for their evidence.
    pub(super) fn settle_before_exit_of(&mut self, pid: i32, exit: WorkerExit) {
        let (Current::Running(running), Some(gathering)) = (&self.current, &mut self.gathering) else { return };
        let ended = running.members.iter().position(|member| member.pid == pid);
        let local_rank = running.group.rank_of(pid);
        let overtaken = !exit.is_success() || running.group.living().all(|living| living == pid);
        let (due, others): (Vec<_>, Vec<_>) = std::mem::take(&mut gathering.then)
            .into_iter()
            .partition(|then| then.comes_before_exit_of(ended, local_rank, overtaken));
        gathering.then = others;
        self.follow_all_up(due, &[]);
    }

    fn follow_all_up(&mut self, mut thens: Vec<Then>, found: &[Found]) {
        if thens.iter().any(|then| matches!(then, Then::Stop(..))) {
            // It looks at the same ranks, and knows of one more.
            thens.retain(|then| !matches!(then, Then::Hung(_)));
        }
        for then in thens {
            self.follow_up(then, found);
        }
    }

    fn follow_up(&mut self, then: Then, found: &[Found]) {
        match then {
            Then::Input(input) => self.input(input),
            Then::Hung(look) if !self.holds(&look) => self.look(),
            Then::Hung(look) => {
                let look = self.without_those_that_went_on(look);
                if let Some(hung) = self.verdict(&look, found, blame).filter(|_| self.anyone_is_due(&look)) {
                    self.input(Input::Hung(hung.into()));
                }
            }
            Then::Stop(policy, elsewhere, look) => {
                let look = self.without_those_that_went_on(look);
                let hung = self.verdict(&look, found, |suspects| blame_beside(suspects, &elsewhere));
                if let Some(hung) = hung.filter(|_| self.holds(&look)) {
                    let is_due = self.anyone_is_due(&look);
                    self.input(if is_due { Input::Hung(hung.into()) } else { Input::Suspected(hung.into()) });
                }
                self.input(Input::Stop(policy));
            }
        }
    }

    /// HANG-5
    fn holds(&self, look: &Look) -> bool {
        self.hangs.watch.as_ref().is_some_and(|watch| watch.holds(look.at.0))
    }

    /// HANG-6
    fn without_those_that_went_on(&self, look: Look) -> Look {
        let Current::Running(running) = &self.current else { return look };
        let now = Stamp::now();
        let (seen, line) = (self.hangs.seen(running, now.0), self.shared.logs.last_written(now).map(|at| at.0));
        Look { late: still_late(look.late, &seen, line), ..look }
    }

    /// Whoever was may have ended meanwhile.
    fn anyone_is_due(&self, look: &Look) -> bool {
        let Current::Running(running) = &self.current else { return false };
        let runs = |index: usize| running.group.rank_of(running.members[index].pid).is_some();
        look.late.iter().any(|overdue| overdue.is_due && runs(overdue.rank))
    }

    /// Who is to blame of those that are late.
    fn verdict(
        &self,
        Look { late, seen, at }: &Look,
        found: &[Found],
        blame: impl Fn(&[Suspect]) -> Option<(usize, Ground)>,
    ) -> Option<WorkerHung> {
        let Current::Running(running) = &self.current else { return None };
        let overdue_of = |index: usize| late.iter().find(|overdue| overdue.rank == index);
        let mut suspects = vec![Suspect::default(); seen.len()];
        let mut ranks = Vec::new();
        for (index, (seen, suspect)) in seen.iter().zip(&mut suspects).enumerate() {
            let Some(local_rank) = running.group.rank_of(running.members[index].pid) else { continue };
            let found = found.iter().find(|found| found.local_rank == local_rank).cloned().unwrap_or_default();
            let heartbeat = Heartbeat::of(local_rank, seen);
            let overdue = overdue_of(index);
            *suspect = Suspect {
                is_late: overdue.is_some(),
                is_due: overdue.is_some_and(|overdue| overdue.is_due),
                is_stopped: matches!(found.state, 'T' | 't'),
                step: heartbeat.as_ref().and_then(|beat| beat.step),
                last: overdue.map_or(at.0, |overdue| overdue.since),
                frame: found.frame.clone(),
            };
            let Found { state, wait_channel, frame, .. } = found;
            ranks.push(RankSeen { local_rank, heartbeat, is_late: overdue.is_some(), state, wait_channel, frame });
        }
        let (index, ground) = blame(&suspects)?;
        let (overdue, pid) = (overdue_of(index)?, running.members[index].pid);
        Some(WorkerHung {
            local_rank: running.group.rank_of(pid)?,
            pid,
            missed: overdue.missed,
            since: Stamp(overdue.since),
            limit: overdue.limit,
            seen: *at,
            ground,
            ranks,
        })
    }
}

/// The reason names all that it can be: which of them it is only the worker knows.
fn unwatched(local_ranks: &[u32], limit: Duration) -> String {
    let (number, names) = (local_ranks.len(), local_ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", "));
    let (ranks, are) = if number == 1 { ("rank", "is") } else { ("ranks", "are") };
    format!(
        "local {ranks} {names} {are} not watched for hangs yet: no heartbeat in the first {} s. There was no call of \
         elasticrs.timer.heartbeat(), and no step of a torch optimizer was seen: torch is not used, has taken no step \
         so far, or heartbeats of steps are off",
        limit.as_secs_f64()
    )
}

fn title(then: &Then) -> String {
    match then {
        Then::Input(Input::TimerExpired(TimerExpired { local_rank, scope, .. })) => {
            let scope: String = scope.chars().filter(|character| !character.is_control()).take(100).collect();
            format!("a timer of local rank {local_rank} expired: scope '{scope}'")
        }
        Then::Hung(Look { late, at, .. }) => {
            let first = late.iter().find(|overdue| overdue.is_due);
            let silent = first.map_or(0, |overdue| at.0.saturating_sub(overdue.since)) / 1_000_000;
            format!("no sign of life for {}.{:03} s", silent / 1000, silent % 1000)
        }
        Then::Stop(..) => "a rank on another node hangs".to_owned(),
        Then::Input(Input::Expired(Timer::Exit(rank))) => format!("local rank {rank} has raised, and does not end"),
        Then::Input(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Member;
    use super::*;
    use crate::signal::Signal;
    use crate::spec::{Descendants, StopPolicy, StopScope};
    use crate::supervisor::state::Group;
    use crate::sys::pidfd;
    use crate::timer::hang::Missed;

    #[test]
    fn members_without_a_page_are_not_seen() {
        let own = std::process::id().cast_signed();
        let policy = StopPolicy { signal: Signal::TERM, grace: Duration::ZERO };
        let mut group = Group::new(&[own], policy, StopScope::Group, Descendants::Keep);
        let _ = group.on_input(Input::Adopted { local_rank: 1, pid: 1 });
        let members = [(own, false), (1, true)].map(|(pid, adopted)| {
            let pidfd = Arc::new(pidfd::open(pid).expect("it lives"));
            Member { pid, pidfd, adopted, leads_a_group: false }
        });
        let running = Running { group, members: members.into(), unreported: Vec::new(), held: Vec::new() };
        let page = Arc::new(HeartbeatPage::new(0).expect("there is memory"));
        let hangs = Hangs { pages: vec![page], ..Hangs::default() };
        assert_eq!(hangs.seen(&running, 7), [Seen::Nothing]);
    }

    #[test]
    fn a_verdict_comes_before_the_exit_of_one_that_was_late() {
        let overdue = |rank| Overdue { rank, missed: Missed::Step, since: 1, limit: Duration::ZERO, is_due: true };
        let hung = Then::Hung(Look { late: vec![overdue(0), overdue(2)], seen: Vec::new(), at: Stamp(2) });
        let before =
            [Some(0), Some(1), Some(2), None].map(|member| hung.comes_before_exit_of(member, member.map(|_| 9), false));
        assert_eq!(before, [true, false, true, false]);
    }
}
