//! Finds processes with many zombie children.
//!
//! A zombie occupies a process ID until its parent waits for it. Usually the nursery adopts and reaps the orphans of a
//! worker. A worker that is a child subreaper adopts them itself instead, and most programs never wait for children
//! that they did not start. Every worker of a group that [replaces](crate::spec::GroupPolicy::replaces) failed workers is
//! a child subreaper.
//!
//! [`Scanner::scan`] runs on its own thread, because it reads `/proc`. It estimates the number of processes from the
//! last scan and from the number of process IDs that the kernel has assigned since. If no process can have [`MANY`]
//! zombie children, it skips the scan. For a job that starts no processes, a call therefore reads only one small file.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use elasticrs_nursery::tree::{Status, children_of_self, descendants, describe, newest_pid};
use elasticrs_sys::procfs;

/// Minimum number of zombie children for which a process is reported. It is a quarter of 1024, the smallest
/// process limit that is commonly set for containers. A program that starts one helper for each CPU usually has
/// fewer zombies, even if it waits for its helpers only at the end.
const MANY: usize = 256;
/// Scans take at most 1/`SHARE` of the time, regardless of the number of processes.
const SHARE: u32 = 100;

/// The processes to scan.
pub(super) struct Subjects {
    /// Local rank and pid of each running worker.
    pub(super) workers: Vec<(u32, i32)>,
    /// True if the calling process runs only the agent, so that all of its children belong to the agent.
    pub(super) agent: bool,
}

/// State of the scan between two calls.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    /// Pids of the processes that were already reported: workers and possibly the agent.
    reported: BTreeSet<i32>,
    /// Newest pid and number of processes at the last scan. `None` if there was no scan yet.
    last: Option<Last>,
    rest_until: Option<Instant>,
}

/// Data from the last scan, used to decide whether another scan is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Last {
    /// Most recently assigned pid when the scan started.
    newest: i32,
    /// Largest number of descendants of any worker, or the number of the agent's children if that is larger. Zombies
    /// are included.
    processes: usize,
}

impl Last {
    /// Returns true if a process may have [`MANY`] zombie children by now.
    ///
    /// Compares the newest pid with that of the last scan to estimate how many processes were started. Returns true if
    /// the pids cannot be compared.
    fn may_be_many(self, newest: i32) -> bool {
        let started = usize::try_from(newest - self.newest);
        newest <= 0 || started.is_ok_and(|started| started + self.processes >= MANY) || newest < self.newest
    }
}

impl Scanner {
    /// Returns messages about processes that have at least [`MANY`] zombie children. Scans the workers, their
    /// descendants, and the agent.
    ///
    /// At most one message is ever returned for each worker and its descendants, and at most one for the agent.
    pub(super) fn scan(&mut self, subjects: &Subjects) -> Vec<String> {
        let begun = Instant::now();
        let newest = newest_pid();
        let is_due = self.rest_until.is_none_or(|until| begun >= until);
        if !is_due || !procfs::is_own() || self.last.is_some_and(|last| !last.may_be_many(newest)) {
            return Vec::new();
        }
        let (messages, processes) = self.scan_now(subjects);
        self.last = Some(Last { newest, processes });
        self.rest_until = Some(begun + begun.elapsed() * SHARE);
        messages
    }

    /// Scans for zombie processes. Returns the messages for the user, and the value for [`Last::processes`].
    fn scan_now(&mut self, Subjects { workers, agent }: &Subjects) -> (Vec<String>, usize) {
        let me = std::process::id().cast_signed();
        self.reported.retain(|&pid| pid == me || workers.iter().any(|(_, worker)| *worker == pid));
        let (mut messages, mut most) = (Vec::new(), 0);
        for &(local_rank, worker) in workers.iter().filter(|(_, worker)| !self.reported.contains(worker)) {
            let (zombies, processes) = zombies_below(worker);
            most = most.max(processes);
            if let Some((parent, count)) = zombies.into_iter().max_by_key(|(_, count)| *count)
                && count >= MANY
            {
                messages.push((worker, worker_message(local_rank, parent, count)));
            }
        }
        if *agent && !self.reported.contains(&me) {
            let children = children_of_self();
            most = most.max(children.len());
            let count = children.into_iter().filter(|&pid| is_zombie(pid)).count();
            if count >= MANY {
                messages.push((me, agent_message(me, count)));
            }
        }
        self.reported.extend(messages.iter().map(|(pid, _)| *pid));
        (messages.into_iter().map(|(_, message)| message).collect(), most)
    }
}

/// Returns the number of zombie children of the worker and of each of its descendants, omitting processes without
/// zombie children. Also returns the total number of descendants.
fn zombies_below(worker: i32) -> (BTreeMap<i32, usize>, usize) {
    let (mut zombies, mut processes) = (BTreeMap::<i32, usize>::new(), 0);
    for listed in descendants(worker, &[]) {
        processes += 1;
        if is_zombie(listed.pid) {
            *zombies.entry(listed.parent).or_default() += 1;
        }
    }
    (zombies, processes)
}

fn is_zombie(pid: i32) -> bool {
    Status::of(pid).is_some_and(Status::has_ended)
}

/// Part of several messages to the user. It explains why many zombies are a problem.
const CONSEQUENCE: &str = "Each one occupies a process ID, and no process can be started once the limit is reached";

fn worker_message(local_rank: u32, parent: i32, count: usize) -> String {
    let command = describe(parent).command;
    format!(
        "local rank {local_rank}: process {parent} ({command}) has {count} zombie children, because it does not wait for \
         them. {CONSEQUENCE}. Wait for every child (subprocess.run, Popen.wait, os.waitpid); a child subreaper, which \
         every worker is with --on-failure replace, must also wait for the background processes that its \
         descendants leave"
    )
}

fn agent_message(me: i32, count: usize) -> String {
    format!(
        "the agent (pid {me}) has {count} zombie children that it did not start. {CONSEQUENCE}. Run the agent below an init \
         process that reaps orphans (for example with docker run --init)"
    )
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use super::*;

    /// Starts a child subreaper that adopts this number of orphans and never reaps them. Returns once all of them are
    /// zombies.
    fn subreaper(orphans: usize) -> Child {
        let program = "
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
middle = os.fork()
if middle == 0:
    for _ in range(int(sys.argv[1])):
        orphan = os.fork()
        if orphan == 0:
            os._exit(0)
        os.write(1, b'%d\\n' % orphan)
    os._exit(0)
os.waitpid(middle, 0)
os.write(1, b'\\n')
sys.stdin.read()
";
        let mut command = Command::new("python3");
        command.args(["-c", program, &orphans.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        for pid in lines.take_while(|line| !line.is_empty()) {
            let pid: i32 = pid.parse().unwrap();
            elasticrs_testkit::wait_until("an orphan is a zombie", || is_zombie(pid));
        }
        child
    }

    fn end(mut child: Child) {
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }

    fn scan(scanner: &mut Scanner, workers: &[(u32, i32)]) -> Vec<String> {
        // Clear the results of the previous scan, because they may make the scanner skip the next scan.
        (scanner.rest_until, scanner.last) = (None, None);
        scanner.scan(&Subjects { workers: workers.to_vec(), agent: false })
    }

    #[test]
    fn a_subreaper_with_many_zombies_is_reported_once_per_worker() {
        let (few, many) = (subreaper(MANY - 1), subreaper(MANY));
        let [few_pid, many_pid] = [&few, &many].map(|child| child.id().cast_signed());
        let workers = [(0, few_pid), (3, many_pid)];
        let mut scanner = Scanner::default();
        let messages = scan(&mut scanner, &workers);
        let [message] = &messages[..] else { panic!("{messages:?}") };
        assert!(message.starts_with(&format!("local rank 3: process {many_pid} (python3")), "{message}");
        assert!(message.contains(" has 256 zombie children"), "{message}");
        assert!(scan(&mut scanner, &workers).is_empty(), "it was reported");
        assert!(scan(&mut scanner, &workers[..1]).is_empty());
        assert_eq!(scan(&mut scanner, &workers).len(), 1, "in the next attempt");
        end(few);
        end(many);
    }

    #[test]
    fn a_descendant_with_many_zombies_is_reported_for_its_worker() {
        let many = subreaper(MANY);
        // Treat this test process as the worker.
        let own = std::process::id().cast_signed();
        let messages = scan(&mut Scanner::default(), &[(1, own)]);
        let [message] = &messages[..] else { panic!("{messages:?}") };
        assert!(message.starts_with(&format!("local rank 1: process {} (", many.id())), "{message}");
        end(many);
    }

    #[test]
    fn an_agent_with_many_zombies_is_reported_once() {
        let children: Vec<Child> = (0..MANY).map(|_| Command::new("true").spawn().unwrap()).collect();
        for child in &children {
            elasticrs_testkit::wait_until("a child is a zombie", || is_zombie(child.id().cast_signed()));
        }
        let subjects = |agent| Subjects { workers: Vec::new(), agent };
        let mut scanner = Scanner::default();
        assert!(scanner.scan_now(&subjects(false)).0.is_empty(), "the children are those of the user's program");
        let (messages, _) = scanner.scan_now(&subjects(true));
        let [message] = &messages[..] else { panic!("{messages:?}") };
        assert!(message.starts_with(&format!("the agent (pid {}) has 256 zombie", std::process::id())), "{message}");
        assert!(scanner.scan_now(&subjects(true)).0.is_empty(), "it was reported");
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
    }

    #[test]
    fn a_zombie_scan_is_skipped_while_there_are_too_few_processes() {
        for (newest, processes, now, expected) in [
            (1000, 0, 1000, false),
            (1000, 0, 1255, false),
            (1000, 0, 1256, true),
            (1000, 255, 1000, false),
            (1000, 255, 1001, true),
            (1000, 256, 1000, true),
            (1000, 0, 300, true),
            (0, 0, 0, true),
        ] {
            assert_eq!(Last { newest, processes }.may_be_many(now), expected, "{newest} {processes} {now}");
        }
    }

    #[test]
    fn a_zombie_scan_is_skipped_until_the_pause_is_over() {
        let mut scanner = Scanner { rest_until: Some(Instant::now() + Duration::from_secs(600)), ..Scanner::default() };
        let none = Subjects { workers: Vec::new(), agent: true };
        assert!(scanner.scan(&none).is_empty());
        assert_eq!(scanner.last, None, "the scan was skipped");
        scanner.rest_until = None;
        assert!(scanner.scan(&none).is_empty());
        assert!(scanner.last.is_some() && scanner.rest_until.is_some());
    }
}
