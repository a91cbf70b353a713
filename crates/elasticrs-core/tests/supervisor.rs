//! Tests for groups of real processes under the supervisor.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::io::{self, BufRead, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::groups::{
    HANG, KILL, KILLED, TERM, close, event, group, hanging_worker, is_warm, run, supervisor, telling_group,
};
use common::image;
use elasticrs_core::spec::{Descendants, StopPolicy};
use elasticrs_core::supervisor::{Config, Event, NurseryExit, Outcome, StartFailure, Supervisor, SupervisorError};
use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::process::{Waited, WorkerExit, any_child};
use elasticrs_sys::signal::Signal;
use elasticrs_sys::stage::Stage;
use elasticrs_testkit::nursery::{c_string, pipe, process, worker};
use elasticrs_testkit::{assert_no_children, wait_for_state, wait_until, worker_program};

const TERMINATED: WorkerExit = WorkerExit::Signaled { signal: libc::SIGTERM };

/// Waits for the end of the group. Returns the exits by local rank, each with the signal sent by the supervisor,
/// and the last event.
fn until_end(supervisor: &Supervisor) -> (Vec<(u32, WorkerExit, Option<Signal>)>, Event) {
    let mut exits = Vec::new();
    loop {
        match event(supervisor) {
            Event::WorkerExited { local_rank, exit, sent, .. } => exits.push((local_rank, exit, sent)),
            end @ (Event::GroupEnded { .. } | Event::StartFailed(_)) => {
                exits.sort_by_key(|(local_rank, ..)| *local_rank);
                return (exits, end);
            }
            _ => {}
        }
    }
}

fn outcome(end: &Event) -> Outcome {
    let Event::GroupEnded { outcome, .. } = end else { panic!("no end of a group: {end:?}") };
    *outcome
}

fn kill(pid: i32, signal: i32) {
    let pidfd = elasticrs_testkit::pidfd(pid).expect("it lives");
    elasticrs_sys::process::send_signal(pidfd, signal).unwrap();
}

#[test]
fn a_group_whose_workers_exit_with_0_succeeds() {
    let supervisor = supervisor();
    supervisor.start(group(vec![worker(&["exit", "0"]), worker(&["exit", "0"])])).unwrap();
    let (exits, end) = until_end(&supervisor);
    let done = WorkerExit::Exited { code: 0 };
    assert_eq!(exits, [(0, done, None), (1, done, None)]);
    assert_eq!(outcome(&end), Outcome::Succeeded);
    close(supervisor);
}

#[test]
fn the_first_failure_stops_the_siblings_and_is_reported_with_its_rank() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"], &["sleep"]]);
    kill(pids[1], libc::SIGKILL);
    let Event::FailureSeen { local_rank: 1, siblings: 2, seen, signalled } = event(&supervisor) else {
        panic!("the failure is told first");
    };
    assert!(seen <= signalled);
    let (exits, end) = until_end(&supervisor);
    let term = Some(Signal::TERM);
    assert_eq!(exits, [(0, TERMINATED, term), (1, KILLED, None), (2, TERMINATED, term)]);
    assert_eq!(outcome(&end), Outcome::Failed);
    close(supervisor);
}

#[test]
fn sigkill_is_sent_after_the_grace_period() {
    let supervisor = supervisor();
    run(&supervisor, &[&["ignore-term"], &["sleep"]]);
    supervisor.stop(StopPolicy { signal: Signal::TERM, grace: Duration::from_millis(50) }).unwrap();
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits[0], (0, KILLED, Some(Signal::KILL)));
    assert_eq!(exits[1].1, TERMINATED);
    assert_eq!(outcome(&end), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_second_stop_with_sigkill_does_not_wait_for_the_first() {
    let supervisor = supervisor();
    run(&supervisor, &[&["ignore-term"]]);
    supervisor.stop(StopPolicy { signal: Signal::TERM, grace: Duration::from_secs(3600) }).unwrap();
    supervisor.stop(KILL).unwrap();
    assert_eq!(until_end(&supervisor).0, [(0, KILLED, Some(Signal::KILL))]);
    close(supervisor);
}

#[test]
fn a_group_does_not_start_if_one_worker_cannot_start() {
    let supervisor = supervisor();
    let program = process(vec!["/nonexistent".into()]);
    let folder = ProcessSpec { cwd: Some(c"/nonexistent".into()), ..worker(&["sleep"]) };
    // Forked workers call no `exec`, so only the first case applies.
    let failing = [("change to the working directory", folder), ("execute", program)];
    for (what, process) in failing.into_iter().take(if is_warm() { 1 } else { 2 }) {
        supervisor.start(group(vec![worker(&["sleep"]), worker(&["sleep"]), process])).unwrap();
        let (exits, end) = until_end(&supervisor);
        let Event::StartFailed(failure @ StartFailure::Worker { .. }) = end else { panic!("{end:?}") };
        let expected = format!("could not {what} `/nonexistent` for local rank 2: No such file or directory");
        assert_eq!(failure.to_string(), expected);
        assert_eq!(exits, [], "nobody has to know of workers that never were a group");
    }

    supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Succeeded, "and the next one starts");
    close(supervisor);
}

#[test]
fn a_start_that_hangs_fails_with_its_rank_and_stage() {
    let supervisor = supervisor();
    let dir = tempfile::tempdir().unwrap();
    let hangs = hanging_worker(dir.path());
    let start_deadline = Duration::from_millis(100);
    let mut spec = group(vec![worker(&["sleep"]), hangs]);
    spec.policy.start_deadline = start_deadline;
    supervisor.start(spec).unwrap();
    let (_, end) = until_end(&supervisor);
    let Event::StartFailed(failure @ StartFailure::Hung { local_rank: 1, stage: Some(Stage::OpenLog), .. }) = end
    else {
        panic!("{end:?}");
    };
    let said = failure.to_string();
    assert!(
        said.starts_with("local rank 1 did not start within 100ms: it hangs while trying to open the log"),
        "{said}"
    );

    supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Succeeded, "with a new nursery");
    close(supervisor);
}

#[test]
fn a_lost_nursery_ends_the_group_and_is_replaced_for_the_next_group() {
    let supervisor = supervisor();
    run(&supervisor, &[&["daemonise"], &["sleep"]]);
    let first = supervisor.nursery_pid().unwrap();
    kill(first, libc::SIGKILL);
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits.len(), 2);
    let Event::GroupEnded {
        outcome: Outcome::Lost,
        nursery: Some(NurseryExit { exit: KILLED, hung: false }),
        swept,
        ..
    } = end
    else {
        panic!("{end:?}");
    };
    // The sweep may also find a process of the lost nursery that has not exited yet.
    let daemons = swept.ended.iter().filter(|each| each.command == "testkit-worker").count();
    assert_eq!(daemons, 1, "the daemon was found and ended: {swept:?}");

    supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Succeeded);
    assert_ne!(supervisor.nursery_pid(), Some(first));
    close(supervisor);
}

#[test]
fn a_nursery_that_is_stopped_is_detected_and_resumed() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"]]);
    kill(supervisor.nursery_pid().unwrap(), libc::SIGSTOP);
    kill(pids[0], libc::SIGKILL);
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits.len(), 2);
    assert_eq!(outcome(&end), Outcome::Failed, "how the worker ended is known");
    close(supervisor);
}

#[test]
fn closing_resumes_a_stopped_nursery() {
    let supervisor = supervisor();
    run(&supervisor, &[&["daemonise"]]);
    let nursery = supervisor.nursery_pid().unwrap();
    kill(nursery, libc::SIGSTOP);
    wait_for_state(nursery, 'T');
    let begun = Instant::now();
    close(supervisor);
    assert!(begun.elapsed() < HANG);
}

#[test]
fn a_nursery_that_does_not_wake_up_is_killed_and_reported_as_hung() {
    use nix::sys::ptrace;
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"]]);
    // Hold the nursery with a tracer, because SIGCONT does not wake up a traced process.
    let nursery = nix::unistd::Pid::from_raw(supervisor.nursery_pid().unwrap());
    ptrace::seize(nursery, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(nursery).unwrap();
    kill(pids[0], libc::SIGKILL);
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits.len(), 2);
    let Event::GroupEnded { outcome: Outcome::Lost, nursery: Some(NurseryExit { exit: KILLED, hung: true }), .. } = end
    else {
        panic!("{end:?}");
    };
    close(supervisor);
}

#[test]
fn a_nursery_that_cannot_be_killed_is_left_behind_and_reported() {
    use nix::sys::ptrace;
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["daemonise"]]);
    // Make SIGKILL ineffective until the test releases the nursery, as in a frozen control group.
    let nursery = nix::unistd::Pid::from_raw(supervisor.nursery_pid().unwrap());
    ptrace::seize(nursery, ptrace::Options::PTRACE_O_TRACEEXIT).unwrap();
    ptrace::interrupt(nursery).unwrap();
    kill(pids[0], libc::SIGKILL);
    let told = event(&supervisor);
    let Event::Degraded { message } = told else { panic!("it is told first: {told:?}") };
    assert!(message.contains(&format!("the nursery (pid {nursery}) did not exit")), "{message}");
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits.len(), 2);
    let Event::GroupEnded { outcome: Outcome::Lost, nursery: Some(lost), swept, .. } = end else { panic!("{end:?}") };
    assert_eq!((lost, swept.ended.len()), (NurseryExit { exit: WorkerExit::Unknown, hung: false }, 1));
    assert!(swept.stuck.iter().any(|stuck| stuck.pid == nursery.as_raw()), "{swept:?}");

    supervisor.start(group(vec![worker(&["exit", "0"])])).unwrap();
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Succeeded, "with another nursery");
    ptrace::cont(nursery, None).unwrap();
    elasticrs_testkit::wait_for_end(nursery.as_raw());
    supervisor.close(false).unwrap();
    while let Waited::Changed { .. } = any_child() {}
    close(supervisor);
}

#[test]
fn a_worker_held_by_a_tracer_is_reported_with_its_exit_status() {
    use nix::sys::ptrace;
    for (code, expected) in [(0, Outcome::Succeeded), (3, Outcome::Failed)] {
        let supervisor = supervisor();
        let (mut spec, mut lines) = telling_group(&[&[]]);
        let (told_to_end, tell) = pipe();
        let script = format!("echo READY; read x <&9; exit {code}");
        spec.processes[0].argv = ["sh", "-c", &script].map(c_string).into();
        spec.processes[0].pass_fds.push(PassedFd { source: 1, target: 9 });
        spec.descriptors.push(told_to_end);
        supervisor.start(spec).unwrap();
        let Event::GroupStarted { pids, .. } = event(&supervisor) else { panic!("it starts") };
        lines.until_ready();
        ptrace::seize(nix::unistd::Pid::from_raw(pids[0]), ptrace::Options::empty()).unwrap();
        drop(tell);
        let told = event(&supervisor);
        let Event::Degraded { message } = told else { panic!("the tracer is named first: {told:?}") };
        assert!(message.contains(&format!("(pid {})", pids[0])) && message.contains("traces it"), "{message}");
        let (exits, end) = until_end(&supervisor);
        assert_eq!(exits, [(0, WorkerExit::Exited { code }, None)]);
        let Event::GroupEnded { outcome, nursery: None, ref swept, .. } = end else { panic!("{end:?}") };
        assert_eq!((outcome, &swept.held[..]), (expected, &pids[..]));
        supervisor.close(false).unwrap();
        elasticrs_sys::process::reap(pids[0]);
        close(supervisor);
    }
}

#[test]
fn a_worker_that_died_before_a_stop_is_not_reported_as_stopped() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"]]);
    let nursery = supervisor.nursery_pid().unwrap();
    // Stop the nursery, so that it does not report the death before the stop.
    kill(nursery, libc::SIGSTOP);
    wait_for_state(nursery, 'T');
    kill(pids[0], libc::SIGKILL);
    elasticrs_testkit::wait_for_end(pids[0]);
    supervisor.stop(TERM).unwrap();
    elasticrs_testkit::wait_for_end(pids[1]);
    kill(nursery, libc::SIGCONT);
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits, [(0, KILLED, None), (1, TERMINATED, Some(Signal::TERM))]);
    assert_eq!(outcome(&end), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_flood_of_notices_from_other_processes_does_not_block_a_stop() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let supervisor = supervisor();
    let name = supervisor.watch_exits(Some(Duration::from_secs(600))).unwrap();
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let (_, _lines) = run(&supervisor, &[&["sleep"]]);
    let (is_over, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let socket = UnixDatagram::unbound().unwrap();
                // Stop when a send fails, because nothing receives notices after the end of the group.
                while !is_over.load(Ordering::Relaxed) && socket.send_to_addr(&[], &address).is_ok() {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        wait_until("a flood of notices", || sent.load(Ordering::Relaxed) > 1000);
        supervisor.stop(TERM).unwrap();
        let (exits, _) = until_end(&supervisor);
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(exits, [(0, TERMINATED, Some(Signal::TERM))]);
    });
    close(supervisor);
}

#[test]
fn a_worker_that_requested_tracing_by_its_parent_still_gets_signals() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["traced"]]);
    kill(pids[0], libc::SIGWINCH);
    supervisor.stop(TERM).unwrap();
    assert_eq!(until_end(&supervisor).0, [(0, TERMINATED, Some(Signal::TERM))]);
    close(supervisor);
}

#[test]
fn a_stopped_nursery_is_resumed_although_it_traces_the_dead_worker() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["traced"], &["sleep"]]);
    kill(supervisor.nursery_pid().unwrap(), libc::SIGSTOP);
    kill(pids[0], libc::SIGKILL);
    // The first event is the failure, so no event has reported that a tracer holds the worker.
    let told = event(&supervisor);
    assert!(matches!(told, Event::FailureSeen { local_rank: 0, .. }), "{told:?}");
    assert_eq!(until_end(&supervisor).0.len(), 2);
    close(supervisor);
}

#[test]
fn a_worker_paused_by_sigstop_is_reported_and_can_still_be_stopped() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"]]);
    kill(pids[0], libc::SIGSTOP);
    let paused = event(&supervisor);
    assert_eq!(paused, Event::WorkerPaused { local_rank: 0, pid: pids[0], signal: libc::SIGSTOP });
    supervisor.stop(TERM).unwrap();
    assert_eq!(until_end(&supervisor).0, [(0, TERMINATED, Some(Signal::TERM))], "it was woken to see the signal");
    close(supervisor);
}

#[test]
fn suspended_workers_are_paused_and_continue_after_a_resume() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"]]);
    supervisor.suspend().unwrap();
    for pid in &pids {
        wait_for_state(*pid, 'T');
    }
    supervisor.resume().unwrap();
    supervisor.stop(TERM).unwrap();
    let (exits, _) = until_end(&supervisor);
    assert!(exits.iter().all(|(_, exit, _)| *exit == TERMINATED), "{exits:?}");
    close(supervisor);
}

#[test]
fn deadlines_apply_again_after_a_suspended_group_has_ended() {
    let supervisor = supervisor();
    let (mut spec, mut lines) = telling_group(&[&[]]);
    spec.processes[0].argv = ["sh", "-c", "sleep 1000 & echo $!"].map(c_string).into();
    spec.policy.on_success = Descendants::Linger(HANG);
    supervisor.start(spec).unwrap();
    let lingers: i32 = lines.next().unwrap().parse().unwrap();
    while !matches!(event(&supervisor), Event::WorkerExited { .. }) {}
    supervisor.suspend().unwrap();
    kill(lingers, libc::SIGKILL);
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Succeeded);
    supervisor.resume().unwrap();

    run(&supervisor, &[&["ignore-term"]]);
    supervisor.stop(StopPolicy { grace: Duration::from_millis(1), ..TERM }).unwrap();
    assert_eq!(until_end(&supervisor).0, [(0, KILLED, Some(Signal::KILL))]);
    close(supervisor);
}

#[test]
fn an_adopted_child_is_supervised_like_other_workers() {
    let supervisor = supervisor();
    supervisor.start(group(vec![])).unwrap();
    assert!(matches!(event(&supervisor), Event::GroupStarted { .. }));
    let spawn = |code: &str| std::process::Command::new("sh").args(["-c", code]).spawn().unwrap();
    let (mut fails, mut waits) = (spawn("exit 7"), spawn("exec sleep 100"));
    supervisor.adopt(1, i32::try_from(waits.id()).unwrap(), None, None).unwrap();
    supervisor.adopt(0, i32::try_from(fails.id()).unwrap(), None, None).unwrap();
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits, [(0, WorkerExit::Exited { code: 7 }, None), (1, TERMINATED, Some(Signal::TERM))]);
    assert_eq!(outcome(&end), Outcome::Failed);
    assert_eq!(fails.wait().unwrap().code(), Some(7), "the status is left for whoever started it");
    waits.wait().unwrap();
    close(supervisor);
}

#[test]
fn notices_of_an_adopted_process_count_even_if_it_sent_one_before() {
    let supervisor = supervisor();
    let name = supervisor.watch_exits(None).unwrap();
    supervisor.start(group(vec![])).unwrap();
    assert!(matches!(event(&supervisor), Event::GroupStarted { .. }));
    let mut sender = std::process::Command::new(worker_program())
        .args(["notify", &name])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = io::BufReader::new(sender.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "READY");
    let mut send_notice = || {
        writeln!(sender.stdin.as_ref().unwrap()).unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "SENT");
    };
    send_notice();
    // Wait for a command, because the supervisor receives all notices before it handles a command.
    supervisor.drain(Duration::ZERO).unwrap();
    let pid = i32::try_from(sender.id()).unwrap();
    supervisor.adopt(0, pid, None, None).unwrap();
    send_notice();
    let raised = event(&supervisor);
    assert!(matches!(&raised, Event::WorkerRaised(raised) if raised.pid == pid), "{raised:?}");
    supervisor.stop(KILL).unwrap();
    until_end(&supervisor);
    sender.wait().unwrap();
    close(supervisor);
}

#[test]
fn the_exit_status_of_an_adopted_grandchild_is_read_from_its_pipe() {
    let supervisor = supervisor();
    supervisor.start(group(vec![])).unwrap();
    assert!(matches!(event(&supervisor), Event::GroupStarted { .. }));
    // Start a grandchild, which only the shell in between can wait for.
    let code = "exec 3<&0; sh -c 'read go; exit 7' <&3 & echo $!; wait $!; exec cat >/dev/null";
    let mut shell = std::process::Command::new("sh")
        .args(["-c", code])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut pid = String::new();
    io::BufReader::new(shell.stdout.take().unwrap()).read_line(&mut pid).unwrap();
    let (status, mut writer) = io::pipe().unwrap();
    supervisor.adopt(0, pid.trim().parse().unwrap(), Some(status.into()), None).unwrap();
    writer.write_all(&(7_i32 << 8).to_ne_bytes()).unwrap();
    shell.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    let (exits, end) = until_end(&supervisor);
    assert_eq!(exits, [(0, WorkerExit::Exited { code: 7 }, None)]);
    assert_eq!(outcome(&end), Outcome::Failed);
    drop(shell.stdin.take());
    shell.wait().unwrap();
    close(supervisor);
}

#[test]
fn only_one_group_can_run_at_a_time() {
    let supervisor = supervisor();
    run(&supervisor, &[&["sleep"]]);
    assert!(matches!(supervisor.start(group(vec![])), Err(SupervisorError::Busy)));
    supervisor.stop(KILL).unwrap();
    until_end(&supervisor);
    assert!(matches!(supervisor.adopt(0, 1, None, None), Err(SupervisorError::Idle)));
    close(supervisor);
}

#[test]
fn closing_the_supervisor_kills_all_running_processes() {
    let supervisor = supervisor();
    run(&supervisor, &[&["daemonise"], &["ignore-term"]]);
    close(supervisor);
}

#[test]
fn a_dropped_supervisor_leaves_no_processes() {
    let supervisor = supervisor();
    run(&supervisor, &[&["sleep"]]);
    drop(supervisor);
    assert_no_children();
}

#[test]
fn a_stop_during_the_start_of_workers_is_not_lost() {
    let supervisor = supervisor();
    let (group, _lines) = telling_group(&[&["sleep"], &["sleep"]]);
    supervisor.start(group).unwrap();
    supervisor.stop(TERM).unwrap();
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_start_that_hangs_is_stopped_after_the_grace_period() {
    let supervisor = supervisor();
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("nobody reads it");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut hangs = worker(&["sleep"]);
    hangs.stdio[1] = Some(c_string(fifo));
    let mut spec = group(vec![worker(&["sleep"]), hangs]);
    spec.policy.start_deadline = Duration::MAX;
    supervisor.start(spec).unwrap();
    supervisor.stop(StopPolicy { grace: Duration::from_millis(50), ..TERM }).unwrap();
    assert_eq!(outcome(&until_end(&supervisor).1), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_lost_nursery_in_a_host_application_leaves_no_daemon() {
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let supervisor = Supervisor::new(Config { nursery: vec![image()], owns_process: false }).unwrap();
    run(&supervisor, &[&["daemonise"]]);
    kill(supervisor.nursery_pid().unwrap(), libc::SIGKILL);
    let (_, end) = until_end(&supervisor);
    let Event::GroupEnded { outcome: Outcome::Lost, swept, .. } = end else { panic!("{end:?}") };
    assert_eq!(swept.ended.len(), 1, "found by its token: {swept:?}");
    supervisor.close(false).unwrap();
    // This process has adopted the worker and its daemon, because the test made it a subreaper.
    while nix::sys::wait::wait().is_ok() {}
    assert_no_children();
}
