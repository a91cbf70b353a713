//! What the nursery does for an agent that is dead or stopped: the connection that it holds, and the fence.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use common::{Agent, Client, hold};
use elasticrs_core::exit::WorkerExit;
use elasticrs_core::nursery::fence::Fence;
use elasticrs_core::nursery::launch::NurseryImage;
use elasticrs_core::nursery::protocol::{Reply, Request};
use elasticrs_core::sys::wait;
use elasticrs_runtime::clock::boot_now;
use elasticrs_testkit::{
    assert_no_children, is_running, pidfd, wait_for_end, wait_for_state, wait_readable, wait_until, worker_program,
};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::ptrace;
use nix::unistd::Pid;

/// `examples/guarded-agent.rs`, and the peer of its connection.
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
        let agent = Agent::start("guarded-agent", &arguments, commands.len());
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

    /// Returns true if the peer has seen the end of the connection.
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
    elasticrs_core::sys::pidfd::send_signal(pidfd(pid).expect("it lives"), signal).unwrap();
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
fn the_peer_sees_the_end_only_after_the_last_worker_is_gone() {
    // A large process takes a while to die.
    let guarded = Guarded::start(&["ignore-term", "daemonise", "alloc 256", "stop-self"]);
    assert_eq!(guarded.agent.tree.below().count(), 5);
    kill_agent_and_assert_workers_end_before_connection(guarded);
}

#[test]
fn the_peer_is_told_of_the_end_although_nobody_read_what_it_sent() {
    let mut guarded = Guarded::start(&["sleep"]);
    // With this unread, the kernel would reset the connection.
    guarded.peer.write_all(&[7; 1000]).unwrap();
    guarded.agent.process.kill().unwrap();
    wait_readable(&guarded.peer, "the end of the connection");
    assert!(guarded.connection_has_ended(), "an end, no reset");
    guarded.agent.kill();
}

#[test]
fn while_a_session_moves_both_connections_last_until_the_last_worker_is_gone() {
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
fn when_a_session_has_moved_only_its_new_connection_is_held() {
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
fn the_agent_knows_that_a_second_connection_could_not_be_held() {
    let mut guarded = Guarded::start(&["sleep"]);
    let nursery = guarded.agent.tree.nursery;
    assert_eq!(guarded.ask("beside-one-left"), "not held");
    let (_second, _) = guarded.listener.accept().unwrap();
    let said = guarded.agent.lines.next().unwrap();
    assert!(said.starts_with("Degraded"), "{said}");
    // The nursery must still hold the first connection after the next one came and went.
    assert_eq!(guarded.ask("beside"), "held");
    let (mut third, _) = guarded.listener.accept().unwrap();
    assert_eq!(guarded.ask("newest"), "let go");
    wait_readable(&third, "the end of the third connection");
    assert!(has_ended(&mut third));
    only_the_nursery_holds_the_first_connection(guarded, nursery);
}

#[test]
fn the_user_is_told_of_a_socket_that_could_not_be_duplicated_for_the_nursery() {
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
    // The nursery must still hold the connection that was held before.
    only_the_nursery_holds_the_first_connection(guarded, nursery);
}

#[test]
fn a_connection_is_open_as_long_as_its_nursery_and_no_longer_when_released() {
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
fn a_stopped_nursery_ends_its_workers_when_its_agent_is_killed() {
    let guarded = Guarded::start(&["ignore-term", "daemonise"]);
    let nursery = guarded.agent.tree.nursery;
    send(nursery, libc::SIGSTOP);
    wait_for_state(nursery, 'T');
    kill_agent_and_assert_workers_end_before_connection(guarded);
}

#[test]
fn workers_of_a_stopped_agent_are_killed_at_the_deadline_and_it_hears_of_it() {
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

#[test]
fn what_the_fence_has_ended_is_named_by_the_next_answer_and_by_no_other() {
    let fence = Fence::new().unwrap();
    let mut client = Client::start();
    client.nursery.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()).unwrap();
    for number in 1..=3 {
        fence.set(None);
        let (worker, lines) = client.spawn_ready(&["daemonise"]);
        let daemon: i32 = lines.said[0].parse().unwrap();
        fence.set(Some(boot_now()));
        wait_for_end(daemon);
        client.send(&Request::Sweep { number, linger_ms: 0, grace_ms: 0, give_up_ms: 10_000 });
        assert!(matches!(client.next().0, Reply::Fenced { .. }), "first of all");
        let Reply::Exited { pid, .. } = client.next().0 else { panic!("then the worker") };
        assert_eq!(pid, worker.pid);
        let (answer, _) = client.next();
        let Reply::Swept { number: answered, ended, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(answered, number);
        assert_eq!(ended.iter().map(|ended| ended.pid).collect::<Vec<_>>(), [daemon]);
    }
}

#[test]
fn a_sweep_of_the_fence_that_still_runs_does_not_end_the_next_group() {
    let fence = Fence::new().unwrap();
    let mut client = Client::start();
    client.nursery.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()).unwrap();
    let (_, lines) = client.spawn_ready(&["daemonise"]);
    let slow = Pid::from_raw(lines.said[0].parse().unwrap());
    // It stops on its way out until we let it go.
    ptrace::seize(slow, ptrace::Options::PTRACE_O_TRACEEXIT).unwrap();
    fence.set(Some(boot_now()));
    assert!(matches!(client.next().0, Reply::Fenced { .. }));
    wait_for_state(slow.as_raw(), 't');
    fence.set(None);
    client.request_spawn(&common::worker(&["sleep"]), &[], Vec::new());
    // A nursery that starts it now would say so, and kill it in the next moment.
    let mut told = [PollFd::new(client.nursery.link.as_fd(), PollFlags::POLLIN)];
    poll(&mut told, 300_u16).unwrap();
    ptrace::cont(slow, None).unwrap();
    wait_for_end(slow.as_raw());
    wait::reap(slow.as_raw());
    let worker = client.spawned().unwrap();
    client.send(&Request::SignalGroup { pid: worker.pid, signal: libc::SIGTERM });
    let ended_by = WorkerExit::Signaled { signal: libc::SIGTERM, core_dumped: false };
    assert_eq!(client.exit_of(worker.pid).0, ended_by);
    client.sweep(0, 0);
}

#[test]
fn a_nursery_that_has_no_descriptor_left_says_that_it_cannot_guard() {
    // The limit just covers its own: the standard ones, the fixed ones, SIGCHLD, and those in reserve.
    let code = format!("ulimit -n 11; exec {} \"$0\"", env!("CARGO_BIN_EXE_worker-nursery"));
    let args = vec!["sh".into(), "-c".into(), code.into()];
    let mut client = Client::start_from(NurseryImage::Program { path: "/bin/sh".into(), args });
    let fence = Fence::new().unwrap();
    let page = fence.descriptors().unwrap().remove(0);
    for (request, fds) in [
        (Request::Hold { beside: false, word: None }, vec![page]),
        (Request::Fence { holder: fence.holder() }, fence.descriptors().unwrap()),
    ] {
        client.nursery.link.send(&request, fds).unwrap();
        assert_eq!(client.next().0, Reply::NotGuarded { errno: libc::EMFILE });
    }
}
