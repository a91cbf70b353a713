//! Tests for how a worker is started (session, descriptors, signals and files), and for every way in which its
//! start can fail.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use elasticrs_nursery::launch::stage_reached;
use elasticrs_nursery::protocol::{Reply, Request};
use elasticrs_nursery::spec::PassedFd;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::stage::Stage;
use elasticrs_testkit::nursery::{self, Client, Lines, c_string, pipe, process, with_stdout, worker};
use elasticrs_testkit::{open_fds, wait_readable};

#[test]
fn the_exit_of_a_worker_is_reported_once() {
    let mut client = Client::start();
    let (worker, _lines) = client.spawn_ready(&["exit", "7"]);
    assert_eq!(client.exit_of(worker.pid), WorkerExit::Exited { code: 7 });
    // The next reply must be the one to the sweep, because the exit is not reported again.
    client.request_sweep(0, 0, 10_000);
    assert!(matches!(client.next_reply().0, Reply::Swept { .. }));
}

#[test]
fn a_worker_killed_by_a_signal_is_reported_with_that_signal() {
    let mut client = Client::start();
    for (arguments, signal) in [(["signal", "9"], 9), (["signal", "15"], 15), (["segv", ""], 11)] {
        let worker = client.spawn(&worker(&arguments));
        let exit = client.exit_of(worker.pid);
        assert!(matches!(exit, WorkerExit::Signaled { signal: by, .. } if by == signal), "{exit:?}");
    }
}

#[test]
fn a_worker_leads_its_own_session_and_has_the_oom_score_of_the_agent() {
    let mut client = Client::start();
    let (worker, lines) = client.spawn_ready(&["ids"]);
    let ours = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    let (pid, nursery) = (worker.pid, client.nursery.pid);
    assert_eq!(lines.said, [format!("{pid} {nursery} {pid} {pid} {}", ours.trim())]);
}

#[test]
fn the_pidfd_of_a_worker_becomes_readable_when_the_worker_exits() {
    let mut client = Client::start();
    let (worker, _lines) = client.spawn_ready(&["sleep"]);
    elasticrs_sys::process::send_signal(&worker.pidfd, libc::SIGKILL).unwrap();
    wait_readable(worker.pidfd.as_fd(), "the end of the worker");
    assert_eq!(client.exit_of(worker.pid), WorkerExit::Signaled { signal: 9 });
}

#[test]
fn only_standard_streams_and_passed_descriptors_are_open_in_a_worker() {
    let mut client = Client::start();
    let (reader, writer) = pipe();
    let (other, _keep) = pipe();
    let mut process = with_stdout(worker(&["fds"]));
    process.pass_fds.push(PassedFd { source: 1, target: 9 });
    client.request_spawn(&process, &[], vec![writer, other]);
    let worker = client.spawned().unwrap();
    let mut lines = Lines::new(reader);
    lines.until_ready();
    let numbers: Vec<&str> = lines.said.iter().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(numbers, ["0", "1", "2", "9"], "{:?}", lines.said);
    assert_eq!(lines.said[0], "0 /dev/null");
    assert_eq!(client.exit_of(worker.pid), WorkerExit::Exited { code: 0 });
}

#[test]
fn descriptor_targets_that_are_sources_of_others_do_not_collide() {
    let mut client = Client::start();
    let files: Vec<_> =
        ["a", "b", "c", "d"].map(|name| (name, tempfile::Builder::new().prefix(name).tempfile().unwrap())).into();
    let (reader, writer) = pipe();
    let mut process = with_stdout(worker(&["fds"]));
    // The nursery holds the descriptors at about these numbers, so each target is the source of another descriptor.
    let targets = [10, 9, 8, 7];
    process.pass_fds.extend((1..).zip(targets).map(|(source, target)| PassedFd { source, target }));
    let mut fds = vec![writer];
    fds.extend(files.iter().map(|(_, file)| file.as_file().as_fd().try_clone_to_owned().unwrap()));
    client.request_spawn(&process, &[], fds);
    let worker = client.spawned().unwrap();
    let mut lines = Lines::new(reader);
    lines.until_ready();
    for ((_, file), target) in files.iter().zip(targets) {
        let expected = format!("{target} {}", file.path().display());
        assert!(lines.said.contains(&expected), "{expected} is not in {:?}", lines.said);
    }
    client.exit_of(worker.pid);
}

#[test]
fn a_worker_blocks_no_signal_and_ignores_only_the_chosen_ones() {
    let mut client = Client::start();
    for (keep_ignored, expected) in [(vec![], 0x1000_u64), (vec![libc::SIGHUP, 64], 0x8000_0000_0000_1001)] {
        let (reader, writer) = pipe();
        client.request_spawn(&with_stdout(worker(&["sigmask"])), &keep_ignored, vec![writer]);
        let worker = client.spawned().unwrap();
        let mut lines = Lines::new(reader);
        lines.until_ready();
        // SIGPIPE is ignored by the test worker's Rust runtime, not by the nursery.
        assert_eq!(lines.said[0], format!("SigBlk:\t{:016x}", 0));
        assert_eq!(lines.said[1], format!("SigIgn:\t{expected:016x}"));
        client.exit_of(worker.pid);
    }
}

#[test]
fn the_log_file_of_a_worker_is_opened_for_appending() {
    let mut client = Client::start();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("stdout.log");
    std::fs::write(&log, "before\n").unwrap();
    let mut process = worker(&["lines", "2", "4"]);
    process.stdio[1] = Some(c_string(log.clone()));
    let started = client.spawn(&process);
    assert_eq!(client.exit_of(started.pid), WorkerExit::Exited { code: 0 });
    assert_eq!(std::fs::read_to_string(log).unwrap(), "before\nREADY\n0..\n1..\n");
}

#[test]
fn a_worker_has_the_environment_and_directory_of_its_spec() {
    let mut client = Client::start();
    let folder = tempfile::tempdir().unwrap().keep().canonicalize().unwrap();
    for (command, expected) in [("env", "A=1".to_owned()), ("cwd", folder.display().to_string())] {
        let (reader, writer) = pipe();
        let mut process = with_stdout(worker(&[command]));
        process.env = vec![c"A=1".into()];
        process.cwd = Some(c_string(folder.clone()));
        client.request_spawn(&process, &[], vec![writer]);
        let worker = client.spawned().unwrap();
        let mut lines = Lines::new(reader);
        lines.until_ready();
        assert_eq!(lines.said, [expected]);
        client.exit_of(worker.pid);
    }
    std::fs::remove_dir(folder).unwrap();
}

#[test]
fn the_program_is_searched_in_the_path_of_the_worker() {
    let mut client = Client::start();
    let folder = tempfile::tempdir().unwrap();
    let denied = folder.path().join("denied");
    std::fs::create_dir(&denied).unwrap();
    std::fs::write(denied.join("true"), "no program").unwrap();
    let mut process = process(vec!["true".into()]);
    process.env = vec![c_string(format!("PATH=/nowhere:{}:/usr/bin:/bin", denied.display()))];
    let worker = client.spawn(&process);
    assert_eq!(client.exit_of(worker.pid), WorkerExit::Exited { code: 0 });
    // If nothing else is found, report the file that may not be executed, because that is the more helpful message.
    process.env = vec![c_string(format!("PATH={}:/nowhere", denied.display()))];
    assert_eq!(client.try_spawn(&process).err(), Some((Stage::Exec, libc::EACCES, "true".to_owned())));
}

#[test]
fn a_failed_start_is_reported_with_its_stage_error_and_path() {
    let mut client = Client::start();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("text"), "no program").unwrap();
    std::fs::write(path("script"), "echo without a first line\n").unwrap();
    std::fs::set_permissions(path("script"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut check = |process, stage, errno, subject: &std::path::Path| {
        let failure = client.try_spawn(&process).err();
        assert_eq!(failure, Some((stage, errno, subject.to_str().unwrap().to_owned())));
    };
    let program = |path: std::path::PathBuf| process(vec![path.into_os_string()]);

    check(program(path("missing")), Stage::Exec, libc::ENOENT, &path("missing"));
    check(program("missing".into()), Stage::Exec, libc::ENOENT, "missing".as_ref());
    check(program(path("text")), Stage::Exec, libc::EACCES, &path("text"));
    check(program(path("script")), Stage::Exec, libc::ENOEXEC, &path("script"));
    check(program(path("text").join("below")), Stage::Exec, libc::ENOTDIR, &path("text").join("below"));

    let mut directory = worker(&["sleep"]);
    directory.cwd = Some(c_string(path("missing")));
    check(directory.clone(), Stage::ChangeDir, libc::ENOENT, &path("missing"));
    directory.cwd = Some(c_string(path("text")));
    check(directory, Stage::ChangeDir, libc::ENOTDIR, &path("text"));

    let mut log = worker(&["sleep"]);
    log.stdio[2] = Some(c_string(folder.path().to_owned()));
    check(log.clone(), Stage::OpenLog, libc::EISDIR, folder.path());
    log.stdio[2] = Some(c_string(path("missing").join("log")));
    check(log, Stage::OpenLog, libc::ENOENT, &path("missing").join("log"));
}

#[test]
fn an_impossible_process_spec_is_an_error_and_not_a_crash() {
    let mut client = Client::start();
    assert_eq!(client.try_spawn(&process(vec![])).err(), Some((Stage::Exec, libc::EINVAL, String::new())));
    let mut process = with_stdout(worker(&["sleep"]));
    process.pass_fds[0].target = -1;
    client.request_spawn(&process, &[], vec![pipe().1]);
    assert_eq!(client.spawned().err(), Some((Stage::Descriptors, libc::EBADF, String::new())));
}

#[test]
fn a_start_that_hangs_reports_its_stage_and_dies_with_the_nursery() {
    let mut client = Client::start();
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut process = worker(&["sleep"]);
    // Nothing ever reads from the FIFO, so opening it blocks, as on a dead network file system.
    process.stdio[1] = Some(c_string(fifo));
    client.request_spawn(&process, &[], Vec::new());
    loop {
        wait_readable(&client.nursery.stages, "the next stage");
        if stage_reached(&client.nursery.stages) == Some(Stage::OpenLog) {
            break;
        }
    }
    let blocked = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", client.nursery.pid)).unwrap();
    let blocked: i32 = blocked.trim().parse().unwrap();
    client.kill();
    // The blocked child was killed when its parent died. This process adopts it as the next subreaper.
    elasticrs_testkit::wait_for_end(blocked);
    let reaped = elasticrs_sys::process::reap(blocked);
    let elasticrs_sys::process::Waited::Changed { status, .. } = reaped else { panic!("{reaped:?}") };
    assert_eq!(WorkerExit::from_wait_status(status), Some(WorkerExit::Signaled { signal: 9 }));
}

#[test]
fn many_starts_leak_no_descriptors_in_the_agent_or_the_nursery() {
    let mut client = Client::start();
    let in_nursery = |pid: i32| std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let before = (open_fds(), in_nursery(client.nursery.pid));
    for round in 0..64 {
        let (reader, writer) = pipe();
        let process = with_stdout(worker(if round % 2 == 0 { &["exit", "0"] } else { &["no such command"] }));
        client.request_spawn(&process, &[], vec![writer]);
        let worker = client.spawned().unwrap();
        client.exit_of(worker.pid);
        drop(reader);
        client.try_spawn(&nursery::process(vec!["/no such program".into()])).err().unwrap();
    }
    assert_eq!((open_fds(), in_nursery(client.nursery.pid)), before);
}

#[test]
fn sixty_four_workers_run_at_once() {
    let mut client = Client::start();
    for local_rank in 0..64 {
        let mut process = worker(&["sleep"]);
        process.local_rank = local_rank;
        client.request_spawn(&process, &[], Vec::new());
    }
    let workers: Vec<_> = (0..64).map(|_| client.spawned().unwrap()).collect();
    for worker in &workers {
        client.send(&Request::SignalGroup { pid: worker.pid, signal: libc::SIGKILL });
    }
    for worker in &workers {
        assert_eq!(client.exit_of(worker.pid), WorkerExit::Signaled { signal: 9 });
    }
}

#[test]
fn a_signal_for_a_pid_that_is_not_a_worker_is_not_sent() {
    let mut client = Client::start();
    let mut bystander = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    client.send(&Request::SignalGroup { pid: bystander.id().cast_signed(), signal: libc::SIGKILL });
    client.sweep(0, 0);
    assert!(elasticrs_testkit::is_running(bystander.id().cast_signed()));
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[test]
fn a_nursery_that_runs_out_of_descriptors_reports_it_and_continues() {
    let mut client = Client::start();
    let limit = |nursery: i32, limit: &str| {
        let status = std::process::Command::new("prlimit")
            .args([format!("--pid={nursery}"), format!("--nofile={limit}:")])
            .status();
        assert!(status.unwrap().success());
    };
    let before = std::fs::read_to_string(format!("/proc/{}/limits", client.nursery.pid)).unwrap();
    let before = before.lines().find(|line| line.starts_with("Max open files")).unwrap().split_whitespace().nth(3);
    limit(client.nursery.pid, "3");
    let failure = client.try_spawn(&worker(&["sleep"])).err();
    assert_eq!(failure, Some((Stage::Clone, libc::EMFILE, String::new())));
    client.request_spawn(&with_stdout(worker(&["sleep"])), &[], vec![pipe().1]);
    assert_eq!(client.spawned().err(), Some((Stage::Descriptors, libc::EMFILE, String::new())));
    limit(client.nursery.pid, before.unwrap());
    let (worker, _lines) = client.spawn_ready(&["exit", "3"]);
    assert_eq!(client.exit_of(worker.pid), WorkerExit::Exited { code: 3 });
}
