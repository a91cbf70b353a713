//! A nursery for the tests of this crate: an ordinary one if it gets its start text as an argument, otherwise a
//! warm one. The warm nursery imports nothing, and its workers execute their programs. `WARM_NURSERY` in its
//! environment says what it does before it is ready, either directly or as `reads PATH` in a file.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::{env, fs};

use elasticrs_nursery::protocol::{FIXED_FDS, NurseryLink, PROTOCOL, Reply};
use elasticrs_nursery::server::{run, run_warm};
use elasticrs_sys::fds::Inherited;
use elasticrs_sys::fork::plain;
use nix::unistd::pause;

fn main() -> ExitCode {
    if let Some(start) = env::args().nth(1) {
        return run(Some(&start)).into();
    }
    let start = env::var("ELASTICRS_NURSERY_START").ok();
    let what = env::var("WARM_NURSERY").unwrap_or_default();
    let what = match what.strip_prefix("reads ") {
        Some(path) => fs::read_to_string(path).expect("the test has written it"),
        None => what,
    };
    match what.as_str() {
        "hangs" => loop {
            pause();
        },
        "dies" => return ExitCode::from(3),
        "is of another build" => {
            let inherited = Inherited::claim().expect("nothing else takes them");
            let [socket, ..] = inherited.take(FIXED_FDS, false).expect("the agent passes them");
            let mut link = NurseryLink::new(socket).expect("it is a socket");
            let ready = Reply::Ready { protocol: PROTOCOL + 1, pid: 0 };
            link.send(&ready, Vec::new()).expect("there is room");
            loop {
                pause();
            }
        }
        _ => {}
    }
    // Close the descriptor for the report, because this program writes none.
    let _ = nix::unistd::close(6);
    let mut forks = 0;
    let forker = move || {
        forks += 1;
        if what == "hangs before the second fork" && forks == 2 {
            pause();
        }
        let forked = plain();
        match (forked, what.as_str()) {
            (Ok(0), "hangs at forks") => pause(),
            // Exit, and leave a child process that keeps all descriptors open.
            (Ok(0), "ends and leaves a process") => match plain() {
                Ok(0) => pause(),
                _ => std::process::exit(0),
            },
            _ => {}
        }
        forked
    };
    match run_warm(start.as_deref(), Some(Box::new(forker))) {
        Err(code) => ExitCode::from(code),
        Ok(worker) => {
            let os = |text: &CStr| OsStr::from_bytes(text.to_bytes()).to_owned();
            let mut command = Command::new(os(&worker.argv[0]));
            command.args(worker.argv[1..].iter().map(|arg| os(arg))).env_clear();
            for entry in &worker.env {
                let mut parts = entry.to_bytes().splitn(2, |&byte| byte == b'=');
                let [name, value] =
                    [parts.next(), parts.next()].map(|part| OsStr::from_bytes(part.unwrap_or_default()));
                command.env(name, value);
            }
            let _ = command.exec();
            ExitCode::from(127)
        }
    }
}
