//! Tests for processes that hang in the kernel and hold the lock of their address space. Nothing may wait for
//! them, except for their exit.
//!
//! The tests need root and a kernel with FUSE. Without these, they check nothing.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use elasticrs_nursery::protocol::{Descendant, Request, SweepLimits, SweepOutcome};
use elasticrs_nursery::sweep::{kill_by_token, sweep_children_of_self};
use elasticrs_testkit::hung_file::{HungFile, wait_until_it_hangs};
use elasticrs_testkit::nursery::{Client, Lines, Worker, pipe, process, with_stdout};
use elasticrs_testkit::{is_running, wait_for_end, wait_until, worker_program};

/// Time after which a process is reported as stuck. It is long enough for the others to exit.
const GIVE_UP: Duration = Duration::from_millis(500);

/// A worker with three descendants. The second one hangs.
struct Hung {
    file: HungFile,
    client: Client,
    worker: Worker,
    stuck: i32,
    others: Vec<i32>,
    _folder: tempfile::TempDir,
}

impl Hung {
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let file = HungFile::new(folder.path())?;
        let mut client = Client::start();
        let script = "sleep 1000 & echo $!; \"$0\" hang-in-map \"$1\" >/dev/null & echo $!; sleep 1000 & echo $!; echo READY; wait";
        let argv = ["sh".into(), "-c".into(), script.into(), worker_program().into(), file.path().into()];
        let (reader, writer) = pipe();
        client.request_spawn(&with_stdout(process(argv.into())), &[], vec![writer]);
        let worker = client.spawned().unwrap();
        let mut lines = Lines::new(reader);
        lines.until_ready();
        let pids: Vec<i32> = lines.said.iter().map(|pid| pid.parse().unwrap()).collect();
        wait_until_it_hangs(pids[1]);
        let name = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        wait_until("the others run their program", || [pids[0], pids[2]].iter().all(|&pid| name(pid) == "sleep\n"));
        Some(Self { file, client, worker, stuck: pids[1], others: vec![pids[0], pids[2]], _folder: folder })
    }

    /// Checks that the other processes have exited and are reported by name, and that only the hanging one is
    /// reported as stuck.
    fn check(&self, ended: &[Descendant], stuck: &[Descendant]) {
        assert!(!self.others.iter().any(|&pid| is_running(pid)));
        assert!(is_running(self.stuck), "it hangs");
        assert_eq!(stuck, [Descendant { pid: self.stuck, command: "testkit-worker".into() }]);
        let mut names: Vec<_> = ended.iter().map(|ended| (ended.pid, ended.command.as_str())).collect();
        names.retain(|&(pid, _)| pid != self.worker.pid && pid != self.client.nursery.pid);
        names.sort_unstable();
        assert_eq!(names, self.others.iter().map(|&pid| (pid, "sleep")).collect::<Vec<_>>());
    }
}

#[test]
fn a_sweep_by_the_nursery_reports_only_the_hung_process_as_stuck() {
    let Some(mut hung) = Hung::start() else { return };
    let limits = SweepLimits::at_once(GIVE_UP);
    hung.client.send(&Request::Sweep { number: 1, left_by: None, limits, savers: None });
    hung.others.iter().for_each(|&pid| wait_for_end(pid));
    let swept = hung.client.swept();
    hung.check(&swept.ended, &swept.stuck);
    drop(hung.file);
    // The process now exits, because of the signal that it received earlier.
    assert!(hung.client.sweep(0, 0).stuck.is_empty());
}

#[test]
fn a_sweep_by_an_adopting_agent_reports_only_the_hung_process_as_stuck() {
    let Some(mut hung) = Hung::start() else { return };
    hung.client.kill();
    let sweep = |hung: &Hung, give_up| sweep_children_of_self(&[], &[hung.worker.pid], give_up);
    let SweepOutcome { ended, stuck, .. } = sweep(&hung, GIVE_UP);
    hung.check(&ended, &stuck);
    let stuck = hung.stuck;
    drop(hung.file);
    assert!(sweep_children_of_self(&[], &[hung.worker.pid], Duration::from_secs(10)).stuck.is_empty());
    assert!(!is_running(stuck));
}

#[test]
fn killing_by_token_reports_only_the_hung_process_as_stuck() {
    let Some(mut hung) = Hung::start() else { return };
    let SweepOutcome { ended, stuck, .. } = kill_by_token(hung.client.nursery.token, GIVE_UP);
    hung.check(&ended, &stuck);
    drop(hung.file);
    hung.client.reap();
    assert!(sweep_children_of_self(&[], &[hung.worker.pid], Duration::from_secs(10)).stuck.is_empty());
}
