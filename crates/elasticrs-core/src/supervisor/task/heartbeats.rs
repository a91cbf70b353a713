//! Shared memory pages in which the workers store their heartbeats, and the time limits for hang detection.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::clock::Stamp;

use super::running::Running;
use crate::limits;
use crate::logs::Logs;
use crate::spec::GroupSpec;
use crate::supervisor::counters;
use crate::supervisor::state::Snapshot;
use crate::timer::hang::{Limits, RankState};
use crate::timer::pages::HeartbeatPage;

/// Preferred descriptor number of the heartbeat page in a worker. If the number is taken, the next lower free number is
/// used. The number is high, to avoid conflicts with descriptors of the worker's program.
const PAGE_FD: i32 = 198;

/// The workers' heartbeat pages.
#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    /// Time limits for hang detection. `None` if workers are not watched for hangs.
    pub(super) limits: Option<Limits>,
    /// Heartbeat page of each worker, ordered by local rank. The pages are kept after the end of a group, until the
    /// next group starts.
    pages: Vec<Arc<HeartbeatPage>>,
    /// The same shared memory pages as in `pages`, for readers on other threads.
    published: Arc<counters::Heartbeats>,
}

impl Heartbeats {
    pub(super) fn new(published: Arc<counters::Heartbeats>) -> Self {
        Self { published, ..Self::default() }
    }

    /// Creates a heartbeat page for each worker, if workers are watched for hangs.
    pub(super) fn give_pages(&mut self, spec: &mut GroupSpec) -> io::Result<()> {
        self.pages.clear();
        if self.limits.is_some() {
            for process in &mut spec.processes {
                let page = give_page(process, &mut spec.descriptors)?;
                self.pages.push(page);
            }
        }
        self.publish();
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
            self.publish();
        }
        Ok(())
    }

    /// Adds the heartbeat page of a worker that Python started. Fails if the worker is not the next one in rank order.
    pub(super) fn take_page(&mut self, local_rank: u32, page: OwnedFd) -> io::Result<()> {
        if local_rank as usize != self.pages.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.pages.push(Arc::new(HeartbeatPage::of(page, Stamp::now().0)?));
        self.publish();
        Ok(())
    }

    fn publish(&self) {
        self.published.set(self.pages.clone());
    }

    /// Reads the last heartbeats of the members and the time of the last output line. Skips members that have no shared
    /// memory for heartbeats.
    pub(super) fn snapshot(&self, running: &Running, logs: &Logs) -> Snapshot {
        let at = Stamp::now();
        Snapshot { at, seen: self.seen(running, at.0), line: logs.last_written(at).map(|line| line.0) }
    }

    /// Returns the heartbeat state of each worker. Workers that the nursery started come first, then workers that
    /// Python started. Workers without shared memory for heartbeats are omitted.
    fn seen(&self, running: &Running, now: u64) -> Vec<RankState> {
        let read = |pid| match running.group.watched_rank_of(pid) {
            Some(local_rank) => {
                self.pages.get(local_rank as usize).map_or(RankState::NoHeartbeat, |page| page.read(now))
            }
            None => RankState::Exited,
        };
        running.pids().take(self.pages.len()).map(read).collect()
    }
}

fn give_page(process: &mut ProcessSpec, descriptors: &mut Vec<OwnedFd>) -> io::Result<Arc<HeartbeatPage>> {
    // Use only the lower half of the descriptor numbers that the worker may use. The upper half must stay free, because
    // the passed descriptors are temporarily moved there when the worker starts.
    let half = i32::try_from(limits::descriptors_of_workers() / 2).unwrap_or(i32::MAX);
    let page = HeartbeatPage::new(Stamp::now().0)?;
    let is_taken = |number: i32| process.pass_fds.iter().any(|passed| passed.target == number);
    let target = (3..=PAGE_FD.min(half)).rev().find(|number| !is_taken(*number));
    let target = target.ok_or_else(|| io::Error::other("no descriptor is free for a page of heartbeats"))?;
    let (descriptor, name) = page.share(Some(target))?;
    let source = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
    descriptors.push(descriptor);
    process.pass_fds.push(PassedFd { source, target });
    process.env.push(CString::new(format!("ELASTICRS_HEARTBEAT={name}"))?);
    Ok(Arc::new(page))
}

#[cfg(test)]
mod tests {
    use elasticrs_sys::process;

    use super::*;
    use crate::supervisor::start::tests::policy;
    use crate::supervisor::state::{Group, Input};

    #[tokio::test]
    async fn workers_without_a_heartbeat_page_are_ignored() {
        let own = std::process::id().cast_signed();
        let mut group = Group::new(&[own], policy());
        let _ = group.on_input(Input::Adopted { local_rank: 1, pid: 1 });
        let pidfd = |pid| process::open_pidfd(pid).expect("it lives");
        let mut running = Running::new(group, vec![(own, pidfd(own))]);
        running.adopt(1, pidfd(1), None);
        let page = Arc::new(HeartbeatPage::new(0).expect("there is memory"));
        let heartbeats = Heartbeats { pages: vec![page], ..Heartbeats::default() };
        assert_eq!(heartbeats.seen(&running, 7), [RankState::NoHeartbeat]);
    }
}
