//! A worker for tests. Its command line says how it should behave or misbehave.
//!
//! Usage: `testkit-worker COMMAND [ARGUMENT …]`. Each command prints the line `READY` on standard output once its
//! signal handlers are installed. Details for the test, such as pids or open descriptors, are printed before `READY`.

use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::ExitCode;

use nix::sys::signal::{SigHandler, Signal, raise, signal};
use nix::unistd::pause;

use self::forking::Daemon;

mod forking;
mod old_kernel;
mod state;

/// Error of a command.
type Problem = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(problem) => {
            // Ignore an error, because some tests close standard error.
            let _ = writeln!(io::stderr(), "testkit-worker: {problem}");
            ExitCode::from(99)
        }
    }
}

/// Command-line arguments that have not been parsed yet.
struct Request {
    arguments: std::iter::Skip<std::env::Args>,
}

impl Request {
    fn next(&mut self) -> Result<String, Problem> {
        self.arguments.next().ok_or_else(|| "an argument is missing".into())
    }

    fn number<N: std::str::FromStr>(&mut self) -> Result<N, Problem> {
        let text = self.next()?;
        text.parse().map_err(|_| format!("`{text}` is no such number").into())
    }
}

fn ready() -> Result<(), Problem> {
    say("READY")
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
    // SAFETY: only `SIG_DFL` and `SIG_IGN` are used, so no code of this program runs in a signal handler.
    unsafe { signal(number, handler) }?;
    Ok(())
}

fn run() -> Result<ExitCode, Problem> {
    let mut request = Request { arguments: std::env::args().skip(1) };
    let command = request.next()?;
    match command.as_str() {
        "exit" => {
            let code: u8 = request.number()?;
            ready()?;
            return Ok(ExitCode::from(code));
        }
        "old-kernel" => match old_kernel::run(&mut request)? {},
        "signal" => {
            let number = Signal::try_from(request.number::<i32>()?)?;
            ready()?;
            if !matches!(number, Signal::SIGKILL | Signal::SIGSTOP) {
                set(number, SigHandler::SigDfl)?;
            }
            raise(number)?;
        }
        "segv" => {
            ready()?;
            // Reset the signal handler first, because the standard library's handler would print a message.
            set(Signal::SIGSEGV, SigHandler::SigDfl)?;
            // SAFETY: this write is not safe, because it is meant to crash the process.
            unsafe { std::ptr::null_mut::<u8>().write_volatile(1) };
        }
        "sleep" => {
            ready()?;
            pause_for_ever();
        }
        "ignore-term" => {
            set(Signal::SIGTERM, SigHandler::SigIgn)?;
            set(Signal::SIGINT, SigHandler::SigIgn)?;
            ready()?;
            pause_for_ever();
        }
        "stop-self" => {
            ready()?;
            raise(Signal::SIGSTOP)?;
            say("CONTINUED")?;
            pause_for_ever();
        }
        "traced" => {
            nix::sys::ptrace::traceme()?;
            ready()?;
            pause_for_ever();
        }
        "daemonise" => forking::daemonise(Daemon::Ordinary)?,
        "hang-in-map" => {
            let path = request.next()?;
            ready()?;
            elasticrs_testkit::hung_file::hang_in_map(path.as_ref())?;
        }
        "cleaner" => forking::cleaner(&mut request)?,
        "exempt" => forking::daemonise(Daemon::Exempt)?,
        "headless" => forking::daemonise(Daemon::Headless)?,
        "fork-bomb" => forking::bomb()?,
        "chain" => forking::chain()?,
        "tree" => forking::tree(&mut request)?,
        "lines" => lines(&mut request)?,
        "notify" => notify(&mut request)?,
        "alloc" => state::allocate(&mut request)?,
        "env" => state::environment()?,
        "cwd" => state::directory()?,
        "fds" => state::descriptors()?,
        "sigmask" => state::signals()?,
        "ids" => state::ids()?,
        other => return Err(format!("no command `{other}`").into()),
    }
    Ok(ExitCode::SUCCESS)
}

/// `lines N BYTES`: prints N lines. Each line starts with its number and is BYTES bytes long, including the
/// newline.
fn lines(request: &mut Request) -> Result<(), Problem> {
    let (count, bytes): (u64, usize) = (request.number()?, request.number()?);
    ready()?;
    let mut out = io::BufWriter::with_capacity(64 * 1024, io::stdout().lock());
    for number in 0..count {
        let number = number.to_string();
        let padding = bytes.saturating_sub(number.len() + 1);
        writeln!(out, "{number}{}", ".".repeat(padding))?;
    }
    out.flush()?;
    Ok(())
}

/// `notify NAME`: for each line on standard input, sends an empty datagram to the abstract socket NAME and prints
/// `SENT`.
fn notify(request: &mut Request) -> Result<(), Problem> {
    let address = SocketAddr::from_abstract_name(request.next()?)?;
    let socket = UnixDatagram::unbound()?;
    ready()?;
    for line in io::stdin().lines() {
        line?;
        socket.send_to_addr(&[], &address)?;
        say("SENT")?;
    }
    Ok(())
}
