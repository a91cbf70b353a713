//! Tests for how a nursery is started, and for its state once it runs.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::PathBuf;

use elasticrs_nursery::launch::{Interrupt, LaunchError, Launched, NurseryImage, launch};
use elasticrs_nursery::protocol::{PROTOCOL, Reply};
use elasticrs_nursery::token::Token;
use elasticrs_sys::process;
use elasticrs_sys::stage::Stage;
use elasticrs_testkit::hung_file::SlowFile;
use elasticrs_testkit::nursery::{Client, image, program};
use elasticrs_testkit::{assert_no_children, open_fds, wait_readable};
use nix::errno::Errno;

fn embedded() -> NurseryImage {
    NurseryImage::Embedded(fs::read(env!("CARGO_BIN_EXE_worker-nursery")).unwrap().leak())
}

fn missing() -> NurseryImage {
    NurseryImage::Program { path: c"/no such program".into(), args: vec![c"x".into()] }
}

fn until_ready(nursery: &mut Launched) {
    loop {
        if let Some((reply, _)) = nursery.link.receive().unwrap() {
            assert_eq!(reply, Reply::Ready { protocol: PROTOCOL, pid: nursery.pid });
            return;
        }
        wait_readable(&nursery.link, "Ready");
    }
}

fn end(nursery: Launched) {
    let (pid, pidfd) = (nursery.pid, nursery.pidfd);
    drop(nursery.link);
    wait_readable(pidfd, "the end of the nursery");
    assert!(matches!(process::reap(pid), process::Waited::Changed { status: 0, .. }));
    assert_no_children();
}

#[test]
fn an_embedded_nursery_runs_from_memory_under_its_own_name() {
    let mut nursery = launch(&[embedded()], None, &Interrupt::default()).unwrap();
    until_ready(&mut nursery);
    let proc = |name: &str| PathBuf::from(format!("/proc/{}/{name}", nursery.pid));
    assert!(fs::read_link(proc("exe")).unwrap().starts_with("/memfd:worker-nursery (deleted)"));
    assert_eq!(fs::read_to_string(proc("comm")).unwrap(), "worker-nursery\n");
    assert_eq!(fs::read_to_string(proc("cmdline")).unwrap(), format!("worker-nursery\0{}\0", nursery.token));
    assert_eq!(Token::of(nursery.pid), Some(nursery.token));
    let session = nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(nursery.pid))).unwrap();
    assert_eq!(session.as_raw(), nursery.pid);
    end(nursery);
}

#[test]
fn the_next_program_is_tried_if_one_cannot_be_executed() {
    let images = [NurseryImage::Embedded(b"no program"), missing(), image(program())];
    let mut nursery = launch(&images, None, &Interrupt::default()).unwrap();
    until_ready(&mut nursery);
    end(nursery);
}

#[test]
fn a_failed_launch_reports_the_last_error_and_leaks_nothing() {
    let before = open_fds();
    let error = launch(&[embedded_garbage(), missing()], None, &Interrupt::default()).unwrap_err();
    assert!(matches!(error, LaunchError::Start { stage: Stage::Exec, errno: Errno::ENOENT }), "{error:?}");
    assert_eq!(error.to_string(), "could not start the nursery: could not execute: No such file or directory");
    let error = launch(&[embedded_garbage()], None, &Interrupt::default()).unwrap_err();
    assert!(matches!(error, LaunchError::Start { stage: Stage::Exec, errno: Errno::ENOEXEC }), "{error:?}");
    assert_eq!(open_fds(), before);
    assert_no_children();
}

fn embedded_garbage() -> NurseryImage {
    NurseryImage::Embedded(b"no program")
}

#[test]
fn an_interrupted_launch_fails_and_leaves_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("program");
    fs::copy(program(), &path).unwrap();
    let slow = SlowFile::new(&path);
    let images = [image(path)];
    let interrupt = Interrupt::default();
    let launched = std::thread::scope(|scope| {
        let launching = scope.spawn(|| launch(&images, None, &interrupt));
        slow.wait_until_opened();
        interrupt.set();
        launching.join().unwrap()
    });
    let cancelled = |launched| matches!(launched, Err(LaunchError::Start { errno: Errno::ECANCELED, .. }));
    assert!(cancelled(launched));
    assert!(cancelled(launch(&images, None, &interrupt)), "a later one");
    assert_no_children();
    drop(slow);
    end(launch(&images, None, &Interrupt::default()).unwrap());
}

#[test]
fn a_nursery_outlives_the_thread_that_started_it() {
    let mut nursery =
        std::thread::spawn(|| launch(&[image(program())], None, &Interrupt::default()).unwrap()).join().unwrap();
    until_ready(&mut nursery);
    end(nursery);
}

#[test]
fn descriptors_of_the_agent_do_not_reach_the_nursery() {
    let mut client = Client::start();
    let leaky = fs::File::open("/dev/zero").unwrap();
    nix::fcntl::fcntl(&leaky, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let mut nursery = launch(&[image(program())], None, &Interrupt::default()).unwrap();
    until_ready(&mut nursery);
    let folder = format!("/proc/{}/fd", nursery.pid);
    let open = fs::read_dir(folder).unwrap().map(|fd| fs::read_link(fd.unwrap().path()).unwrap());
    assert!(!open.into_iter().any(|target| target.ends_with("zero")));
    drop(nursery.link);
    wait_readable(&nursery.pidfd, "the end of the nursery");
    process::reap(nursery.pid);
    client.sweep(0, 0);
}

#[test]
fn the_nursery_ignores_sigterm_and_similar_signals() {
    let mut client = Client::start();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGALRM] {
        elasticrs_sys::process::send_signal(&client.nursery.pidfd, signal).unwrap();
    }
    let (worker, _lines) = client.spawn_ready(&["exit", "0"]);
    client.exit_of(worker.pid);
}
