//! Tests for a nursery whose agent is dead or stopped. It holds the agent's connection and enforces the fence
//! deadline.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

use elasticrs_sys::clock::boot_now;
use elasticrs_testkit::nursery::{Agent, hold};
use elasticrs_testkit::{
    assert_no_children, is_running, pidfd, wait_for_state, wait_readable, wait_until, worker_program,
};
use nix::sys::ptrace;

/// The program `examples/guarded-agent.rs`, and the peer of its connection.
struct Guarded {
    agent: Agent,
    listener: TcpListener,
    peer: TcpStream,
}

impl Guarded {
    fn start(commands: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let workers = commands.iter().map(|command| format!("{} {command}", worker_program().display()));
        let arguments: Vec<String> = std::iter::once(port).chain(workers).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let agent = Agent::start(common::nursery_program(), "guarded-agent", &arguments, commands.len());
        let (peer, _) = listener.accept().unwrap();
        Self { agent, listener, peer }
    }

    fn ask(&mut self, request: &str) -> String {
        writeln!(self.agent.process.stdin.as_mut().unwrap(), "{request}").unwrap();
        self.agent.lines.next().unwrap()
    }

    fn signal(&self, signal: i32) {
        send(self.agent.process.id().cast_signed(), signal);
    }

    /// Returns true if the peer has read the end of the connection.
    fn connection_has_ended(&mut self) -> bool {
        has_ended(&mut self.peer)
    }
}

fn has_ended(peer: &mut TcpStream) -> bool {
    peer.set_nonblocking(true).unwrap();
    match peer.read(&mut [0]) {
        Ok(0) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        other => panic!("{other:?}"),
    }
}

fn send(pid: i32, signal: i32) {
    elasticrs_sys::process::send_signal(pidfd(pid).expect("it lives"), signal).unwrap();
}

fn sockets(pid: i32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

fn kill_agent_and_assert_workers_end_before_connection(mut guarded: Guarded) {
    guarded.agent.process.kill().unwrap();
    wait_readable(&guarded.peer, "the end of the connection");
    let left: Vec<i32> = guarded.agent.tree.below().filter(|&pid| is_running(pid)).collect();
    assert_eq!(left, [0; 0], "the connection has ended before them");
    assert!(guarded.connection_has_ended());
    guarded.agent.kill();
}

#[test]
fn the_connection_closes_only_after_the_last_worker_has_exited() {
    // Use a large process too, because it takes a while to exit.
    let guarded = Guarded::start(&["ignore-term", "daemonise", "alloc 256", "stop-self"]);
    assert_eq!(guarded.agent.tree.below().count(), 5);
    kill_agent_and_assert_workers_end_before_connection(guarded);
}

#[test]
fn the_connection_ends_without_a_reset_despite_unread_data() {
    let mut guarded = Guarded::start(&["sleep"]);
    // Send data that the agent does not read. The kernel normally resets a connection that is closed with unread
    // data.
    guarded.peer.write_all(&[7; 1000]).unwrap();
    guarded.agent.process.kill().unwrap();
    wait_readable(&guarded.peer, "the end of the connection");
    assert!(guarded.connection_has_ended(), "an end, no reset");
    guarded.agent.kill();
}

#[test]
fn both_connections_of_a_moving_session_stay_open_until_all_workers_exit() {
    let mut guarded = Guarded::start(&["ignore-term", "daemonise", "alloc 256"]);
    assert_eq!(guarded.ask("beside"), "held");
    let (mut second, _) = guarded.listener.accept().unwrap();
    second.write_all(&[7; 1000]).unwrap();
    guarded.agent.process.kill().unwrap();
    wait_readable(&guarded.peer, "the end of the first connection");
    let left: Vec<i32> = guarded.agent.tree.below().filter(|&pid| is_running(pid)).collect();
    assert_eq!(left, [0; 0], "the connection has ended before them");
    wait_readable(&second, "the end of the second connection");
    assert!(guarded.connection_has_ended() && has_ended(&mut second));
    guarded.agent.kill();
}

#[test]
fn only_the_new_connection_is_held_after_a_session_has_moved() {
    let mut guarded = Guarded::start(&["sleep"]);
    let nursery = guarded.agent.tree.nursery;
    assert_eq!(guarded.ask("beside"), "held");
    let (mut second, _) = guarded.listener.accept().unwrap();
    assert_eq!(guarded.ask("older"), "let go");
    wait_readable(&guarded.peer, "the end of the first connection");
    assert!(guarded.connection_has_ended());
    let held = hold(nursery);
    guarded.agent.process.kill().unwrap();
    guarded.agent.process.wait().unwrap();
    assert!(!has_ended(&mut second));
    ptrace::detach(held, None).unwrap();
    wait_readable(&second, "the end of the second connection");
    assert!(has_ended(&mut second));
    guarded.agent.kill();
}

/// Kills the agent, and checks that the first connection stays open until the nursery continues and exits.
fn only_the_nursery_holds_the_first_connection(mut guarded: Guarded, nursery: i32) {
    let held = hold(nursery);
    guarded.agent.process.kill().unwrap();
    guarded.agent.process.wait().unwrap();
    assert!(!guarded.connection_has_ended());
    ptrace::detach(held, None).unwrap();
    wait_readable(&guarded.peer, "the end of the first connection");
    guarded.agent.kill();
}

#[test]
fn the_agent_is_notified_if_the_nursery_cannot_hold_a_second_connection() {
    let mut guarded = Guarded::start(&["sleep"]);
    let nursery = guarded.agent.tree.nursery;
    assert_eq!(guarded.ask("beside-one-left"), "not held");
    let (_second, _) = guarded.listener.accept().unwrap();
    let said = guarded.agent.lines.next().unwrap();
    assert!(said.starts_with("Degraded"), "{said}");
    // The nursery must still hold the first connection after it has held and released another one.
    assert_eq!(guarded.ask("beside"), "held");
    let (mut third, _) = guarded.listener.accept().unwrap();
    assert_eq!(guarded.ask("newest"), "let go");
    wait_readable(&third, "the end of the third connection");
    assert!(has_ended(&mut third));
    only_the_nursery_holds_the_first_connection(guarded, nursery);
}

#[test]
fn a_socket_that_cannot_be_duplicated_for_the_nursery_is_reported() {
    let mut guarded = Guarded::start(&["sleep"]);
    let nursery = guarded.agent.tree.nursery;
    let connection = "the connection to the store: Too many open files";
    let link = "the link of another agent: Too many open files";
    for (request, answer, subject) in
        [("hold-full", "asked", connection), ("beside-full", "not held", connection), ("link-full", "asked", link)]
    {
        assert_eq!(guarded.ask(request), answer);
        let said = guarded.agent.lines.next().unwrap();
        let expected = format!("the nursery cannot guard {subject}");
        assert!(said.starts_with("Degraded") && said.contains(&expected), "{request}: {said}");
    }
    // The nursery must still hold the first connection.
    only_the_nursery_holds_the_first_connection(guarded, nursery);
}

#[test]
fn a_connection_stays_open_while_the_nursery_runs_unless_it_is_released() {
    for released in [false, true] {
        let mut guarded = Guarded::start(&["sleep"]);
        let nursery = guarded.agent.tree.nursery;
        if released {
            assert_eq!(guarded.ask("release"), "released");
            wait_until("the link to the agent alone", || sockets(nursery) == 1);
        }
        let held = hold(nursery);
        guarded.agent.process.kill().unwrap();
        guarded.agent.process.wait().unwrap();
        // The agent's own descriptors are closed, so only the nursery can keep the connection open.
        assert_eq!(guarded.connection_has_ended(), released);
        assert!(is_running(guarded.agent.tree.workers[0]));
        ptrace::detach(held, None).unwrap();
        guarded.agent.kill();
    }
}

#[test]
fn workers_of_a_stopped_nursery_are_killed_when_the_agent_is_killed() {
    let guarded = Guarded::start(&["ignore-term", "daemonise"]);
    let nursery = guarded.agent.tree.nursery;
    send(nursery, libc::SIGSTOP);
    wait_for_state(nursery, 'T');
    kill_agent_and_assert_workers_end_before_connection(guarded);
}

#[test]
fn workers_of_a_stopped_agent_are_killed_at_the_fence_deadline() {
    let mut guarded = Guarded::start(&["ignore-term", "daemonise", "stop-self"]);
    let answer = guarded.ask("fence 300");
    let deadline: u64 = answer.strip_prefix("fence at ").unwrap().parse().unwrap();
    guarded.signal(libc::SIGSTOP);
    let workers: Vec<_> = guarded.agent.tree.below().filter_map(pidfd).collect();
    for worker in &workers {
        wait_readable(worker, "the end of a worker");
        assert!(boot_now() >= deadline, "too early");
    }
    assert!(is_running(guarded.agent.tree.nursery));
    assert!(!guarded.connection_has_ended(), "the agent lives");

    guarded.signal(libc::SIGCONT);
    let Agent { mut process, mut lines, .. } = guarded.agent;
    assert_eq!(lines.next().unwrap(), "fenced", "before the exits");
    let mut exits: Vec<_> = (0..3).map(|_| lines.next().unwrap()).collect();
    exits.sort();
    assert_eq!(exits, ["exited 0 sent 9", "exited 1 sent 9", "exited 2 sent 9"]);
    assert_eq!(lines.next().unwrap(), "ended Stopped", "and no failure");
    drop(process.stdin.take());
    assert!(process.wait().unwrap().success());
    assert_no_children();
}
