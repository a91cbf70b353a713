//! Tests for expiration timers of real processes. The test writes the records, with any pid that it needs.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::cell::OnceCell;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::image;
use elasticrs_core::spec::{Descendants, GroupPolicy, GroupSpec, StopPolicy, StopScope};
use elasticrs_core::supervisor::evidence::EvidenceFiles;
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{Config, Event, Outcome, Supervisor, SupervisorError, TimerExpired};
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::signal::Signal;
use elasticrs_testkit::nursery::{Lines, pipe, process, with_stdout, worker};
use elasticrs_testkit::{assert_no_children, is_running, wait_until};

/// Time limit that keeps a test from hanging. No test measures it.
const HANG: Duration = Duration::from_secs(20);
const KILL: StopPolicy = StopPolicy { signal: Signal::KILL, grace: Duration::ZERO };

/// Local rank of a worker, how it exited, and the signal that the supervisor had sent.
type Exited = (u32, WorkerExit, Option<Signal>);

struct Job {
    supervisor: Supervisor,
    path: PathBuf,
    fifo: File,
    pids: Vec<i32>,
    lines: Lines,
}

impl Job {
    fn start(processes: Vec<ProcessSpec>) -> Self {
        Self::start_with(|_| processes)
    }

    /// Starts a job. `processes` gets the path of the FIFO, to which the workers may write.
    fn start_with(processes: impl FnOnce(&Path) -> Vec<ProcessSpec>) -> Self {
        let supervisor = Supervisor::new(Config { nursery: vec![image()], owns_process: true }).unwrap();
        let path = supervisor.watch_timers(None).unwrap();
        let fifo = OpenOptions::new().write(true).open(&path).unwrap();
        let (reader, writer) = pipe();
        let ranked = (0..).zip(processes(&path)).map(|(local_rank, process)| ProcessSpec { local_rank, ..process });
        let processes: Vec<_> = ranked.map(with_stdout).collect();
        let count = processes.len();
        let policy = GroupPolicy {
            on_failure: StopPolicy { signal: Signal::TERM, grace: HANG },
            stop_scope: StopScope::Group,
            on_success: Descendants::Linger(Duration::ZERO),
            start_deadline: HANG,
            keep_ignored: Vec::new(),
            replaces: false,
            keep_grace: Duration::ZERO,
        };
        let group = GroupSpec { processes, descriptors: vec![writer], policy };
        supervisor.start(group).unwrap();
        let mut job = Self { supervisor, path, fifo, pids: Vec::new(), lines: Lines::new(reader) };
        let Event::GroupStarted { pids, .. } = job.event() else { panic!("it starts") };
        job.pids = pids;
        for _ in 0..count {
            job.lines.until_ready();
        }
        job
    }

    fn sleepers(count: usize) -> Self {
        Self::start((0..count).map(|_| worker(&["sleep"])).collect())
    }

    fn event(&self) -> Event {
        loop {
            match self.supervisor.next(Some(HANG)).unwrap() {
                Next::Event(event) => return event,
                Next::Interrupted => {}
                other => panic!("hangs: {other:?}"),
            }
        }
    }

    fn expired(&self) -> TimerExpired {
        match self.event() {
            Event::TimerExpired(timer) => timer,
            other => panic!("{other:?}"),
        }
    }

    fn complaint(&self) -> String {
        match self.event() {
            Event::Degraded { message } => message,
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, text: &str) {
        self.fifo.write_all(text.as_bytes()).unwrap();
    }

    /// Lets the timer of the first worker expire. Collecting evidence then takes the maximum time, because this
    /// `py-spy` only reports that it was started.
    fn is_asked_where_it_is(&mut self) {
        let folder = tempfile::tempdir().unwrap();
        let (spy, asked) = (folder.path().join("py-spy"), folder.path().join("asked"));
        nix::unistd::mkfifo(&asked, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(&spy, format!("#!/bin/sh\necho asked > {}\nexec sleep 1000\n", asked.display())).unwrap();
        std::fs::set_permissions(&spy, std::fs::Permissions::from_mode(0o755)).unwrap();
        let files = EvidenceFiles { stacks: folder.path().join("stacks"), report: folder.path().join("hang.txt") };
        self.supervisor.keep_evidence(vec![files], Some(spy)).unwrap();
        self.write(&acquire(self.pids[0], "hung", -1.0, 10));
        assert_eq!(std::fs::read_to_string(&asked).unwrap(), "asked\n");
    }

    fn until_end(&self) -> (Vec<Exited>, Outcome) {
        let (exits, killed, outcome) = self.until_end_with_killed();
        assert_eq!(killed, [], "no grace is over");
        (exits, outcome)
    }

    /// Like `until_end`, but also returns the workers that were killed after the grace period of a stop.
    fn until_end_with_killed(&self) -> (Vec<Exited>, Vec<(u32, i32)>, Outcome) {
        let (mut exits, mut killed) = (Vec::new(), Vec::new());
        loop {
            match self.event() {
                Event::WorkerExited { local_rank, exit, sent, .. } => exits.push((local_rank, exit, sent)),
                Event::WorkersKilled(some) => killed.extend(some.workers),
                Event::GroupEnded { outcome, .. } => {
                    exits.sort_by_key(|(local_rank, ..)| *local_rank);
                    return (exits, killed, outcome);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn close(self) {
        self.supervisor.stop(KILL).unwrap();
        self.supervisor.close(false).unwrap();
        assert!(!self.path.exists() && !self.path.parent().unwrap().exists(), "nothing is left of the FIFO");
        drop(self.supervisor);
        assert_no_children();
    }
}

fn shell(script: &str) -> ProcessSpec {
    process(["sh", "-c", script].map(Into::into).to_vec())
}

fn by(signal: i32) -> WorkerExit {
    WorkerExit::Signaled { signal }
}

fn record(pid: i32, scope: &str, expires: f64, signal: i32, more: &str) -> String {
    format!(
        "{{\"version\": 1, \"pid\": {pid}, \"scope_id\": \"{scope}\", \"expiration_time\": {expires}, \
         \"signal\": {signal}{more}}}\n"
    )
}

fn wall(from_now: f64) -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() + from_now
}

fn acquire(pid: i32, scope: &str, from_now: f64, signal: i32) -> String {
    record(pid, scope, wall(from_now), signal, "")
}

fn release(pid: i32, scope: &str) -> String {
    record(pid, scope, -1.0, 0, "")
}

#[test]
fn a_worker_that_does_not_release_its_timer_fails() {
    let mut job = Job::sleepers(2);
    let hung = job.pids[1];
    job.write(&(acquire(hung, "step", 1000.0, 9) + &acquire(hung, "epoch", 0.05, 9)));
    let timer = job.expired();
    assert_eq!((timer.local_rank, timer.pid, &*timer.scope, timer.others), (1, hung, "epoch", 1));
    assert_eq!((timer.signal, timer.at), (Some(Signal::KILL), None));
    assert!(matches!(job.event(), Event::FailureSeen { local_rank: 1, siblings: 1, .. }));
    let (exits, outcome) = job.until_end();
    assert_eq!(exits, [(0, by(15), Some(Signal::TERM)), (1, by(9), Some(Signal::KILL))]);
    assert_eq!(outcome, Outcome::Failed);
    job.close();
}

#[test]
fn released_and_replaced_timers_do_not_expire() {
    let mut job = Job::sleepers(1);
    let pid = job.pids[0];
    // The first timer is already due when its record is read. The release after it must still take effect (TIM-2).
    job.write(&(acquire(pid, "a", -1.0, 9) + &release(pid, "a")));
    job.write(&(acquire(pid, "b", 0.02, 9) + &acquire(pid, "b", 1000.0, 9)));
    job.write(&acquire(pid, "c", 0.1, 0));
    let timer = job.expired();
    assert_eq!((&*timer.scope, timer.signal, timer.others), ("c", None, 1), "told, not reaped");
    assert!(is_running(pid));
    job.close();
}

#[test]
fn the_monotonic_deadline_of_a_record_overrides_its_wall_clock_time() {
    let mut job = Job::sleepers(1);
    let pid = job.pids[0];
    let at = |from_now: u64| format!(", \"deadline_ns\": {}, \"at\": \"a.py#7\"", Stamp::now().0 + from_now);
    // Simulate a step of the wall clock, in either direction.
    job.write(&record(pid, "far", wall(-1000.0), 9, &at(1_000_000_000_000)));
    job.write(&record(pid, "near", wall(1000.0), 0, &at(1_000_000)));
    let timer = job.expired();
    assert_eq!((&*timer.scope, timer.at.as_deref()), ("near", Some("a.py#7")), "TIM-1");
    job.close();
}

#[test]
fn an_expired_timer_signals_only_workers_and_their_descendants() {
    let mut job = Job::sleepers(1);
    let mut stranger = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let own = std::process::id().cast_signed();
    let nursery = job.supervisor.nursery_pid().unwrap();
    let strange = stranger.id().cast_signed();
    job.write(&[strange, own, nursery, 1].map(|pid| acquire(pid, "claim", -1.0, 9)).concat());
    let complaint = job.complaint();
    assert!(complaint.contains("is neither a worker of this job") && complaint.contains("claim"), "TIM-3: {complaint}");
    job.write(&acquire(-job.pids[0], "x", -1.0, 9));
    assert!(job.complaint().contains("no process has such a pid"));
    let started = ", \"start_time\": 1";
    job.write(&record(job.pids[0], "x", wall(-1.0), 9, started));
    assert!(job.complaint().contains("belongs to another process now"));
    job.write(&acquire(job.pids[0], "end", -1.0, 0));
    assert_eq!(job.expired().scope, "end");
    assert!([strange, nursery, job.pids[0]].into_iter().all(is_running));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    job.close();
}

#[test]
fn an_expired_timer_of_a_descendant_fails_its_worker() {
    let script = "sleep 1000 & echo $!; echo READY; wait";
    let mut job = Job::start(vec![worker(&["sleep"]), shell(script)]);
    let child: i32 = job.lines.said.iter().find_map(|line| line.parse().ok()).unwrap();
    job.write(&acquire(child, "load", -1.0, 9));
    let timer = job.expired();
    assert_eq!((timer.local_rank, timer.pid), (1, child));
    assert!(matches!(job.event(), Event::FailureSeen { local_rank: 1, siblings: 1, .. }));
    assert_eq!(job.until_end().1, Outcome::Failed);
    assert!(!is_running(child));
    job.close();
}

#[test]
fn invalid_timer_records_are_reported_once_per_kind_and_skipped() {
    let mut job = Job::sleepers(1);
    for _ in 0..64 {
        job.write(&"x".repeat(16 * 1024));
        job.write("\n{\"version\": 3}\nhello\n");
    }
    let complaints = [job.complaint(), job.complaint()];
    assert!(complaints[0].contains("more than 4096 bytes"), "{complaints:?}");
    assert!(complaints[1].contains("not a timer record"), "{complaints:?}");
    // One writer dies in the middle of its record, and the record of another one follows.
    let whole = acquire(job.pids[0], "good", 0.0, 0);
    job.write(&format!("{}{whole}", &whole[..40]));
    assert_eq!(job.expired().scope, "good", "TIM-4");
    job.close();
}

#[test]
fn timers_do_not_expire_while_the_group_is_suspended() {
    let mut job = Job::sleepers(1);
    let pid = job.pids[0];
    job.write(&acquire(pid, "probe", -1.0, 0));
    assert_eq!(job.expired().scope, "probe", "the process is bound");
    job.supervisor.suspend().unwrap();
    job.write(&acquire(pid, "a", 0.01, 9));
    assert_eq!(job.supervisor.next(Some(Duration::from_millis(200))).unwrap(), Next::TimedOut, "TIM-1");
    job.write(&release(pid, "a"));
    job.supervisor.resume().unwrap();
    job.write(&acquire(pid, "b", 0.0, 0));
    assert_eq!(job.expired().scope, "b");
    job.close();
}

#[test]
fn a_supervisor_has_only_one_timer_fifo() {
    let job = Job::sleepers(1);
    for path in [None, Some(&*job.path)] {
        let Err(SupervisorError::Timers { source, .. }) = job.supervisor.watch_timers(path) else {
            panic!("there is a FIFO already");
        };
        assert_eq!(source.raw_os_error(), Some(libc::EALREADY));
    }
    job.close();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("taken");
    std::fs::write(&path, "").unwrap();
    let supervisor = Supervisor::new(Config { nursery: vec![image()], owns_process: true }).unwrap();
    let Err(SupervisorError::Timers { path: named, .. }) = supervisor.watch_timers(Some(&path)) else {
        panic!("a file is no FIFO");
    };
    assert_eq!(named, path);
    supervisor.close(false).unwrap();
    assert!(path.exists());
    let late = directory.path().join("late");
    assert!(matches!(supervisor.watch_timers(Some(&late)), Err(SupervisorError::Closed)));
    assert!(!late.exists());
}

/// When the owning thread exits, sends true if `path` exists.
struct AtExit {
    path: PathBuf,
    exists: Sender<bool>,
}

impl Drop for AtExit {
    fn drop(&mut self) {
        // Ignore an error, because the receiver is dropped if the test fails.
        let _ = self.exists.send(self.path.exists());
    }
}

thread_local! {
    static AT_EXIT: OnceCell<AtExit> = const { OnceCell::new() };
}

#[test]
fn the_fifo_is_not_created_or_removed_by_the_runtime_thread() {
    let supervisor = Supervisor::new(Config { nursery: vec![image()], owns_process: true }).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fifo");
    // Block the runtime thread until the FIFO exists.
    let ((block, is_blocked), (go_on, blocked)) = (channel(), channel::<()>());
    let (exists, existed) = channel();
    let at_exit = AtExit { path: path.clone(), exists };
    let block = move || {
        block.send(()).unwrap();
        assert!(blocked.recv().is_err());
        AT_EXIT.with(|cell| assert!(cell.set(at_exit).is_ok()));
    };
    supervisor.spawn(Box::new(|| Box::pin(async move { block() }))).unwrap();
    is_blocked.recv().unwrap();
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| supervisor.watch_timers(Some(&path)));
        // Release the thread even if the FIFO does not appear.
        let go_on = go_on;
        wait_until("the FIFO", || path.exists());
        drop(go_on);
        assert_eq!(watching.join().unwrap().unwrap(), path);
    });
    supervisor.close(false).unwrap();
    assert_eq!(existed.try_iter().collect::<Vec<_>>(), [true], "the FIFO is still there when the thread exits");
    assert!(!path.exists());
    assert_no_children();
}

#[test]
fn a_worker_that_floods_the_fifo_does_not_delay_its_stop() {
    // The limit on its CPU time ends the worker if the stop does not.
    let flood = |path: &Path| format!("trap '' TERM; ulimit -t 40; echo READY; exec yes '' > {}", path.display());
    let job = Job::start_with(|path| vec![shell(&flood(path)), worker(&["sleep"])]);
    assert!(job.complaint().contains("not a timer record"), "it floods");
    // The flood delays neither the deadline of the stop, nor the worker's exit, nor the nursery's reply.
    job.supervisor.stop(StopPolicy { signal: Signal::TERM, grace: Duration::from_millis(100) }).unwrap();
    let (exits, killed, outcome) = job.until_end_with_killed();
    assert_eq!(killed, [(0, job.pids[0])]);
    assert_eq!(exits, [(0, by(9), Some(Signal::KILL)), (1, by(15), Some(Signal::TERM))]);
    assert_eq!(outcome, Outcome::Stopped);
    job.close();
}

#[test]
fn reports_of_timers_without_a_signal_are_limited_and_the_rest_counted() {
    let mut job = Job::sleepers(1);
    let pid = job.pids[0];
    let many: Vec<String> = (0..1000).map(|number| acquire(pid, &format!("step {number}"), -1.0, 0)).collect();
    job.write(&many.concat());
    job.write(&acquire(pid, "last", -1.0, 9));
    let mut told = 0;
    let last = loop {
        match job.expired() {
            timer if timer.signal.is_none() => told += 1,
            timer => break timer,
        }
    };
    assert_eq!((&*last.scope, told), ("last", 64), "TIM-4");
    assert!(matches!(job.event(), Event::FailureSeen { .. }));
    assert!(matches!(job.event(), Event::WorkerExited { .. }));
    let more = job.complaint();
    assert!(more.starts_with("936 more timers expired"), "{more}");
    assert!(matches!(job.event(), Event::GroupEnded { .. }));
    job.close();
}

#[test]
fn many_new_timers_do_not_displace_a_process_that_must_be_signalled() {
    // Start more processes than can have timers at the same time.
    let script = "for i in $(seq 520); do sleep 1000 & echo $!; done; echo READY; wait";
    let mut job = Job::start(vec![worker(&["sleep"]), shell(script)]);
    let children: Vec<i32> = job.lines.said.iter().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(children.len(), 520);
    job.is_asked_where_it_is();
    let use_and_release = |pid: &i32| acquire(*pid, "step", 1000.0, 9) + &release(*pid, "step");
    job.write(&children.iter().map(use_and_release).collect::<String>());
    job.write(&acquire(job.pids[1], "all were read", -1.0, 0));
    let mut expired = [job.expired(), job.expired()];
    expired.sort_by(|one, other| one.scope.cmp(&other.scope));
    assert_eq!(expired.map(|timer| timer.scope), ["all were read", "hung"]);
    assert!(matches!(job.event(), Event::FailureSeen { local_rank: 0, siblings: 1, .. }));
    let (exits, outcome) = job.until_end();
    assert_eq!((exits[0], outcome), ((0, by(10), Signal::new(10)), Outcome::Failed), "TIM-3");
    job.close();
}

#[test]
fn a_stop_ends_a_running_py_spy_process() {
    let mut job = Job::sleepers(1);
    job.is_asked_where_it_is();
    job.supervisor.stop(KILL).unwrap();
    // The timer may or may not be reported before the end of the group.
    while !matches!(job.event(), Event::GroupEnded { .. }) {}
    job.close();
}
