//! Starting a nursery from the agent.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::NAME;
use super::link::AgentLink;
use super::protocol::FIXED_FDS;
use super::report;
use super::server::command;
use super::start::Start;
use super::token::Token;
use crate::limits::given_descriptors;
use crate::signal::Signal;
use crate::spec::ProcessSpec;
use crate::sys::features::{UnsupportedKernel, check_floor};
use crate::sys::spawn::{self, Child, Command, Failure, Program, Stack, Standard};
use crate::sys::stage::Stage;
use crate::sys::{fds, pidfd, wait};

/// Where the nursery's program is.
#[derive(Debug, Clone)]
pub enum NurseryImage {
    /// The workers' own program, which imports what they need before it is ready, and forks them.
    Warm(Arc<Warm>),
    /// An executable file in memory: part of the extension.
    Embedded(&'static [u8]),
    /// Another program that calls [`super::server::run`] with its last argument, which is appended to these.
    /// It gets the agent's environment.
    Program {
        path: PathBuf,
        /// Its arguments, the first (its own name) included.
        args: Vec<OsString>,
    },
}

/// The program of workers that have already imported. It finds the text of a [`Start`] in [`START_VARIABLE`], and calls
/// [`super::server::run_warm`] when it has imported.
#[derive(Debug)]
pub struct Warm {
    /// Its workers' arguments, and what they have of the environment in common.
    pub process: ProcessSpec,
    /// Signals that its workers are to ignore.
    pub ignored: Vec<Signal>,
    /// Where it reports, under [`REPORT_FD`].
    pub report: OwnedFd,
    /// How long it may import.
    pub limit: Duration,
}

/// The variable of a warm nursery.
const START_VARIABLE: &str = "ELASTICRS_NURSERY_START";
/// The variable of one that follows another, which has ended while it imported.
const SINCE_VARIABLE: &str = "ELASTICRS_WARM_SINCE";

/// The first one that is free.
pub const REPORT_FD: i32 = 6;

/// A nursery that executes its program; its first reply is `Ready`.
#[derive(Debug)]
pub struct Launched {
    /// Its pid; a child of this process, to be reaped by the owner of this value once the pidfd is readable.
    pub pid: i32,
    pub pidfd: OwnedFd,
    /// The connection. Closing it ends the nursery and everything below it.
    pub link: AgentLink,
    /// The reading end of the stage pipe, non-blocking; see [`stage_reached`].
    pub stages: OwnedFd,
    /// What its descendants carry.
    pub token: Token,
    /// What goes on until it is ready, if it imports before.
    pub warming: Option<Warming>,
    /// A small nursery without workers, which acts when the agent dies and this one cannot act: a process that imports dies with
    /// the agent, and one that starts a worker may hang. To be ended by the owner of this value, as every nursery.
    pub sentinel: Option<Box<Launched>>,
}

/// An import.
#[derive(Debug)]
pub struct Warming {
    pub warm: Arc<Warm>,
    /// Where the report begins of this process, and of those before it that have ended by a module.
    pub since: u64,
}

/// The stage that the start of the latest worker has reached since the last call, for a start that hangs: it is the
/// worker behind the last one that was answered.
pub fn stage_reached(stages: &OwnedFd) -> Option<Stage> {
    let mut reached = None;
    let mut bytes = [0; 4096];
    // An empty pipe is EAGAIN, one whose nursery is gone has an end: both mean that this is all.
    while let Ok(count @ 1..) = nix::unistd::read(stages, &mut bytes) {
        reached = Stage::from_byte(bytes[count - 1]);
    }
    reached
}

/// No nursery could be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    Unsupported(#[from] UnsupportedKernel),
    /// The program did not start; the error of the last image that was tried.
    #[error("could not start the nursery: could not {stage}: {}", .stage.reason(*.errno))]
    Start { stage: Stage, errno: Errno },
    #[error("could not prepare the nursery: {0}")]
    Prepare(#[from] io::Error),
}

impl From<Errno> for LaunchError {
    fn from(errno: Errno) -> Self {
        Self::Prepare(errno.into())
    }
}

/// Starts a nursery from the first of these images that can be executed.
///
/// Safe in a process with threads. The nursery does not depend on the calling thread: it watches this process.
/// It inherits descriptors 0 to 2, the working directory, the limits and the umask of this moment, and workers inherit
/// them from it; but for a soft limit of descriptors that was raised for this process alone. Images are tried in order, since an embedded one cannot be executed everywhere (`vm.memfd_noexec`,
/// security modules).
pub fn launch(images: &[NurseryImage]) -> Result<Launched, LaunchError> {
    launch_again(images, None)
}

/// The same as [`launch`], in place of a nursery that a module has ended while it imported: see [`Warming::since`].
pub fn launch_again(images: &[NurseryImage], since: Option<u64>) -> Result<Launched, LaunchError> {
    check_floor()?;
    launch_as(images, since, Start { token: Token::random()?, descriptors: given_descriptors(), is_sentinel: false })
}

/// The sentinel of a nursery whose descendants carry this token.
pub fn launch_sentinel(images: &[NurseryImage], token: Token) -> Result<Launched, LaunchError> {
    launch_as(images, None, Start { token, descriptors: None, is_sentinel: true })
}

fn launch_as(images: &[NurseryImage], since: Option<u64>, start: Start) -> Result<Launched, LaunchError> {
    let token = start.token;
    let (ours, theirs) = UnixStream::pair()?;
    let (stages, stages_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    let agent = pidfd::open(nix::unistd::getpid().as_raw())?;
    let [socket_number, agent_number, stages_number] = FIXED_FDS;
    let passed = [(theirs.as_fd(), socket_number), (agent.as_fd(), agent_number), (stages_end.as_fd(), stages_number)];
    let text = start.to_string();
    let mut stack = Stack::new()?;
    let mut failure = Failure { stage: Stage::Exec, errno: Errno::ENOENT, descriptor: 0 };
    for image in images {
        let memory_file;
        let (program, argv, env) = match image {
            NurseryImage::Warm(_) if start.is_sentinel => continue,
            NurseryImage::Warm(warm) => {
                let sentinel = Box::new(launch_sentinel(images, token)?);
                let variables =
                    [Some((START_VARIABLE, text.clone())), since.map(|since| (SINCE_VARIABLE, since.to_string()))];
                let since = since.unwrap_or_else(|| report::length(&warm.report));
                let command = warm_command(warm, variables.into_iter().flatten(), &passed);
                match command.and_then(|command| spawn::spawn(&command, &mut stack)) {
                    Ok(child) => {
                        let mut launched = launched(child, ours, stages, token)?;
                        launched.warming = Some(Warming { warm: Arc::clone(warm), since });
                        launched.sentinel = Some(sentinel);
                        return Ok(launched);
                    }
                    Err(error) => failure = error,
                }
                // The only error is ESRCH, of one that has ended.
                let _ = pidfd::send_signal(&sentinel.pidfd, libc::SIGKILL);
                wait::reap(sentinel.pid);
                continue;
            }
            NurseryImage::Embedded(content) => {
                memory_file = match fds::executable_memory_file(NAME, content) {
                    Ok(file) => file,
                    Err(error) => {
                        failure.errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EACCES));
                        continue;
                    }
                };
                (Program::File(memory_file.as_fd()), vec![OsStr::from_bytes(NAME.to_bytes()).to_owned()], Vec::new())
            }
            NurseryImage::Program { path, args } => {
                let path = c_string(path.as_os_str().as_bytes().to_vec())?;
                (Program::Paths(vec![path]), args.clone(), environment())
            }
        };
        let argv = argv.into_iter().chain([text.clone().into()]);
        let command = Command {
            program,
            argv: argv.map(|arg| c_string(arg.into_vec())).collect::<Result<_, _>>()?,
            env: env.into_iter().map(c_string).collect::<Result<_, _>>()?,
            cwd: None,
            stdio: [const { Standard::Inherit }; 3],
            fds: passed.to_vec(),
            ignored: Vec::new(),
            dies_with_parent: false,
            keeps_orphans: false,
            cpus: None,
            oom_score_adj: None,
            stages: None,
        };
        match spawn::spawn(&command, &mut stack) {
            Ok(child) => return launched(child, ours, stages, token),
            Err(error) => failure = error,
        }
    }
    Err(LaunchError::Start { stage: failure.stage, errno: failure.errno })
}

fn launched(child: Child, socket: UnixStream, stages: OwnedFd, token: Token) -> Result<Launched, LaunchError> {
    let link = AgentLink::new(socket)?;
    Ok(Launched { pid: child.pid, pidfd: child.pidfd, link, stages, token, warming: None, sentinel: None })
}

fn warm_command<'fd>(
    warm: &'fd Warm,
    variables: impl Iterator<Item = (&'static str, String)>,
    passed: &[(BorrowedFd<'fd>, i32)],
) -> Result<Command<'fd>, Failure> {
    let ignored: Vec<i32> = warm.ignored.iter().map(|signal| signal.number()).collect();
    let mut command = command(&warm.process, &ignored, &[])?;
    let exec = |errno| Failure { stage: Stage::Exec, errno, descriptor: 0 };
    for (name, value) in variables {
        command.env.push(c_string(format!("{name}={value}").into_bytes()).map_err(exec)?);
    }
    command.fds = passed.to_vec();
    command.fds.push((warm.report.as_fd(), REPORT_FD));
    Ok(command)
}

fn environment() -> Vec<Vec<u8>> {
    let join = |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    std::env::vars_os().map(join).collect()
}

fn c_string(bytes: Vec<u8>) -> Result<CString, Errno> {
    CString::new(bytes).map_err(|_| Errno::EINVAL)
}
