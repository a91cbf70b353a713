//! Tests for cleaners (processes that clean up after others). They are always killed last, and after a grace
//! period.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::PathBuf;
use std::time::Duration;

use elasticrs_nursery::protocol::Request;
use elasticrs_nursery::sweep::{kill_by_token, sweep_children_of_self};
use elasticrs_testkit::nursery::{Agent, Client, Worker, pids, program};
use elasticrs_testkit::{assert_no_children, is_running, wait_for_end, worker_program};

/// A worker whose cleaner removes a file once all other processes have exited.
struct Cleaned {
    client: Client,
    worker: Worker,
    file: PathBuf,
    cleaner: i32,
    _folder: tempfile::TempDir,
}

impl Cleaned {
    fn start(how: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("shared");
        let mut client = Client::start();
        let (worker, lines) = client.spawn_ready(&[&["cleaner", file.to_str().unwrap()], how].concat());
        assert!(file.exists());
        let cleaner = lines.said[0].parse().unwrap();
        Self { client, worker, file, cleaner, _folder: folder }
    }
}

#[test]
fn a_sweep_gives_the_cleaner_time_to_finish_and_does_not_report_it() {
    let mut it = Cleaned::start(&[]);
    let swept = it.client.sweep(0, 0);
    assert!(!it.file.exists());
    assert_eq!((swept.ended.len(), swept.stuck.len()), (1, 0), "one holds the pipe: {swept:?}");
    assert!(!pids(&swept.ended).contains(&it.cleaner));
}

#[test]
fn a_cleaner_that_does_not_exit_is_killed() {
    let mut it = Cleaned::start(&["stubborn"]);
    let swept = it.client.sweep(0, 0);
    assert!(it.file.exists() && !is_running(it.cleaner));
    assert_eq!((pids(&swept.ended).contains(&it.cleaner), swept.stuck.len()), (true, 0), "{swept:?}");
}

#[test]
fn a_cleaner_outlives_its_process_group() {
    let mut it = Cleaned::start(&[]);
    it.client.send(&Request::SignalGroup { pid: it.worker.pid, signal: libc::SIGKILL });
    it.client.exit_of(it.worker.pid);
    wait_for_end(it.cleaner);
    assert!(!it.file.exists());
}

#[test]
fn an_agent_that_adopts_a_cleaner_gives_it_time_to_finish() {
    for how in [&[] as &[&str], &["stubborn"]] {
        let mut it = Cleaned::start(how);
        it.client.kill();
        wait_for_end(it.worker.pid);
        let outcome = sweep_children_of_self(&[], &[it.worker.pid], Duration::from_secs(10));
        assert_eq!((it.file.exists(), outcome.stuck.len()), (!how.is_empty(), 0), "{outcome:?}");
        assert_no_children();
    }
}

#[test]
fn an_agent_that_finds_a_cleaner_by_its_token_gives_it_time_to_finish() {
    let mut it = Cleaned::start(&[]);
    let outcome = kill_by_token(it.client.nursery.token, Duration::from_secs(10));
    assert_eq!((it.file.exists(), outcome.stuck.len()), (false, 0), "{outcome:?}");
    it.client.reap();
    sweep_children_of_self(&[], &[it.worker.pid], Duration::from_secs(10));
}

#[test]
fn the_nursery_of_a_killed_agent_gives_the_cleaner_time_to_finish() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shared");
    let worker = worker_program();
    let arguments = ["1", &worker.to_string_lossy(), "cleaner", &file.to_string_lossy()];
    Agent::start(&program(), "small-agent", &arguments, 1).kill();
    assert!(!file.exists());
}
