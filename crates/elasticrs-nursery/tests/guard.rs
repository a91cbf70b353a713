//! Tests for a nursery whose agent is stopped. It enforces the fence deadline and holds a connection.

use std::os::fd::AsFd;
use std::time::Duration;

use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::launch::NurseryImage;
use elasticrs_nursery::protocol::{Reply, Request, SweepLimits};
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::process::{self, WorkerExit};
use elasticrs_testkit::nursery::{Client, c_string, pids, program, worker};
use elasticrs_testkit::{wait_for_end, wait_for_state};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::ptrace;
use nix::unistd::Pid;

#[test]
fn processes_killed_by_the_fence_are_reported_only_in_the_next_sweep() {
    let fence = Fence::new().unwrap();
    let mut client = Client::start();
    client.nursery.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()).unwrap();
    for number in 1..=3 {
        fence.set(None);
        let (worker, lines) = client.spawn_ready(&["daemonise"]);
        let daemon: i32 = lines.said[0].parse().unwrap();
        fence.set(Some(boot_now()));
        wait_for_end(daemon);
        let limits = SweepLimits::at_once(Duration::from_secs(10));
        client.send(&Request::Sweep { number, left_by: None, limits, savers: None });
        assert!(matches!(client.next_reply().0, Reply::Fenced), "first of all");
        let Reply::Exited { pid, .. } = client.next_reply().0 else { panic!("then the worker") };
        assert_eq!(pid, worker.pid);
        let (answer, _) = client.next_reply();
        let Reply::Swept { number: answered, outcome } = answer else { panic!("{answer:?}") };
        assert_eq!(answered, number);
        assert_eq!(pids(&outcome.ended), [daemon]);
    }
}

#[test]
fn an_unfinished_fence_sweep_does_not_kill_workers_of_the_next_group() {
    let fence = Fence::new().unwrap();
    let mut client = Client::start();
    client.nursery.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()).unwrap();
    let (_, lines) = client.spawn_ready(&["daemonise"]);
    let slow = Pid::from_raw(lines.said[0].parse().unwrap());
    // Make the process stop while it exits, until the test lets it continue.
    ptrace::seize(slow, ptrace::Options::PTRACE_O_TRACEEXIT).unwrap();
    fence.set(Some(boot_now()));
    assert!(matches!(client.next_reply().0, Reply::Fenced));
    wait_for_state(slow.as_raw(), 't');
    fence.set(None);
    client.request_spawn(&worker(&["sleep"]), &[], Vec::new());
    // A nursery that started the worker now would report the start, and then kill the worker.
    let mut told = [PollFd::new(client.nursery.link.as_fd(), PollFlags::POLLIN)];
    poll(&mut told, 300_u16).unwrap();
    ptrace::cont(slow, None).unwrap();
    wait_for_end(slow.as_raw());
    process::reap(slow.as_raw());
    let worker = client.spawned().unwrap();
    client.send(&Request::SignalGroup { pid: worker.pid, signal: libc::SIGTERM });
    let ended_by = WorkerExit::Signaled { signal: libc::SIGTERM };
    assert_eq!(client.exit_of(worker.pid), ended_by);
    client.sweep(0, 0);
}

#[test]
fn a_nursery_without_free_descriptors_reports_a_failed_guard_request() {
    // The limit is just enough for the nursery's own descriptors: standard streams, fixed numbers, SIGCHLD, and the
    // reserve.
    let code = format!("ulimit -n 11; exec {} \"$0\"", program().display());
    let args = ["sh", "-c", &code].map(c_string).into();
    let mut client = Client::start_from(NurseryImage::Program { path: c"/bin/sh".into(), args });
    let fence = Fence::new().unwrap();
    let page = fence.descriptors().unwrap().remove(0);
    for (request, fds) in [
        (Request::Hold { beside: false, word: None }, vec![page]),
        (Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()),
    ] {
        client.nursery.link.send(&request, fds).unwrap();
        assert_eq!(client.next_reply().0, Reply::NotGuarded { errno: libc::EMFILE });
    }
}
