//! Tests for replacing workers while the others in their group continue.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::time::Duration;

use common::groups::{KILL, KILLED, TERM, close, event, hanging_worker, is_warm, kill, supervisor, telling_group};
use elasticrs_core::spec::GroupSpec;
use elasticrs_core::supervisor::{Event, Outcome, Supervisor, SupervisorError, SweepOutcome};
use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::signal::Signal;
use elasticrs_testkit::nursery::{Lines, c_string, pipe, worker};
use elasticrs_testkit::{is_running, open_fds, wait_for_end, wait_for_state, worker_program};
use tempfile::TempDir;

/// Starts a group that replaces workers. Returns its pids, and the lines that the workers wrote before they were
/// ready.
fn run(supervisor: &Supervisor, commands: &[&[&str]]) -> (Vec<i32>, Lines) {
    run_with(supervisor, commands, |_| ())
}

/// Starts two workers, kills the first one, and returns the pid of the second one.
fn run_without_the_first(supervisor: &Supervisor) -> (i32, Lines) {
    let (pids, lines) = run(supervisor, &[&["sleep"], &["sleep"]]);
    kill(pids[0]);
    until_swept(supervisor);
    (pids[1], lines)
}

fn run_with(supervisor: &Supervisor, commands: &[&[&str]], change: impl Fn(&mut GroupSpec)) -> (Vec<i32>, Lines) {
    let (mut group, mut lines) = telling_group(commands);
    group.policy.replaces = true;
    change(&mut group);
    supervisor.start(group).unwrap();
    let Event::GroupStarted { pids, .. } = event(supervisor) else { panic!("it starts") };
    for _ in commands {
        lines.until_ready();
    }
    (pids, lines)
}

fn in_place_of(local_rank: u32, arguments: &[&str]) -> (ProcessSpec, Vec<OwnedFd>, Lines) {
    let (reader, writer) = pipe();
    let pass_fds = vec![PassedFd { source: 0, target: 1 }];
    let process = ProcessSpec { local_rank, pass_fds, warm: is_warm(), ..worker(arguments) };
    (process, vec![writer], Lines::new(reader))
}

/// Starts a replacement for a local rank, and waits until it is ready.
fn replace(supervisor: &Supervisor, local_rank: u32, arguments: &[&str]) -> (i32, Lines) {
    let (process, descriptors, mut lines) = in_place_of(local_rank, arguments);
    supervisor.replace(process, descriptors).unwrap();
    let Event::WorkerReplaced { local_rank: rank, pid, .. } = event(supervisor) else { panic!("it starts") };
    assert_eq!(rank, local_rank);
    lines.until_ready();
    (pid, lines)
}

/// Starts a replacement for local rank 0. Its start hangs as long as the returned folder exists.
fn hang_in_place(supervisor: &Supervisor) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let hangs = ProcessSpec { warm: is_warm(), ..hanging_worker(folder.path()) };
    supervisor.replace(hangs, Vec::new()).unwrap();
    folder
}

/// Checks that the next two events are a worker's exit and the cleanup of its leftover processes.
fn until_swept(supervisor: &Supervisor) -> (u32, WorkerExit, SweepOutcome) {
    let Event::WorkerExited { local_rank, exit, sent: None, .. } = event(supervisor) else { panic!("it ends") };
    let Event::WorkerSwept { local_rank: of, swept, .. } = event(supervisor) else { panic!("it is swept") };
    assert_eq!(of, local_rank);
    (local_rank, exit, swept)
}

fn stop(supervisor: Supervisor) {
    supervisor.stop(KILL).unwrap();
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    close(supervisor);
}

fn outcome(supervisor: &Supervisor) -> Outcome {
    loop {
        if let Event::GroupEnded { outcome, .. } = event(supervisor) {
            return outcome;
        }
    }
}

#[test]
fn a_failed_worker_is_replaced_while_the_others_continue() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"], &["sleep"]]);
    kill(pids[1]);
    let (local_rank, exit, swept) = until_swept(&supervisor);
    assert_eq!((local_rank, exit, swept), (1, KILLED, SweepOutcome::default()));
    let (pid, _) = replace(&supervisor, 1, &["sleep"]);
    assert!(is_running(pid) && is_running(pids[0]) && is_running(pids[2]));
    kill(pid);
    assert_eq!(until_swept(&supervisor).0, 1, "and once more");
    let (pid, _) = replace(&supervisor, 1, &["exit", "0"]);
    let Event::WorkerExited { local_rank: 1, pid: ended, .. } = event(&supervisor) else { panic!("it ends") };
    assert_eq!(ended, pid);
    stop(supervisor);
}

#[test]
fn a_group_succeeds_if_the_last_worker_of_each_rank_succeeds() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["exit", "0"], &["sleep"]]);
    let Event::WorkerExited { local_rank: 0, .. } = event(&supervisor) else { panic!("it ends") };
    kill(pids[1]);
    until_swept(&supervisor);
    replace(&supervisor, 1, &["exit", "0"]);
    assert_eq!(outcome(&supervisor), Outcome::Succeeded);
    close(supervisor);
}

#[test]
fn only_leftover_processes_of_the_dead_worker_are_killed() {
    let supervisor = supervisor();
    let (pids, lines) = run(&supervisor, &[&["daemonise"], &["sleep"], &["exit", "0"]]);
    let kept: i32 = lines.said[0].parse().unwrap();
    let Event::WorkerExited { local_rank: 2, .. } = event(&supervisor) else { panic!("it ends") };
    kill(pids[1]);
    assert_eq!(until_swept(&supervisor).2, SweepOutcome::default());
    let (pid, lines) = replace(&supervisor, 1, &["daemonise"]);
    let left: i32 = lines.said[0].parse().unwrap();
    assert!(is_running(left));
    kill(pid);
    let (_, _, swept) = until_swept(&supervisor);
    assert_eq!(swept.ended.iter().map(|ended| ended.pid).collect::<Vec<_>>(), [left]);
    assert!(!is_running(left));
    assert!(is_running(kept) && is_running(pids[0]));
    supervisor.stop(KILL).unwrap();
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    wait_for_end(kept);
    close(supervisor);
}

#[test]
fn a_rank_that_is_running_succeeded_or_unknown_cannot_be_replaced() {
    let supervisor = supervisor();
    let refused = |local_rank| {
        let (process, descriptors, _) = in_place_of(local_rank, &["sleep"]);
        supervisor.replace(process, descriptors).unwrap_err()
    };
    assert!(matches!(refused(0), SupervisorError::Idle));
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["exit", "0"]]);
    let Event::WorkerExited { local_rank: 1, .. } = event(&supervisor) else { panic!("it ends") };
    for (rank, reason) in [(0, "it is running"), (1, "it has succeeded"), (2, "there is no such worker")] {
        assert_eq!(refused(rank).to_string(), format!("local rank {rank} cannot be replaced: {reason}"));
    }
    kill(pids[0]);
    until_swept(&supervisor);
    supervisor.stop(KILL).unwrap();
    assert!(matches!(refused(0), SupervisorError::Replace { .. } | SupervisorError::Idle));
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn a_replacement_that_fails_to_start_can_be_started_again() {
    let supervisor = supervisor();
    let (survivor, _lines) = run_without_the_first(&supervisor);
    let (process, descriptors, _) = in_place_of(0, &["sleep"]);
    supervisor.replace(ProcessSpec { cwd: Some(c"/nonexistent".into()), ..process }, descriptors).unwrap();
    let Event::ReplaceFailed(failure) = event(&supervisor) else { panic!("it fails") };
    let expected =
        "could not change to the working directory `/nonexistent` for local rank 0: No such file or directory";
    assert_eq!(failure.to_string(), expected);
    replace(&supervisor, 0, &["sleep"]);
    assert!(is_running(survivor));
    stop(supervisor);
}

#[test]
fn losing_the_nursery_ends_a_group_with_replacements() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["daemonise"]]);
    kill(pids[0]);
    until_swept(&supervisor);
    kill(supervisor.nursery_pid().unwrap());
    let (process, descriptors, _) = in_place_of(0, &["sleep"]);
    // Ignore an error, because the loss of the nursery may already be known.
    let _ = supervisor.replace(process, descriptors);
    assert_eq!(outcome(&supervisor), Outcome::Lost);
    close(supervisor);
}

#[test]
fn workers_that_die_together_are_each_cleaned_up_and_reported_once() {
    let supervisor = supervisor();
    let (pids, lines) = run(&supervisor, &[&["daemonise"], &["daemonise"], &["daemonise"], &["sleep"]]);
    let daemons: BTreeSet<i32> = lines.said.iter().map(|pid| pid.parse().unwrap()).collect();
    pids[..3].iter().for_each(|&pid| kill(pid));
    let (mut exited, mut swept, mut ended) = (Vec::new(), Vec::new(), BTreeSet::new());
    while swept.len() < 3 {
        match event(&supervisor) {
            Event::WorkerExited { local_rank, .. } => exited.push(local_rank),
            Event::WorkerSwept { local_rank, swept: rest, .. } => {
                assert!(exited.contains(&local_rank));
                swept.push(local_rank);
                ended.extend(rest.ended.iter().map(|ended| ended.pid));
            }
            other => panic!("{other:?}"),
        }
    }
    swept.sort_unstable();
    assert_eq!((swept, ended), (vec![0, 1, 2], daemons.clone()));
    assert!(!daemons.into_iter().any(is_running) && is_running(pids[3]));
    stop(supervisor);
}

#[test]
fn a_worker_that_dies_during_another_replacement_is_cleaned_up() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["daemonise"], &["sleep"]]);
    kill(pids[0]);
    until_swept(&supervisor);
    let (process, descriptors, mut lines) = in_place_of(0, &["sleep"]);
    supervisor.replace(process, descriptors).unwrap();
    kill(pids[1]);
    let (mut replaced, mut swept) = (None, None);
    while replaced.is_none() || swept.is_none() {
        match event(&supervisor) {
            Event::WorkerReplaced { local_rank: 0, pid, .. } => replaced = Some(pid),
            Event::WorkerSwept { local_rank: 1, swept: rest, .. } => swept = Some(rest),
            Event::WorkerExited { local_rank: 1, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    lines.until_ready();
    assert_eq!(swept.unwrap().ended.len(), 1);
    assert!(is_running(replaced.unwrap()) && is_running(pids[2]));
    stop(supervisor);
}

#[test]
fn a_replacement_that_exits_immediately_can_be_replaced_again() {
    let supervisor = supervisor();
    let (survivor, _lines) = run_without_the_first(&supervisor);
    for _ in 0..3 {
        replace(&supervisor, 0, &["exit", "3"]);
        assert_eq!(until_swept(&supervisor).1, WorkerExit::Exited { code: 3 });
    }
    assert!(is_running(survivor));
    stop(supervisor);
}

#[test]
fn a_stop_while_a_replacement_starts_also_stops_the_replacement() {
    let supervisor = supervisor();
    let (survivor, _lines) = run_without_the_first(&supervisor);
    let (process, descriptors, _reader) = in_place_of(0, &["sleep"]);
    supervisor.replace(process, descriptors).unwrap();
    supervisor.stop(TERM).unwrap();
    let (mut replaced, mut exited) = (None, BTreeSet::new());
    loop {
        match event(&supervisor) {
            Event::WorkerReplaced { pid, .. } => assert_eq!(replaced.replace(pid), None),
            Event::WorkerExited { pid, sent, .. } => {
                assert_eq!(sent, Some(Signal::TERM));
                exited.insert(pid);
            }
            Event::GroupEnded { outcome, .. } => break assert_eq!(outcome, Outcome::Stopped),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(exited, [survivor, replaced.unwrap()].into());
    close(supervisor);
}

#[test]
fn a_replacement_whose_start_hangs_is_killed_and_the_others_continue() {
    let supervisor = supervisor();
    let (pids, _lines) = run_with(&supervisor, &[&["sleep"], &["sleep"]], |group| {
        group.policy.start_deadline = Duration::from_secs(2);
    });
    kill(pids[0]);
    until_swept(&supervisor);
    let _fifo = hang_in_place(&supervisor);
    let Event::Degraded { message } = event(&supervisor) else { panic!("it is told") };
    assert!(message.starts_with("local rank 0 did not start within 2s: it hangs while trying to open"), "{message}");
    // Accept both events, because a program killed during its execution looks the same as one killed later.
    match event(&supervisor) {
        Event::WorkerReplaced { local_rank: 0, .. } => {
            until_swept(&supervisor);
        }
        Event::ReplaceFailed(_) => {}
        other => panic!("{other:?}"),
    }
    replace(&supervisor, 0, &["sleep"]);
    assert!(is_running(pids[1]));
    stop(supervisor);
}

#[test]
fn a_replacement_whose_start_hangs_does_not_block_killing_the_group() {
    let supervisor = supervisor();
    let (_, _lines) = run_without_the_first(&supervisor);
    let _fifo = hang_in_place(&supervisor);
    stop(supervisor);
}

#[test]
fn a_replacement_started_in_a_suspended_group_is_suspended_as_well() {
    let supervisor = supervisor();
    let (pids, _lines) = run(&supervisor, &[&["sleep"], &["sleep"]]);
    supervisor.suspend().unwrap();
    kill(pids[0]);
    until_swept(&supervisor);
    let (process, descriptors, mut lines) = in_place_of(0, &["sleep"]);
    supervisor.replace(process, descriptors).unwrap();
    let Event::WorkerReplaced { pid, .. } = event(&supervisor) else { panic!("it starts") };
    wait_for_state(pid, 'T');
    supervisor.resume().unwrap();
    lines.until_ready();
    wait_for_state(pids[1], 'S');
    supervisor.stop(TERM).unwrap();
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    close(supervisor);
}

#[test]
fn the_fence_kills_a_group_with_replacements_and_its_descendants() {
    let supervisor = supervisor();
    let (pids, lines) = run(&supervisor, &[&["sleep"], &["daemonise"]]);
    kill(pids[0]);
    until_swept(&supervisor);
    replace(&supervisor, 0, &["sleep"]);
    assert!(supervisor.fence().set(Some(boot_now())));
    assert!(matches!(event(&supervisor), Event::Fenced));
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    assert!(!is_running(lines.said[0].parse().unwrap()));
    close(supervisor);
}

#[test]
fn the_fence_kills_a_group_whose_replacement_hangs_in_its_start() {
    let supervisor = supervisor();
    let (survivor, _lines) = run_without_the_first(&supervisor);
    let _fifo = hang_in_place(&supervisor);
    // The nursery cannot enforce this deadline, because it is waiting for the start.
    assert!(supervisor.fence().set(Some(boot_now() + 300_000_000)));
    assert!(matches!(event(&supervisor), Event::Fenced));
    assert_eq!(outcome(&supervisor), Outcome::Stopped);
    wait_for_end(survivor);
    close(supervisor);
}

#[test]
fn processes_left_by_a_successful_worker_run_until_the_group_ends() {
    let supervisor = supervisor();
    let (pids, lines) = run_with(&supervisor, &[&["sleep"], &["sleep"]], |group| {
        let script = "sleep 1234 >&2 & echo $!; echo READY";
        group.processes[0].argv = vec![c"/bin/sh".into(), c"-c".into(), c_string(script)];
    });
    let left: i32 = lines.said[0].parse().unwrap();
    let Event::WorkerExited { local_rank: 0, .. } = event(&supervisor) else { panic!("it ends") };
    kill(pids[1]);
    assert_eq!(until_swept(&supervisor).2, SweepOutcome::default());
    assert!(is_running(left));
    replace(&supervisor, 1, &["exit", "0"]);
    loop {
        if let Event::GroupEnded { outcome, swept, .. } = event(&supervisor) {
            assert_eq!(outcome, Outcome::Succeeded);
            break assert_eq!(swept.ended.iter().map(|ended| ended.pid).collect::<Vec<_>>(), [left]);
        }
    }
    close(supervisor);
}

#[test]
fn an_exempt_process_is_spared_and_does_not_block_the_cleanup() {
    let supervisor = supervisor();
    let (pids, lines) = run(&supervisor, &[&["exempt"], &["sleep"]]);
    let exempt: i32 = lines.said[0].parse().unwrap();
    kill(pids[0]);
    let (_, _, swept) = until_swept(&supervisor);
    assert_eq!((swept.ended.len(), swept.spared.len()), (0, 1));
    assert!(is_running(exempt));
    kill(exempt);
    wait_for_end(exempt);
    stop(supervisor);
}

#[test]
fn a_fork_bomb_left_by_a_dead_worker_is_killed_and_other_workers_survive() {
    for command in ["chain", "fork-bomb"] {
        let supervisor = supervisor();
        let nursery = supervisor.nursery_pid().unwrap();
        let script = format!("{} {command} & exec sleep 1234 >&2", worker_program().display());
        let (pids, mut lines) = run_with(&supervisor, &[&["sleep"], &["sleep"]], |group| {
            let shell = &mut group.processes[0];
            shell.argv = vec![c"/bin/sh".into(), c"-c".into(), c_string(script.clone())];
        });
        kill(pids[0]);
        assert!(until_swept(&supervisor).2.stuck.is_empty());
        let children = fs::read_to_string(format!("/proc/{nursery}/task/{nursery}/children")).unwrap();
        assert_eq!(children.trim(), pids[1].to_string(), "{command}");
        supervisor.stop(KILL).unwrap();
        assert_eq!(outcome(&supervisor), Outcome::Stopped);
        assert_eq!(lines.rest(), Vec::<String>::new(), "ended by the sweep, not by its own limit");
        close(supervisor);
    }
}

#[test]
fn fifty_replacements_leak_no_descriptors_and_no_memory() {
    let supervisor = supervisor();
    let nursery = supervisor.nursery_pid().unwrap();
    let (mut pids, _lines) = run(&supervisor, &[&["daemonise"], &["sleep"]]);
    let descriptors = || (open_fds().len(), fs::read_dir(format!("/proc/{nursery}/fd")).unwrap().count());
    let memory = || {
        let status = fs::read_to_string(format!("/proc/{nursery}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmData:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let mut before = None;
    for round in 0..50 {
        kill(pids[0]);
        assert_eq!(until_swept(&supervisor).2.ended.len(), 1);
        pids[0] = replace(&supervisor, 0, &["daemonise"]).0;
        if round == 5 {
            before = Some((descriptors(), memory()));
        }
    }
    let (before, memory_before) = before.unwrap();
    assert_eq!(descriptors(), before);
    assert!(memory() <= memory_before + 128, "KiB: {memory_before}, {}", memory());
    assert!(is_running(pids[1]));
    stop(supervisor);
}
