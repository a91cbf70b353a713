//! An agent whose nursery guards a connection: `guarded-agent NURSERY PORT COMMAND [COMMAND …]`.
//!
//! Each COMMAND is one worker (arguments separated by blanks), which uses the agent's standard output. The agent
//! connects to the port on 127.0.0.1, passes the connection to the nursery, starts the workers, and prints
//! `nursery PID workers PID …`. It then reads requests from standard input, one per line:
//!
//! - `fence MILLISECONDS` sets the fence deadline and answers `fence at NANOSECONDS` (`CLOCK_BOOTTIME`).
//! - `release` releases the connection and answers `released`.
//! - `beside` connects again, makes the nursery hold that connection too, and answers `held`.
//! - `beside-one-left` and `beside-full` do the same while the agent can open only one more descriptor, or none.
//!   They answer `not held`.
//! - `hold-full` and `link-full` connect again while the agent can open no descriptor. They make the nursery hold
//!   the connection as a session or as a link, and answer `asked`.
//! - `older` and `newest` release the first or the last connection and answer `let go`.
//!
//! The agent prints one line for each event. It runs until it is killed or its input is closed.

use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::Duration;

use elasticrs_core::spec::{Descendants, GroupPolicy, GroupSpec, StopPolicy, StopScope};
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{Config, Event, Supervisor};
use elasticrs_nursery::connections::Release;
use elasticrs_nursery::launch::NurseryImage;
use elasticrs_nursery::spec::ProcessSpec;
use elasticrs_runtime::runtime::Spawn;
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::signal::Signal;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}")?;
    out.flush()
}

fn group(commands: &[String]) -> Result<GroupSpec> {
    let process = |(local_rank, command): (u32, &String)| {
        let argv = command.split(' ').map(|word| Ok(CString::new(word)?)).collect::<Result<_>>()?;
        let stdio = [Some(c"/dev/null".into()), None, None];
        Ok(ProcessSpec { local_rank, stdio, ..ProcessSpec::new(argv, vec![c"PATH=/usr/bin:/bin".into()]) })
    };
    Ok(GroupSpec {
        processes: (0..).zip(commands).map(process).collect::<Result<_>>()?,
        descriptors: Vec::new(),
        policy: GroupPolicy {
            on_failure: StopPolicy { signal: Signal::TERM, grace: Duration::from_secs(30) },
            stop_scope: StopScope::Group,
            on_success: Descendants::Linger(Duration::ZERO),
            start_deadline: Duration::from_secs(30),
            keep_ignored: Vec::new(),
            replaces: false,
            keep_grace: Duration::ZERO,
        },
    })
}

fn tell(event: Event, supervisor: &Supervisor) -> Result<()> {
    match event {
        Event::GroupStarted { pids, .. } => {
            let pids: Vec<_> = pids.iter().map(ToString::to_string).collect();
            say(&format!("nursery {} workers {}", supervisor.nursery_pid().unwrap_or(0), pids.join(" ")))?;
        }
        Event::WorkerExited { local_rank, sent, .. } => {
            say(&format!("exited {local_rank} sent {}", sent.map_or(0, Signal::number)))?;
        }
        Event::Fenced => say("fenced")?,
        Event::GroupEnded { outcome, .. } => say(&format!("ended {outcome:?}"))?,
        // Ignore this event. A worker that stops itself is reported only if the other workers take long enough.
        Event::WorkerPaused { .. } => {}
        other => say(&format!("{other:?}"))?,
    }
    Ok(())
}

/// Calls `body` while the agent can open only `count` more descriptors, but can still call `poll`.
fn with_descriptors_left<T>(count: Option<i32>, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(count) = count else { return body() };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let lowest_free = File::open("/dev/null")?.as_raw_fd();
    setrlimit(Resource::RLIMIT_NOFILE, (lowest_free + count).try_into()?, hard)?;
    let result = body();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    result
}

fn serve(request: &str, supervisor: &Supervisor, connections: &mut Vec<TcpStream>) -> Result<()> {
    let keeper = supervisor.keeper();
    if let Some(left) = request.strip_prefix("beside") {
        let second = TcpStream::connect(connections[0].peer_addr()?)?;
        let copy = OwnedFd::from(second.try_clone()?);
        connections.push(second);
        let left = match left {
            "-one-left" => Some(1),
            "-full" => Some(0),
            _ => None,
        };
        let is_held = with_descriptors_left(left, || {
            let (held, is_held) = channel();
            Spawn::spawn(
                supervisor,
                Box::new(move || {
                    Box::pin(async move {
                        let _ = held.send(keeper.hold_beside(copy.as_fd()).await);
                    })
                }),
            );
            Ok(is_held.recv()?)
        })?;
        say(if is_held { "held" } else { "not held" })?;
    } else if request == "hold-full" || request == "link-full" {
        let second = TcpStream::connect(connections[0].peer_addr()?)?;
        with_descriptors_left(Some(0), || {
            if request == "hold-full" {
                keeper.hold(second.as_fd());
            } else {
                keeper.hold_link(second.as_fd(), [7; 32], true);
            }
            Ok(())
        })?;
        say("asked")?;
    } else if request == "older" || request == "newest" {
        let is_older = request == "older";
        keeper.release(if is_older { Release::Older } else { Release::Newest });
        supervisor.drain(Duration::ZERO)?;
        connections.remove(if is_older { 0 } else { connections.len() - 1 });
        say("let go")?;
    } else if let Some(milliseconds) = request.strip_prefix("fence ") {
        let at = boot_now() + milliseconds.parse::<u64>()? * 1_000_000;
        supervisor.fence().set(Some(at));
        say(&format!("fence at {at}"))?;
    } else if request == "release" {
        supervisor.release_connection()?;
        // Wait for the reply to a later command, which shows that the release has been handled.
        supervisor.drain(Duration::ZERO)?;
        say("released")?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = || arguments.next().ok_or("an argument is missing");
    let image = NurseryImage::Program { path: CString::new(argument()?)?, args: vec![c"worker-nursery".into()] };
    let connection = TcpStream::connect(("127.0.0.1", argument()?.parse()?))?;
    let commands: Vec<String> = arguments.collect();

    let supervisor = Supervisor::new(Config { nursery: vec![image], owns_process: true })?;
    supervisor.guard_connection(OwnedFd::from(connection.try_clone()?))?;
    supervisor.start(group(&commands)?)?;
    let mut input = io::stdin();
    supervisor.queue()?.watch(input.as_raw_fd());
    let mut buffer = [0; 256];
    let mut connections = vec![connection];
    loop {
        match supervisor.next(None)? {
            Next::Event(event) => tell(event, &supervisor)?,
            Next::FdReady(_) => {
                let count = input.read(&mut buffer)?;
                if count == 0 {
                    return Ok(());
                }
                for request in std::str::from_utf8(&buffer[..count])?.lines() {
                    serve(request, &supervisor, &mut connections)?;
                }
            }
            Next::TimedOut | Next::Interrupted => {}
        }
    }
}
