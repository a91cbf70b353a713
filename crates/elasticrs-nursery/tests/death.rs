//! Tests for which processes die with the agent, with the nursery, and with the link between them.

use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use elasticrs_nursery::sweep::{kill_by_token, sweep_children_of_self};
use elasticrs_nursery::token::Token;
use elasticrs_sys::process;
use elasticrs_testkit::nursery::{Agent, Client, pids, pipe, program};
use elasticrs_testkit::{is_running, wait_for_end, wait_for_state, worker_program};

/// Starts `examples/small-agent.rs` with workers that execute `command`.
fn small_agent(workers: usize, command: &str) -> Agent {
    Agent::start(
        &program(),
        "small-agent",
        &[&workers.to_string(), &worker_program().to_string_lossy(), command],
        workers,
    )
}

#[test]
fn workers_and_their_descendants_die_with_a_killed_agent() {
    let agent = small_agent(4, "daemonise");
    assert_eq!(agent.tree.below().filter(|&pid| is_running(pid)).count(), 8);
    agent.kill();
}

#[test]
fn a_fork_bomb_dies_with_a_killed_agent() {
    small_agent(1, "fork-bomb").kill();
}

#[test]
fn processes_without_a_main_thread_die_with_a_killed_agent() {
    small_agent(2, "headless").kill();
}

#[test]
fn stopped_workers_die_with_a_killed_agent() {
    small_agent(2, "stop-self").kill();
}

#[test]
fn a_sweep_by_the_agent_kills_processes_without_a_main_thread() {
    for owns_process in [true, false] {
        let mut client = Client::start();
        nix::sys::prctl::set_child_subreaper(owns_process).unwrap();
        let (worker, lines) = client.spawn_ready(&["headless"]);
        let headless: i32 = lines.said[0].parse().unwrap();
        client.kill();
        wait_for_end(worker.pid);
        let limit = Duration::from_secs(10);
        let outcome = if owns_process {
            sweep_children_of_self(&[], &[worker.pid], limit)
        } else {
            kill_by_token(client.nursery.token, limit)
        };
        assert!(outcome.ended.iter().any(|ended| ended.pid == headless), "{outcome:?}");
        assert!(outcome.stuck.is_empty(), "{outcome:?}");
        wait_for_end(headless);
    }
}

#[test]
fn a_closed_link_ends_the_nursery_and_all_descendants() {
    let mut client = Client::start();
    let (_worker, lines) = client.spawn_ready(&["daemonise"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    nix::sys::socket::shutdown(client.nursery.link.as_raw_fd(), nix::sys::socket::Shutdown::Write).unwrap();
    assert_eq!(client.reap(), 0);
    assert!(!is_running(grandchild));
}

#[test]
fn workers_die_with_the_nursery_and_the_agent_kills_their_descendants() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["daemonise"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    let mut bystander = Command::new("sleep").arg("1000").spawn().unwrap();
    let known = bystander.id().cast_signed();
    client.kill();
    wait_for_end(worker.pid);
    assert!(is_running(grandchild), "nobody but a subreaper can find it");
    let outcome = sweep_children_of_self(&[known], &[worker.pid], Duration::from_secs(10));
    assert_eq!(pids(&outcome.ended), [grandchild]);
    assert!(outcome.stuck.is_empty());
    assert!(is_running(known), "what the process has started otherwise is left alone");
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[test]
fn an_exempt_process_survives_a_sweep_by_the_agent() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["exempt"]);
    let exempt: i32 = lines.said[0].parse().unwrap();
    client.kill();
    wait_for_end(worker.pid);
    let outcome = sweep_children_of_self(&[], &[worker.pid], Duration::from_secs(10));
    assert!(outcome.ended.is_empty() && outcome.stuck.is_empty(), "{outcome:?}");
    assert!(is_running(exempt));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(exempt), nix::sys::signal::Signal::SIGKILL).unwrap();
    process::reap(exempt);
}

#[test]
fn an_agent_that_adopts_a_chain_of_forking_processes_kills_it() {
    let mut client = Client::start();
    let (worker, mut lines) = client.spawn_ready(&["chain"]);
    client.kill();
    let outcome = sweep_children_of_self(&[], &[worker.pid], Duration::from_secs(10));
    assert!(outcome.stuck.is_empty(), "{outcome:?}");
    assert_eq!(lines.rest(), Vec::<String>::new(), "ended by the sweep, not by its own limit");
}

#[test]
fn a_daemon_that_the_agent_cannot_adopt_is_killed_by_its_token() {
    let mut client = Client::start();
    // As in a host application, let init adopt the processes that the nursery leaves.
    nix::sys::prctl::set_child_subreaper(false).unwrap();
    let (_worker, mut lines) = client.spawn_ready(&["daemonise"]);
    let daemon: i32 = lines.said[0].parse().unwrap();
    client.kill();
    let outcome = kill_by_token(client.nursery.token, Duration::from_secs(10));
    assert!(outcome.ended.iter().any(|ended| ended.pid == daemon) && outcome.stuck.is_empty(), "{outcome:?}");
    assert!(!is_running(daemon));
    assert_eq!(lines.rest(), Vec::<String>::new());
}

#[test]
fn killing_by_token_affects_only_descendants_of_one_nursery() {
    let (mut ours, mut other) = (Client::start(), Client::start());
    let (_worker, lines) = ours.spawn_ready(&["daemonise"]);
    let (spared, _lines) = other.spawn_ready(&["sleep"]);
    let grandchild: i32 = lines.said[0].parse().unwrap();
    assert_eq!(Token::of(grandchild), Some(ours.nursery.token));
    let outcome = kill_by_token(ours.nursery.token, Duration::from_secs(10));
    assert!(outcome.stuck.is_empty(), "{outcome:?}");
    assert!(!is_running(grandchild) && is_running(spared.pid));
    ours.reap();
    sweep_children_of_self(&[other.nursery.pid], &[], Duration::from_secs(10));
    other.sweep(0, 0);
    drop(other);
}

#[test]
fn an_idle_nursery_does_not_wake_up() {
    let mut client = Client::start();
    client.spawn_ready(&["sleep"]);
    let switches = |pid: i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    // Once the nursery sleeps, it has nothing left to do. It must not wake up while the test waits.
    wait_for_state(client.nursery.pid, 'S');
    let before = switches(client.nursery.pid);
    let (nobody_writes, _keep) = pipe();
    let mut polled = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&nobody_writes), nix::poll::PollFlags::POLLIN)];
    assert_eq!(nix::poll::poll(&mut polled, 300_u16), Ok(0));
    assert_eq!(switches(client.nursery.pid), before);
    client.sweep(0, 0);
}
