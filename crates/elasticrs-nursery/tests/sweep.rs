//! Tests for sweeping: the nursery kills the processes that a worker has left behind, except those that may stay.

use elasticrs_nursery::protocol::{Reply, Request};
use elasticrs_nursery::spec::PassedFd;
use elasticrs_sys::process;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::procfs::Stat;
use elasticrs_testkit::nursery::{Client, Lines, pids, pipe, process, with_stdout};
use elasticrs_testkit::{is_running, wait_for_end, wait_readable};
use nix::sys::ptrace;
use nix::unistd::Pid;

const KILLED: WorkerExit = WorkerExit::Signaled { signal: libc::SIGKILL };

#[test]
fn a_sweep_without_processes_completes_immediately() {
    let mut client = Client::start();
    let swept = client.sweep(60_000, 60_000);
    assert!(swept.ended.is_empty() && swept.stuck.is_empty() && swept.spared.is_empty(), "{swept:?}");
}

#[test]
fn a_daemonised_grandchild_is_killed_and_reported() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["daemonise"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    let swept = client.sweep(0, 0);
    assert_eq!(pids(&swept.ended), [grandchild]);
    assert_eq!(swept.ended[0].command, "testkit-worker");
    assert!(!is_running(grandchild));
    // The worker is not listed as a leftover process, because its exit is reported separately.
    assert_eq!(client.exit_of(worker.pid), KILLED);
}

#[test]
fn a_process_tree_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let mut client = Client::start();
    let (worker, _lines) = client.spawn_ready(&["tree", "3"]);
    let swept = client.sweep(0, 50);
    assert_eq!((swept.ended.len(), swept.more), (14, 0), "{swept:?}");
    assert_eq!(client.exit_of(worker.pid), KILLED);
}

#[test]
fn killed_processes_beyond_sixty_four_are_counted_but_not_listed() {
    let mut client = Client::start();
    client.spawn_ready(&["tree", "6"]);
    let swept = client.sweep(0, 0);
    assert_eq!((swept.ended.len(), swept.more), (64, 126 - 64));
}

#[test]
fn a_sweep_sends_sigterm_before_sigkill() {
    let mut client = Client::start();
    let (worker, _lines) = client.spawn_ready(&["sleep"]);
    client.sweep(0, 60_000);
    let exit = client.exit_of(worker.pid);
    assert_eq!(exit, WorkerExit::Signaled { signal: libc::SIGTERM });
}

#[test]
fn a_process_whose_main_thread_has_exited_is_killed() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["headless"]);
    let headless: i32 = lines.said[0].parse().unwrap();
    assert_eq!(elasticrs_testkit::state(headless), Some('Z'), "and yet it runs");
    let swept = client.sweep(0, 0);
    assert_eq!((pids(&swept.ended), swept.stuck.len()), (vec![headless], 0), "{swept:?}");
    wait_for_end(headless);
    assert_eq!(client.exit_of(worker.pid), KILLED);
}

#[test]
fn a_process_held_by_a_tracer_is_reported_in_each_sweep() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["daemonise"]);
    let traced = Pid::from_raw(lines.said[0].parse().unwrap());
    ptrace::seize(traced, ptrace::Options::empty()).unwrap();
    for _ in 0..2 {
        let swept = client.sweep(0, 0);
        assert_eq!((&swept.held[..], swept.stuck.len()), (&[traced.as_raw()][..], 0), "{swept:?}");
    }
    client.exit_of(worker.pid);
    // The kernel reports the exit first to this process, because it is the tracer, and then to the nursery.
    process::reap(traced.as_raw());
    let swept = client.sweep(0, 0);
    assert!(swept.held.is_empty() && swept.stuck.is_empty(), "{swept:?}");
}

#[test]
fn a_sweep_ends_stopped_processes_with_sigterm() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["daemonise"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    for pid in [worker.pid, grandchild] {
        process::send_signal(elasticrs_testkit::pidfd(pid).unwrap(), libc::SIGSTOP).unwrap();
    }
    // SIGTERM also ends stopped processes, because the nursery sends SIGCONT after it.
    let swept = client.sweep(0, 60_000);
    assert_eq!(pids(&swept.ended), [grandchild]);
    let exit = client.exit_of(worker.pid);
    assert_eq!(exit, WorkerExit::Signaled { signal: libc::SIGTERM });
}

#[test]
fn a_fork_bomb_and_a_chain_of_forking_processes_that_leave_their_session_are_killed() {
    for command in ["chain", "fork-bomb"] {
        let mut client = Client::start();
        let (worker, mut lines) = client.spawn_ready(&[command]);
        let swept = client.sweep(0, 0);
        assert!(swept.stuck.is_empty() && swept.spared.is_empty(), "{command}: {swept:?}");
        client.exit_of(worker.pid);
        assert_eq!(lines.rest(), Vec::<String>::new(), "{command}: ended by the sweep, not by its own limit");
    }
}

#[test]
fn an_exempt_process_is_spared() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["exempt"]);
    let (_, ordinary) = client.spawn_ready(&["daemonise"]);
    let exempt: i32 = lines.said[0].parse().unwrap();
    let swept = client.sweep(0, 0);
    assert_eq!(swept.spared.iter().map(|spared| spared.pid).collect::<Vec<_>>(), [exempt]);
    assert_eq!(pids(&swept.ended), [ordinary.said[0].parse::<i32>().unwrap()]);
    assert_eq!(client.exit_of(worker.pid), KILLED);
    assert!(is_running(exempt));
    // A second sweep finds the same process, although the worker's session no longer exists.
    assert_eq!(client.sweep(0, 0).spared.len(), 1);
    let pidfd = elasticrs_testkit::pidfd(exempt).unwrap();
    process::send_signal(&pidfd, libc::SIGKILL).unwrap();
    wait_readable(pidfd, "the end of the exempt process");
    assert!(client.sweep(0, 0).spared.is_empty());
}

#[test]
fn lingering_descendants_may_end_by_themselves() {
    let mut client = Client::start();
    let (uploads, uploaded) = pipe();
    let (reader, writer) = pipe();
    let mut process = with_stdout(process(["sh", "-c", "(read x <&9) & echo READY"].map(Into::into).into()));
    process.pass_fds.push(PassedFd { source: 1, target: 9 });
    client.request_spawn(&process, &[], vec![writer, uploads]);
    let worker = client.spawned().unwrap();
    Lines::new(reader).until_ready();
    assert_eq!(client.exit_of(worker.pid), WorkerExit::Exited { code: 0 });
    client.request_sweep(60_000, 0, 60_000);
    drop(uploaded);
    let swept = client.swept();
    assert!(swept.ended.is_empty() && swept.stuck.is_empty(), "{swept:?}");
}

#[test]
fn a_sweep_without_grace_overrides_a_lingering_sweep() {
    let mut client = Client::start();
    let (_, lines) = client.spawn_ready(&["daemonise"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    client.request_sweep(600_000, 600_000, 600_000);
    let swept = client.sweep(0, 0);
    assert_eq!(pids(&swept.ended), [grandchild]);
}

#[test]
fn exits_are_reported_while_a_sweep_lingers() {
    let mut client = Client::start();
    let (first, _lines) = client.spawn_ready(&["sleep"]);
    let (second, _lines) = client.spawn_ready(&["sleep"]);
    client.request_sweep(600_000, 0, 600_000);
    for worker in [first, second] {
        client.send(&Request::SignalGroup { pid: worker.pid, signal: libc::SIGKILL });
        assert_eq!(client.exit_of(worker.pid), KILLED);
    }
    assert!(client.swept().ended.is_empty());
}

#[test]
fn a_nursery_can_be_used_again_after_a_sweep() {
    let mut client = Client::start();
    for _ in 0..10 {
        let (worker, lines) = client.spawn_ready(&["daemonise"]);
        assert_eq!(pids(&client.sweep(0, 0).ended), [lines.said[0].parse::<i32>().unwrap()]);
        assert_eq!(client.exit_of(worker.pid), KILLED);
    }
}

#[test]
fn stops_and_continuations_of_a_worker_are_reported() {
    let mut client = Client::start();
    let (worker, mut lines) = client.spawn_ready(&["stop-self"]);
    let pid = worker.pid;
    client.find(|reply| (*reply == Reply::Stopped { pid, signal: libc::SIGSTOP }).then_some(()));
    client.send(&Request::SignalGroup { pid, signal: libc::SIGCONT });
    client.find(|reply| (*reply == Reply::Continued { pid }).then_some(()));
    assert_eq!(lines.next().unwrap(), "CONTINUED");
    client.sweep(0, 0);
}

#[test]
fn descendants_keep_running_after_a_leave_request() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["daemonise"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    client.send(&Request::SignalGroup { pid: worker.pid, signal: libc::SIGKILL });
    client.exit_of(worker.pid);
    client.send(&Request::Leave);
    assert_eq!(client.reap(), 0);
    assert!(is_running(grandchild));
    // This process has adopted the grandchild, because it is the next subreaper.
    process::send_signal(elasticrs_testkit::pidfd(grandchild).unwrap(), libc::SIGKILL).unwrap();
    wait_for_end(grandchild);
    elasticrs_sys::process::reap(grandchild);
}

#[test]
fn workers_after_a_sweep_do_not_inherit_its_priority() {
    let nice = |pid: i32| Stat::of(pid).unwrap().field::<i32>(19).unwrap();
    let mut client = Client::start();
    client.spawn_ready(&["daemonise"]);
    client.sweep(0, 0);
    let (worker, _lines) = client.spawn_ready(&["sleep"]);
    assert_eq!(nice(worker.pid), nice(std::process::id().cast_signed()));
    client.sweep(0, 0);
}
