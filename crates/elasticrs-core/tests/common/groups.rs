//! Runs groups of real processes under a supervisor.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use elasticrs_core::spec::{Descendants, GroupPolicy, GroupSpec, StopPolicy, StopScope};
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{Config, Event, Supervisor};
use elasticrs_nursery::launch::{NurseryImage, Warm};
use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::signal::Signal;
use elasticrs_testkit::assert_no_children;
use elasticrs_testkit::nursery::{Lines, c_string, pipe, process, worker};

use super::image;

/// Time limit that keeps a test from hanging. No test measures it.
pub(crate) const HANG: Duration = Duration::from_secs(20);
pub(crate) const TERM: StopPolicy = StopPolicy { signal: Signal::TERM, grace: HANG };
pub(crate) const KILL: StopPolicy = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };
pub(crate) const KILLED: WorkerExit = WorkerExit::Signaled { signal: libc::SIGKILL };

/// Returns the group with workers that the warm nursery forks.
pub(crate) fn warm(mut group: GroupSpec) -> GroupSpec {
    for process in &mut group.processes {
        process.warm = true;
    }
    group
}

/// Kills a running process.
pub(crate) fn kill(pid: i32) {
    elasticrs_sys::process::send_signal(elasticrs_testkit::pidfd(pid).unwrap(), libc::SIGKILL).unwrap();
}

pub(crate) fn supervisor() -> Supervisor {
    let nursery = if is_warm() { vec![warm_image("", HANG), image()] } else { vec![image()] };
    Supervisor::new(Config { nursery, owns_process: true }).unwrap()
}

/// Returns true if `ELASTICRS_TEST_WARM` is set, so that all workers are forked from a warm nursery.
pub(crate) fn is_warm() -> bool {
    std::env::var_os("ELASTICRS_TEST_WARM").is_some()
}

/// Returns a warm nursery. `programs/nursery.rs` explains `what`.
pub(crate) fn warm_image(what: &str, limit: Duration) -> NurseryImage {
    let program = process(vec![super::nursery_program().into()]);
    let process = ProcessSpec { env: vec![c_string(format!("WARM_NURSERY={what}"))], ..program };
    let report = File::open("/dev/null").unwrap().into();
    NurseryImage::Warm(Arc::new(Warm { process, ignored: Vec::new(), report, limit }))
}

pub(crate) fn group(processes: Vec<ProcessSpec>) -> GroupSpec {
    let ranked =
        (0..).zip(processes).map(|(local_rank, process)| ProcessSpec { local_rank, warm: is_warm(), ..process });
    GroupSpec {
        processes: ranked.collect(),
        descriptors: Vec::new(),
        policy: GroupPolicy {
            on_failure: TERM,
            stop_scope: StopScope::Group,
            on_success: Descendants::Linger(Duration::ZERO),
            start_deadline: HANG,
            keep_ignored: Vec::new(),
            replaces: false,
            keep_grace: Duration::ZERO,
        },
    }
}

/// Returns a worker whose start hangs. Opening a FIFO for writing blocks until there is a reader, like a dead
/// network mount.
pub(crate) fn hanging_worker(folder: &Path) -> ProcessSpec {
    let fifo = folder.join("stdout.log");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut hangs = worker(&["exit", "0"]);
    hangs.stdio[1] = Some(c_string(fifo));
    hangs
}

/// Returns a group whose workers share one pipe as standard output, so that the test can wait until each has
/// written `READY`.
pub(crate) fn telling_group(commands: &[&[&str]]) -> (GroupSpec, Lines) {
    let (reader, writer) = pipe();
    let mut group = group(commands.iter().map(|arguments| worker(arguments)).collect());
    for spec in &mut group.processes {
        spec.pass_fds = vec![PassedFd { source: 0, target: 1 }];
    }
    group.descriptors = vec![writer];
    (group, Lines::new(reader))
}

/// Starts a group, and waits until all of its workers are ready.
pub(crate) fn run(supervisor: &Supervisor, commands: &[&[&str]]) -> (Vec<i32>, Lines) {
    let (group, mut lines) = telling_group(commands);
    supervisor.start(group).unwrap();
    let Event::GroupStarted { pids, .. } = event(supervisor) else { panic!("it starts") };
    for _ in commands {
        lines.until_ready();
    }
    (pids, lines)
}

pub(crate) fn event(supervisor: &Supervisor) -> Event {
    loop {
        match supervisor.next(Some(HANG)).unwrap() {
            Next::Event(Event::Warmed { failure: None }) | Next::Interrupted => {}
            Next::Event(event) => return event,
            other => panic!("hangs: {other:?}"),
        }
    }
}

pub(crate) fn close(supervisor: Supervisor) {
    supervisor.close(false).unwrap();
    drop(supervisor);
    assert_no_children();
}
