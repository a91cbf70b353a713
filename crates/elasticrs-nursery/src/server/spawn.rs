//! Starts the worker that a [`ProcessSpec`] describes.
//!
//! While the workers run, a nursery that has imported the workers' modules (`--warm`) moves its memory to huge pages,
//! so that later forks have fewer page table entries to copy.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use elasticrs_sys::fork::{Forked, Outlet, Settling, fork};
use elasticrs_sys::spawn::{self, Child, Command, Failure, Program};
use elasticrs_sys::stage::Stage;
use elasticrs_sys::{resources, shown};
use nix::errno::Errno;
use nix::sys::prctl;

use super::{NurseryServer, Served};
use crate::protocol::Reply;
use crate::spec::{CpuSet, ProcessSpec};

/// Directories that are searched for programs if `PATH` is not set.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

impl NurseryServer {
    pub(super) fn spawn(&mut self, process: ProcessSpec, keep_ignored: &[i32], fds: Vec<OwnedFd>) -> Served {
        self.step();
        let local_rank = process.local_rank;
        // Send the queued replies first, because starting the worker may hang.
        if self.link.flush().is_err() {
            self.lose_agent();
            return Served::GoOn;
        }
        if self.check_fence() {
            self.settle();
            let (stage, errno, subject) = (Stage::Fence, libc::ECANCELED, String::new());
            self.tell(&Reply::SpawnFailed { local_rank, stage, errno, subject }, Vec::new());
            return Served::GoOn;
        }
        self.lower_priority();
        let Some(forker) = self.forker.as_mut().filter(|_| process.warm) else {
            self.settle();
            announce(&self.stages, Stage::Clone as u8);
            let started = self.execute(&process, keep_ignored, &fds);
            self.answer(&process, started);
            return Served::GoOn;
        };
        let stage = if self.unsettled.is_some() { Stage::NextFork } else { Stage::Fork };
        announce(&self.stages, stage as u8);
        let started = match fork(forker) {
            Ok(Forked::Child(outlet)) => {
                let (name, oom_score_adj) = (self.name.clone(), self.oom_score_adj.clone());
                let parent = self.pid;
                return Served::Become(Box::new(Begun { process, fds, outlet, name, oom_score_adj, parent }));
            }
            Ok(Forked::Parent(settling)) => Ok(settling),
            Err(failure) => Err(failure),
        };
        self.settle();
        match started {
            Ok(settling) => {
                self.begin_compaction();
                self.unsettled = Some(Unsettled { process, settling });
            }
            Err(failure) => self.answer(&process, Err(failure)),
        }
        Served::GoOn
    }

    /// Waits until the most recently forked worker has finished its setup, and answers its start request.
    pub(super) fn settle(&mut self) {
        if let Some(Unsettled { process, settling }) = self.unsettled.take() {
            self.step();
            announce(&self.stages, Stage::Forked as u8);
            let agent = [self.agent.as_fd(), self.link.as_fd()];
            let settled = settling.wait(agent, |stage| announce(&self.stages, stage));
            self.answer(&process, settled);
        }
    }

    /// Announces the next step of a worker's start in shared memory, so that another process can detect a step that
    /// hangs.
    fn step(&mut self) {
        if let Some(activity) = &mut self.activity {
            activity.step();
        }
    }

    fn answer(&mut self, process: &ProcessSpec, started: Result<Child, Failure>) {
        let local_rank = process.local_rank;
        match started {
            Ok(child) => {
                self.workers.insert(child.pid);
                self.sessions.insert(child.pid);
                self.tell(&Reply::Spawned { local_rank, pid: child.pid }, vec![child.pidfd]);
            }
            Err(failure) => {
                let Failure { stage, errno, .. } = failure;
                let subject = subject(process, failure);
                self.tell(&Reply::SpawnFailed { local_rank, stage, errno: errno as i32, subject }, Vec::new());
            }
        }
    }

    fn execute(&mut self, process: &ProcessSpec, keep_ignored: &[i32], fds: &[OwnedFd]) -> Result<Child, Failure> {
        let mut command = command(process, keep_ignored, fds)?;
        command.stages = Some(self.stages.as_fd());
        command.oom_score_adj.clone_from(&self.oom_score_adj);
        spawn::spawn(&command, &mut self.stack)
    }
}

/// Writes a stage to the stage pipe. The first stage of each start is [`Stage::Clone`] or [`Stage::Fork`]. Ignores a
/// full pipe, because the stages are only informational.
fn announce(stages: &OwnedFd, stage: u8) {
    let _ = nix::unistd::write(stages, &[stage]);
}

/// State that the nursery keeps for a forked worker that has not finished its setup.
pub(super) struct Unsettled {
    process: ProcessSpec,
    settling: Settling,
}

/// Data that a forked process needs to complete its setup as a worker.
pub(super) struct Begun {
    process: ProcessSpec,
    fds: Vec<OwnedFd>,
    outlet: Outlet,
    name: CString,
    oom_score_adj: Option<CString>,
    parent: i32,
}

/// Program that a forked worker runs after its setup.
#[derive(Debug)]
pub struct Worker {
    pub argv: Vec<CString>,
    /// The complete environment, as `NAME=value` entries.
    pub env: Vec<CString>,
}

impl Begun {
    /// Completes the setup of a forked worker. Afterwards, the process is in the same state as if it had executed its
    /// program. Exits the process on failure.
    pub(super) fn settle(self) -> Worker {
        let Self { process, fds, mut outlet, name, oom_score_adj, parent } = self;
        let targets: Vec<i32> = process.pass_fds.iter().map(|passed| passed.target).collect();
        let floor = targets.iter().fold(2, |floor, &target| floor.max(target)).saturating_add(1);
        if let Err(errno) = outlet.move_above(floor) {
            outlet.fail(Failure::at(Stage::Descriptors)(errno));
        }
        let settled = command(&process, &[], &fds)
            .and_then(|command| outlet.settle(Command { oom_score_adj, ..command }, parent));
        for fd in fds {
            if targets.contains(&fd.as_raw_fd()) {
                // Do not close `fd`, because its number now belongs to one of the worker's own descriptors.
                let _ = fd.into_raw_fd();
            }
        }
        match settled {
            Err(failure) => outlet.fail(failure),
            Ok(()) => outlet.close(),
        }
        // Ignore the result, because the only possible error is a bad address.
        let _ = prctl::set_name(&name);
        // Ignore an error, because the command line that `/proc` shows is only informational.
        let _ = shown::show(&process.argv, &process.env);
        Worker { argv: process.argv, env: process.env }
    }
}

pub(crate) fn command<'fd>(
    process: &'fd ProcessSpec,
    keep_ignored: &[i32],
    fds: &'fd [OwnedFd],
) -> Result<Command<'fd>, Failure> {
    let passed = process.pass_fds.iter().map(|passed| {
        // A missing descriptor means that this process has reached its limit on open files.
        let index = usize::try_from(passed.source).map_err(|_| Errno::EBADF)?;
        let fd = fds.get(index).ok_or(Errno::EMFILE)?;
        if passed.target < 0 { Err(Errno::EBADF) } else { Ok((fd.as_fd(), passed.target)) }
    });
    Ok(Command {
        program: Program::Paths(candidates(process).map_err(Failure::at(Stage::Exec))?),
        argv: process.argv.clone(),
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        stdio: process.stdio.clone(),
        fds: passed.collect::<Result<_, _>>().map_err(Failure::at(Stage::Descriptors))?,
        ignored: keep_ignored.to_vec(),
        dies_with_parent: true,
        keeps_orphans: process.keeps_orphans,
        cpus: process.cpus.as_ref().map(CpuSet::mask),
        oom_score_adj: None,
        stages: None,
        interrupt: None,
    })
}

/// Returns the paths to try for the program, in order. Follows the rules of `execvpe` and Python's `subprocess`.
fn candidates(process: &ProcessSpec) -> Result<Vec<CString>, Errno> {
    let program = process.argv.first().ok_or(Errno::EINVAL)?;
    let name = program.to_bytes();
    if name.is_empty() {
        return Err(Errno::ENOENT);
    }
    if name.contains(&b'/') {
        return Ok(vec![program.clone()]);
    }
    let path = process.env.iter().find_map(|entry| entry.to_bytes().strip_prefix(b"PATH="));
    let directories = path.unwrap_or(DEFAULT_PATH).split(|&byte| byte == b':');
    directories
        .map(|directory| match directory {
            // An empty entry in `PATH` means the working directory.
            b"" => Ok(program.clone()),
            _ => CString::new([directory, b"/", name].concat()).map_err(|_| Errno::EINVAL),
        })
        .collect()
}

/// Returns the path or program that caused the failure, for use in messages.
fn subject(process: &ProcessSpec, failure: Failure) -> String {
    let subject = match failure.stage {
        Stage::OpenLog => process.stdio.get(failure.descriptor).and_then(Option::as_ref),
        Stage::ChangeDir => process.cwd.as_ref(),
        Stage::Exec => process.argv.first(),
        _ => None,
    };
    subject.map(|subject| subject.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Time for which the nursery process pauses after moving memory to a huge page. In that time, the workers can use the
/// CPU, and the nursery can handle events.
const PAUSE: Duration = Duration::from_millis(5);

/// Progress of moving the nursery's memory to huge pages.
#[derive(Debug)]
pub(super) enum Compaction {
    /// The compaction has not started. It starts after the first fork, because it would otherwise delay that fork.
    Later,
    /// The memory is being moved to huge pages. The field contains the addresses that have not been moved yet.
    Now(Vec<usize>),
    Done,
}

impl NurseryServer {
    /// Returns how long the nursery process may sleep before it moves more memory to huge pages. `None` if no memory is
    /// being moved.
    pub(super) fn pause_of_compaction(&self) -> Option<Duration> {
        matches!(self.compaction, Compaction::Now(_)).then_some(PAUSE)
    }

    /// Starts moving the nursery's memory to huge pages. Only the first call has an effect. The first call is made
    /// after the first fork, because the move would delay that fork.
    pub(super) fn begin_compaction(&mut self) {
        if matches!(self.compaction, Compaction::Later) {
            self.compaction = Compaction::Now(resources::huge_page_places());
        }
    }

    pub(super) fn step_compaction(&mut self) {
        let Compaction::Now(places) = &mut self.compaction else { return };
        match places.pop() {
            // Ignore errors: if huge pages are unsupported or currently unavailable, the memory stays in small pages.
            Some(place) => drop(resources::collapse(place)),
            None => self.compaction = Compaction::Done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(program: &str, env: &[&str]) -> ProcessSpec {
        let c_string = |text: &str| CString::new(text).unwrap();
        ProcessSpec::new(vec![c_string(program)], env.iter().copied().map(c_string).collect())
    }

    fn paths(program: &str, env: &[&str]) -> Vec<String> {
        let found = candidates(&process(program, env)).unwrap();
        found.into_iter().map(|path| path.into_string().unwrap()).collect()
    }

    #[test]
    fn a_program_with_a_slash_is_not_searched_in_path() {
        assert_eq!(paths("./a", &["PATH=/x"]), ["./a"]);
    }

    #[test]
    fn the_search_path_comes_from_the_environment_of_the_worker() {
        assert_eq!(paths("a", &["HOME=/h", "PATH=/x::/y"]), ["/x/a", "a", "/y/a"]);
        assert_eq!(paths("a", &[]), ["/bin/a", "/usr/bin/a"]);
    }

    #[test]
    fn an_empty_program_name_is_refused() {
        assert_eq!(candidates(&process("", &[])), Err(Errno::ENOENT));
    }
}
