//! Workers that have raised: their notice, and whether they have ended by the limit.
//!
//! A worker's hook makes a file beside its error file, with its pid in the name, and removes it again; the kernel tells
//! of that. So a notice needs no descriptor in the worker, nothing is read from a disk here, and nobody is woken before.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Current, Task};
use crate::clock::Stamp;
use crate::supervisor::deadlines::Timer;
use crate::supervisor::event::{Event, WorkerRaised};
use crate::supervisor::state::Input;
use crate::supervisor::watch;
use crate::sys::pidfd;
use crate::sys::readiness::register;

/// How the name of a notice ends, behind the pid. `python/elasticrs/_worker/error_file.py` has it as well.
const NOTICE: &str = ".uncaught";

/// Watches for notices in the folders of these error files. Looks them up, so it may block on a dead file system.
pub(in crate::supervisor) fn watch_folders(error_files: &[PathBuf]) -> Result<Inotify, Errno> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    for folder in error_files.iter().filter_map(|file| file.parent()) {
        inotify.add_watch(folder, AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ONLYDIR)?;
    }
    Ok(inotify)
}

/// What is known of the group's workers that are about to end.
#[derive(Default)]
pub(super) struct Exits {
    limit: Option<Duration>,
    notices: Option<(Inotify, AsyncFd<OwnedFd>)>,
    /// By local rank, the process that has recorded its exception.
    raised: Vec<(u32, OwnedFd)>,
}

impl Exits {
    pub(super) fn are_watched(&self) -> bool {
        self.notices.is_some()
    }

    /// A notice may be there. Cancel-safe.
    pub(super) async fn next(&self) {
        match &self.notices {
            Some((_, ready)) => match ready.readable().await {
                Ok(mut ready) => ready.clear_ready(),
                // The runtime shuts down.
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    fn watch(&mut self, notices: Inotify) -> io::Result<()> {
        let ready = register(notices.as_fd().try_clone_to_owned()?, Interest::READABLE)?;
        self.notices = Some((notices, ready));
        Ok(())
    }

    /// Pids of those that have given notice.
    fn take(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        while let Some(Ok(events)) = self.notices.as_ref().map(|(notices, _)| notices.read_events()) {
            pids.extend(events.iter().filter_map(|event| pid_of(event.name.as_deref()?)));
        }
        pids
    }

    fn has_ended(&self, local_rank: u32) -> bool {
        let process = self.raised.iter().find(|(rank, _)| *rank == local_rank);
        process.is_none_or(|(_, process)| watch::ended(&[process.as_fd()]) == [true])
    }
}

/// Of `error.json.123.uncaught`.
fn pid_of(name: &OsStr) -> Option<i32> {
    let name = name.to_str()?.strip_suffix(NOTICE)?;
    Path::new(name).extension()?.to_str()?.parse().ok()
}

impl Task {
    pub(super) fn watch_exits(&mut self, notices: Result<Inotify, Errno>, limit: Option<Duration>) {
        self.exits = Exits { limit, ..Exits::default() };
        let watched = notices.map_err(io::Error::from).and_then(|notices| self.exits.watch(notices));
        if let Err(error) = watched {
            let message = format!("workers that raise and do not end are not noticed: inotify failed: {error}");
            self.shared.queue.push(Event::Degraded { message });
        }
    }

    pub(super) fn on_notices(&mut self) {
        for pid in self.exits.take() {
            let Current::Running(running) = &self.current else { return };
            // Any other process may have written there.
            let (Ok(process), Some(local_rank)) = (pidfd::open(pid), running.worker_of(pid)) else { continue };
            // Of several programs below one worker the first counts, as long as it lives.
            if watch::ended(&[process.as_fd()]) == [true] || !self.exits.has_ended(local_rank) {
                continue;
            }
            self.exits.raised.retain(|(rank, _)| *rank != local_rank);
            self.exits.raised.push((local_rank, process));
            let (seen, limit) = (Stamp::now(), self.exits.limit);
            self.input(Input::Raised(WorkerRaised { local_rank, pid, seen, limit, is_overdue: false }));
        }
    }

    /// What holds the exit is looked at first.
    pub(super) fn on_exit_deadline(&mut self, local_rank: u32) {
        // A worker that started the process may still go on.
        if !self.exits.has_ended(local_rank) {
            self.gather(Input::Expired(Timer::Exit(local_rank)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pid_of_a_notice_is_in_its_name() {
        for (name, pid) in [
            ("error.json.123.uncaught", Some(123)),
            ("a b.7.uncaught", Some(7)),
            ("error.json.uncaught", None),
            ("error.json.123.partial", None),
            (".uncaught", None),
        ] {
            assert_eq!(pid_of(OsStr::new(name)), pid, "{name}");
        }
    }
}
