//! Collects diagnostics about the workers, such as stack traces. Each worker is examined on its own thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::nursery::Retired;
use super::running::Running;
use crate::supervisor::evidence::{self, EvidenceFiles, GatheringLimit, Subject, WorkerEvidence};

/// Extra time after the deadline for the threads that gather diagnostics. The time is short, so that an unresponsive
/// disk cannot delay the end of a hung job.
const SLACK: Duration = Duration::from_millis(100);

/// Collector of diagnostics about the workers, such as stack traces.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    files: Vec<EvidenceFiles>,
    py_spy: Option<PathBuf>,
    gathering: Option<Gathering>,
    records: Option<Gathering>,
}

/// Result that [`Evidence::gathered`] waited for.
pub(super) enum Gathered {
    /// The diagnostics of all workers.
    Evidence(Vec<WorkerEvidence>),
    /// The workers have written their flight records to files, or the time limit has passed.
    Records,
}

impl Evidence {
    /// Sets the workers' diagnostics files, ordered by local rank, and the path of the program `py-spy`.
    pub(super) fn keep_in(&mut self, files: Vec<EvidenceFiles>, py_spy: Option<PathBuf>) {
        (self.files, self.py_spy) = (files, py_spy);
    }

    /// Starts gathering diagnostics, such as stack traces, about all running workers of the group. If `measures_work`
    /// is true, also measures whether the workers that are outside of collectives are busy. The `spared` workers, by
    /// local rank, go on afterwards.
    pub(super) fn gather(&mut self, running: &Running, title: &str, measures_work: bool, spared: &[u32]) {
        let mut gathering = Gathering::new(GatheringLimit::until(Instant::now() + evidence::LIMIT));
        for pid in running.pids() {
            let Some(local_rank) = running.group.rank_of(pid) else { continue };
            let files = self.files.get(local_rank as usize).cloned();
            let is_spared = spared.contains(&local_rank);
            let subject = Subject { local_rank, pid, files, title: title.to_owned(), measures_work, is_spared };
            let py_spy = self.py_spy.clone();
            gathering.add(local_rank, move |limit| evidence::gather(subject, py_spy.as_deref(), limit));
        }
        self.gathering = Some(gathering);
    }

    /// Requests the flight records of all running workers of the group.
    pub(super) fn take_records(&mut self, running: &Running) {
        let mut records = Gathering::new(GatheringLimit::until(Instant::now() + evidence::RECORDS));
        for pid in running.pids() {
            let Some(local_rank) = running.group.rank_of(pid) else { continue };
            let Some(files) = self.files.get(local_rank as usize).cloned() else { continue };
            records.add(local_rank, move |limit| {
                evidence::take_record(pid, &files, limit);
                WorkerEvidence { local_rank, ..WorkerEvidence::default() }
            });
        }
        self.records = Some(records);
    }

    /// Waits for the diagnostics or the flight records of the workers. Never returns if nothing is being gathered.
    /// Cancel-safe.
    pub(super) async fn gathered(&mut self) -> Gathered {
        let (gathering, records) = (&mut self.gathering, &mut self.records);
        tokio::select! {
            evidence = finished(gathering) => Gathered::Evidence(evidence),
            _ = finished(records) => Gathered::Records,
        }
    }

    /// Cancels the collection of diagnostics. Its threads finish in the background. Closing the supervisor waits for
    /// the threads, because they must reap the child process `py-spy`.
    pub(super) fn cancel(&mut self, retired: &mut Retired) {
        for mut gathering in [self.gathering.take(), self.records.take()].into_iter().flatten() {
            gathering.limit.is_cancelled.store(true, Ordering::Relaxed);
            retired.add(async move { drop(gathering.finish().await) });
        }
    }
}

async fn finished(gathering: &mut Option<Gathering>) -> Vec<WorkerEvidence> {
    let Some(running) = gathering else { return std::future::pending().await };
    let evidence = running.finish().await;
    *gathering = None;
    evidence
}

/// Evidence that is being gathered.
#[derive(Debug)]
struct Gathering {
    threads: JoinSet<WorkerEvidence>,
    /// Local ranks of the workers that are being examined.
    subjects: Vec<u32>,
    evidence: Vec<WorkerEvidence>,
    limit: Arc<GatheringLimit>,
}

impl Gathering {
    fn new(limit: GatheringLimit) -> Self {
        Self { threads: JoinSet::new(), subjects: Vec::new(), evidence: Vec::new(), limit: Arc::new(limit) }
    }

    fn add(&mut self, local_rank: u32, examine: impl FnOnce(&GatheringLimit) -> WorkerEvidence + Send + 'static) {
        let limit = Arc::clone(&self.limit);
        self.threads.spawn_blocking(move || examine(&limit));
        self.subjects.push(local_rank);
    }

    /// Waits for the diagnostics of all workers, at most until the deadline. A worker without diagnostics gets a result
    /// with an error message. Cancel-safe.
    async fn finish(&mut self) -> Vec<WorkerEvidence> {
        let deadline = self.limit.deadline + SLACK;
        while let Ok(Some(found)) = tokio::time::timeout_at(deadline.into(), self.threads.join_next()).await {
            // Ignore an error, which means that a thread panicked. The missing result is handled below.
            self.evidence.extend(found);
        }
        let mut evidence = std::mem::take(&mut self.evidence);
        for &local_rank in &self.subjects {
            if !evidence.iter().any(|worker| worker.local_rank == local_rank) {
                let problem = format!("local rank {local_rank}: accessing its files timed out");
                evidence.push(WorkerEvidence {
                    local_rank,
                    state: ' ',
                    problem: Some(problem),
                    ..WorkerEvidence::default()
                });
            }
        }
        evidence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn evidence_of_other_workers_is_kept_if_gathering_hangs_for_one_worker() {
        let (hangs, goes_on) = std::sync::mpsc::channel::<()>();
        let mut gathering = Gathering::new(GatheringLimit::until(Instant::now() + Duration::from_millis(300)));
        gathering.add(0, move |_| {
            let _ = goes_on.recv();
            WorkerEvidence::default()
        });
        let frame = Some("File \"a.py\", line 3 in read".to_owned());
        let other = WorkerEvidence { local_rank: 1, frame, ..WorkerEvidence::default() };
        let found = other.clone();
        gathering.add(1, move |_| found);
        let [first, second] = &gathering.finish().await[..] else { panic!("both are named") };
        assert_eq!(first, &other);
        assert_eq!((second.local_rank, second.problem.is_some()), (0, true));
        drop(hangs);
    }
}
