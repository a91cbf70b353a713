//! A worker that misbehaves on request.
//!
//! `testkit-worker [--ready-fd N] COMMAND [ARGUMENT …]`. Each command tells when its handlers are in place: by the line
//! `READY` on standard output, or by a byte on descriptor N. What a command has to say comes before that line.

mod forking;
mod old_kernel;
mod output;
mod state;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::FromRawFd;
use std::process::ExitCode;

use nix::sys::signal::{SigHandler, Signal, raise, signal};
use nix::unistd::pause;

use self::forking::Daemon;

/// What went wrong with a request.
type Problem = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(problem) => {
            // A closed standard error is one of the things that are tested.
            let _ = writeln!(io::stderr(), "testkit-worker: {problem}");
            ExitCode::from(99)
        }
    }
}

/// The command line, and how to say that the worker is ready.
struct Request {
    ready_fd: Option<i32>,
    arguments: std::vec::IntoIter<String>,
}

impl Request {
    fn next(&mut self) -> Result<String, Problem> {
        self.arguments.next().ok_or_else(|| "an argument is missing".into())
    }

    fn number<N: std::str::FromStr>(&mut self) -> Result<N, Problem> {
        let text = self.next()?;
        text.parse().map_err(|_| format!("`{text}` is no such number").into())
    }

    fn ready(&self) -> Result<(), Problem> {
        match self.ready_fd {
            // SAFETY: whoever starts the worker with this option gives the descriptor to it alone.
            Some(fd) => unsafe { File::from_raw_fd(fd) }.write_all(b"R")?,
            None => say("READY")?,
        }
        Ok(())
    }
}

fn say(line: &str) -> Result<(), Problem> {
    let mut out = io::stdout();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}

fn pause_for_ever() -> ! {
    loop {
        pause();
    }
}

fn set(number: Signal, handler: SigHandler) -> Result<(), Problem> {
    // SAFETY: only `SIG_DFL` and `SIG_IGN` are used: no code of ours runs in a handler.
    unsafe { signal(number, handler) }?;
    Ok(())
}

fn run() -> Result<ExitCode, Problem> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut ready_fd = None;
    if arguments.first().is_some_and(|first| first == "--ready-fd") && arguments.len() > 1 {
        ready_fd = Some(arguments[1].parse()?);
        arguments.drain(..2);
    }
    let mut request = Request { ready_fd, arguments: arguments.into_iter() };
    let command = request.next()?;
    match command.as_str() {
        "exit" => {
            let code: u8 = request.number()?;
            request.ready()?;
            return Ok(ExitCode::from(code));
        }
        "old-kernel" => match old_kernel::run(&mut request)? {},
        "signal" => {
            let number = Signal::try_from(request.number::<i32>()?)?;
            request.ready()?;
            if !matches!(number, Signal::SIGKILL | Signal::SIGSTOP) {
                set(number, SigHandler::SigDfl)?;
            }
            raise(number)?;
        }
        "segv" => {
            request.ready()?;
            // The standard library's handler would tell of it first.
            set(Signal::SIGSEGV, SigHandler::SigDfl)?;
            // SAFETY: it is not; that is what was asked for.
            unsafe { std::ptr::null_mut::<u8>().write_volatile(1) };
        }
        "sleep" => {
            request.ready()?;
            pause_for_ever();
        }
        "ignore-term" => {
            set(Signal::SIGTERM, SigHandler::SigIgn)?;
            set(Signal::SIGINT, SigHandler::SigIgn)?;
            request.ready()?;
            pause_for_ever();
        }
        "stop-self" => {
            request.ready()?;
            raise(Signal::SIGSTOP)?;
            say("CONTINUED")?;
            pause_for_ever();
        }
        "daemonise" => forking::daemonise(&request, Daemon::Ordinary)?,
        "hang-in-map" => {
            let path = request.next()?;
            request.ready()?;
            elasticrs_testkit::hung_file::hang_in_map(path.as_ref())?;
        }
        "cleaner" => forking::cleaner(&mut request)?,
        "exempt" => forking::daemonise(&request, Daemon::Exempt)?,
        "headless" => forking::daemonise(&request, Daemon::Headless)?,
        "fork-bomb" => forking::bomb(&request)?,
        "chain" => forking::chain(&request)?,
        "tree" => forking::tree(&mut request)?,
        "lines" => output::lines(&mut request)?,
        "half-line" => output::half_line(&request)?,
        "close-stdout" => output::close(&request)?,
        "alloc" => state::allocate(&mut request)?,
        "env" => state::environment(&request)?,
        "cwd" => state::directory(&request)?,
        "fds" => state::descriptors(&request)?,
        "sigmask" => state::signals(&request)?,
        "ids" => state::ids(&request)?,
        other => return Err(format!("no command `{other}`").into()),
    }
    Ok(ExitCode::SUCCESS)
}
