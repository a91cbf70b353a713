//! Provides the group's state machine with the workers' heartbeats and with evidence of what the workers are doing.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::clock::Stamp;
use tokio::task::JoinSet;

use super::{Current, Running, Task};
use crate::limits;
use crate::logs::Logs;
use crate::spec::GroupSpec;
use crate::supervisor::evidence::{self, EvidenceFiles, Found, Patience, Subject};
use crate::supervisor::state::{Input, Sight};
use crate::timer::hang::{Limits, Seen};
use crate::timer::pages::HeartbeatPage;

/// Preferred descriptor number of the heartbeat page in a worker. If it is taken, the next lower free number is used.
/// It is high, to avoid conflicts with descriptors of the worker's program.
const PAGE_FD: i32 = 198;
/// Extra time for evidence threads after their deadline. It is short, so that a disk that does not respond cannot delay
/// the end of a hung job.
const SLACK: Duration = Duration::from_millis(100);

/// Settings and heartbeat pages for detecting hangs of workers.
#[derive(Default)]
pub(super) struct Hangs {
    pub(super) limits: Option<Limits>,
    pub(super) files: Vec<EvidenceFiles>,
    pub(super) py_spy: Option<PathBuf>,
    /// Heartbeat page of each worker, ordered by local rank. The pages are kept after the end of a group, until the
    /// next group starts.
    pages: Vec<Arc<HeartbeatPage>>,
}

impl Hangs {
    /// Creates a heartbeat page for each worker, if workers are watched for hangs.
    pub(super) fn give_pages(&mut self, spec: &mut GroupSpec) -> io::Result<()> {
        self.pages.clear();
        if self.limits.is_none() {
            return Ok(());
        }
        for process in &mut spec.processes {
            let page = give_page(process, &mut spec.descriptors)?;
            self.pages.push(page);
        }
        Ok(())
    }

    /// Creates a heartbeat page for a replacement worker, if workers are watched for hangs.
    pub(super) fn give_page_again(
        &mut self,
        process: &mut ProcessSpec,
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<()> {
        if let Some(page) = self.pages.get_mut(process.local_rank as usize) {
            *page = give_page(process, descriptors)?;
        }
        Ok(())
    }

    /// Adds the heartbeat page of a worker that Python started. Fails if the worker is not the next one in rank order.
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

    pub(super) fn sight(&self, running: &Running, logs: &Logs) -> Sight {
        let at = Stamp::now();
        Sight { at, seen: self.seen(running, at.0), line: logs.last_written(at).map(|line| line.0) }
    }

    /// Reads the heartbeats of all members that have a page. Members that Python started come last, and may have none.
    fn seen(&self, running: &Running, now: u64) -> Vec<Seen> {
        let read = |member: &super::Member| match running.group.watched_rank_of(member.pid) {
            Some(local_rank) => self.pages.get(local_rank as usize).map_or(Seen::Nothing, |page| page.read(now)),
            None => Seen::Ended,
        };
        running.members.iter().take(self.pages.len()).map(read).collect()
    }
}

fn give_page(process: &mut ProcessSpec, descriptors: &mut Vec<OwnedFd>) -> io::Result<Arc<HeartbeatPage>> {
    // Only use numbers from the lower half of those that a worker may use. The upper half is needed during the start of
    // the worker, which first moves the passed descriptors above all target numbers.
    let half = i32::try_from(limits::descriptors_of_workers() / 2).unwrap_or(i32::MAX);
    let page = HeartbeatPage::new(Stamp::now().0)?;
    let is_taken = |number: i32| process.pass_fds.iter().any(|passed| passed.target == number);
    let target = (3..=PAGE_FD.min(half)).rev().find(|number| !is_taken(*number));
    let target = target.ok_or_else(|| io::Error::other("no descriptor is free for a page of heartbeats"))?;
    let (descriptor, name) = page.share(Some(target))?;
    let source = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
    descriptors.push(descriptor);
    process.pass_fds.push(PassedFd { source, target });
    process.env.push(OsString::from(format!("ELASTICRS_HEARTBEAT={name}")));
    Ok(Arc::new(page))
}

/// Evidence that is being gathered, with one thread for each worker.
pub(super) struct Gathering {
    threads: JoinSet<Vec<Found>>,
    /// Local ranks of the workers that are being examined.
    asked: Vec<u32>,
    found: Vec<Found>,
    patience: Arc<Patience>,
}

impl Gathering {
    fn new(patience: Patience) -> Self {
        Self { threads: JoinSet::new(), asked: Vec::new(), found: Vec::new(), patience: Arc::new(patience) }
    }

    fn ask(&mut self, local_rank: u32, look: impl FnOnce(&Patience) -> Vec<Found> + Send + 'static) {
        let patience = Arc::clone(&self.patience);
        self.threads.spawn_blocking(move || look(&patience));
        self.asked.push(local_rank);
    }

    /// Waits for the evidence, but not longer than until the deadline. Reports a problem for each worker whose evidence
    /// is missing by then. Cancel-safe.
    pub(super) async fn found(&mut self) -> Vec<Found> {
        let deadline = self.patience.deadline + SLACK;
        while let Ok(Some(found)) = tokio::time::timeout_at(deadline.into(), self.threads.join_next()).await {
            // Ignore an error. It means that a thread panicked, so the evidence of its worker is missing.
            self.found.extend(found.into_iter().flatten());
        }
        let mut found = std::mem::take(&mut self.found);
        for &local_rank in &self.asked {
            if !found.iter().any(|found| found.local_rank == local_rank) {
                let problem = format!("local rank {local_rank}: its files did not answer in time");
                found.push(Found { local_rank, state: ' ', problem: Some(problem), ..Found::default() });
            }
        }
        found
    }
}

impl Task {
    pub(super) fn begin_watch(&mut self) {
        if let Some(limits) = self.hangs.limits {
            self.input(Input::Watch(limits));
        }
    }

    pub(super) fn take_evidence(&mut self, title: &str) {
        let Current::Running(running) = &self.current else { return };
        let subject = |member: &super::Member| {
            let local_rank = running.group.rank_of(member.pid)?;
            let files = self.hangs.files.get(local_rank as usize).cloned();
            Some(Subject { local_rank, pid: member.pid, files, title: title.to_owned() })
        };
        let subjects: Vec<Subject> = running.members.iter().filter_map(subject).collect();
        let mut gathering = Gathering::new(Patience::until(Instant::now() + evidence::LIMIT));
        for subject in subjects {
            let py_spy = self.hangs.py_spy.clone();
            gathering
                .ask(subject.local_rank, move |patience| evidence::gather(vec![subject], py_spy.as_deref(), patience));
        }
        self.gathering = Some(gathering);
    }

    /// Cancels the gathering of evidence that is no longer needed. The threads finish in the background. Closing the
    /// supervisor waits for them, because they must reap `py-spy`, which is a child of this process.
    pub(super) fn give_up_evidence(&mut self) {
        let Some(mut gathering) = self.gathering.take() else { return };
        gathering.patience.given_up.store(true, Ordering::Relaxed);
        self.retire_by(async move { drop(gathering.found().await) });
    }
}

#[cfg(test)]
mod tests {
    use elasticrs_sys::pidfd;
    use elasticrs_sys::signal::Signal;

    use super::super::Member;
    use super::*;
    use crate::spec::{Descendants, StopPolicy, StopScope};
    use crate::supervisor::start::Terms;
    use crate::supervisor::state::Group;

    #[tokio::test]
    async fn a_worker_whose_files_hang_costs_the_evidence_of_no_other() {
        let (hangs, goes_on) = std::sync::mpsc::channel::<()>();
        let mut gathering = Gathering::new(Patience::until(Instant::now() + Duration::from_millis(300)));
        gathering.ask(0, move |_| {
            let _ = goes_on.recv();
            Vec::new()
        });
        let frame = Some("File \"a.py\", line 3 in read".to_owned());
        let other = Found { local_rank: 1, frame, ..Found::default() };
        let found = other.clone();
        gathering.ask(1, move |_| vec![found]);
        let [first, second] = &gathering.found().await[..] else { panic!("both are named") };
        assert_eq!(first, &other);
        assert_eq!((second.local_rank, second.problem.is_some()), (0, true));
        drop(hangs);
    }

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
        let (members, terms) = (members.into(), Terms::default());
        let running = Running { group, members, terms, hung: None, unreported: Vec::new(), held: Vec::new() };
        let page = Arc::new(HeartbeatPage::new(0).expect("there is memory"));
        let hangs = Hangs { pages: vec![page], ..Hangs::default() };
        assert_eq!(hangs.seen(&running, 7), [Seen::Nothing]);
    }
}
