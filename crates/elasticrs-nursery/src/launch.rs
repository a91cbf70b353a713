//! Starts nursery processes for the agent.

use std::ffi::{CStr, CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use elasticrs_sys::features::{UnsupportedKernel, check_floor};
use elasticrs_sys::signal::Signal;
pub use elasticrs_sys::spawn::Interrupt;
use elasticrs_sys::spawn::{self, Child, Command, Failure, Program, Stack};
use elasticrs_sys::stage::Stage;
use elasticrs_sys::{fds, process};
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::protocol::{AgentLink, FIXED_FDS};
use super::server::command;
use super::start::{Start, given_descriptor_limit};
use super::token::Token;
use super::{NAME, report};
use crate::spec::ProcessSpec;

/// Program that a nursery runs.
#[derive(Debug, Clone)]
pub enum NurseryImage {
    /// Run the workers' program as a warm nursery: it imports the modules that the workers need, becomes ready, and
    /// then forks the workers from itself.
    Warm(Arc<Warm>),
    /// Run an executable that is embedded in the extension module. The field is the content of the executable, which is
    /// run from memory.
    Embedded(&'static [u8]),
    /// Run the program at `path` with the agent's environment.
    ///
    /// The text form of a [`Start`] is appended to `args`. The program must pass the text to [`super::server::run`].
    Program {
        path: CString,
        /// Arguments of the program, starting with the program's own name.
        args: Vec<CString>,
    },
}

impl NurseryImage {
    /// Returns the path of the program. `None` if the program is run from memory.
    pub fn path(&self) -> Option<&CStr> {
        match self {
            Self::Warm(warm) => warm.process.argv.first().map(CString::as_c_str),
            Self::Embedded(_) => None,
            Self::Program { path, .. } => Some(path),
        }
    }
}

/// Program of a warm nursery. The program reads the text of a [`Start`] from `START_VARIABLE`, imports modules, and
/// then calls [`super::server::run_warm`] to fork workers.
#[derive(Debug)]
pub struct Warm {
    /// Arguments of the workers, and the part of the environment that all workers share.
    pub process: ProcessSpec,
    /// Signals that the workers ignore.
    pub ignored: Vec<Signal>,
    /// File for the import report. The nursery receives it as descriptor [`REPORT_FD`].
    pub report: OwnedFd,
    /// Time limit for the nursery's module imports.
    pub limit: Duration,
}

/// Name of the environment variable that contains the settings of a nursery process that imports modules. See
/// [`super::start::Start`].
const START_VARIABLE: &str = "ELASTICRS_NURSERY_START";
/// Name of the environment variable that contains the offset of the earlier import records in the report file. Set only
/// if an earlier nursery process died during its imports.
const SINCE_VARIABLE: &str = "ELASTICRS_WARM_SINCE";

/// Number of the descriptor to which a nursery process writes the report about its imports. It follows the numbers in
/// [`FIXED_FDS`].
pub const REPORT_FD: i32 = 6;

/// A started nursery. Its first reply is `Ready`, which it sends once it can serve requests.
#[derive(Debug)]
pub struct Launched {
    /// Pid of the nursery, which is a child of this process. The owner of this value must reap it once the pidfd is
    /// readable.
    pub pid: i32,
    pub pidfd: OwnedFd,
    /// Connection to the nursery. When it is closed, the nursery kills all of its descendants and exits.
    pub link: AgentLink,
    /// Non-blocking read end of the pipe on which the nursery reports the stages of a start. See [`stage_reached`].
    pub stages: OwnedFd,
    /// Token by which all descendants of the nursery can be recognised.
    pub token: Token,
    /// Imports that the nursery performs before it becomes ready. `None` if it imports nothing.
    pub warming: Option<Warming>,
    /// Process that guards this nursery process. It kills the job's processes if the agent dies while the nursery is
    /// importing modules or hangs while starting a worker.
    ///
    /// The owner of this value must stop and reap the guard process as well as the nursery process.
    pub sentinel: Option<Box<Launched>>,
}

impl Launched {
    /// Kills the nursery and its sentinel, because they are not needed. Blocks until both processes have exited.
    pub fn discard(self) {
        for Self { pid, pidfd, .. } in [Some(&self), self.sentinel.as_deref()].into_iter().flatten() {
            end(*pid, pidfd);
        }
    }
}

/// Module imports that a nursery process performs before it can fork workers.
#[derive(Debug)]
pub struct Warming {
    pub warm: Arc<Warm>,
    /// Offset in the report file at which the records of the imports start.
    ///
    /// If an import kills the nursery, its replacement uses the same offset, because it must read from the records
    /// which modules to skip.
    pub since: u64,
}

/// Returns the latest stage of starting a worker that the nursery has reported since the last call. Used in the message
/// about a worker whose start hangs.
pub fn stage_reached(stages: &OwnedFd) -> Option<Stage> {
    let mut reached = None;
    let mut bytes = [0; 4096];
    // Read until the pipe is empty (EAGAIN) or the nursery has exited (0 bytes).
    while let Ok(count @ 1..) = nix::unistd::read(stages, &mut bytes) {
        reached = Stage::from_byte(bytes[count - 1]);
    }
    reached
}

/// Reason why no nursery could be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    Unsupported(#[from] UnsupportedKernel),
    /// None of the nursery programs could be executed. Contains the error of the last attempt.
    #[error("could not start the nursery: could not {stage}: {}", .stage.reason(*.errno))]
    Start { stage: Stage, errno: Errno },
    #[error("could not prepare the nursery: {0}")]
    Prepare(#[from] io::Error),
    /// The program of the nursery was not executed in time, probably because its file system does not respond.
    #[error(
        "could not start the nursery: {} was not executed within {limit:?}; its file system may not respond",
        program.to_string_lossy()
    )]
    Hung { program: CString, limit: Duration },
}

impl From<Errno> for LaunchError {
    fn from(errno: Errno) -> Self {
        Self::Prepare(errno.into())
    }
}

/// Starts a nursery from the first of these images that can be executed.
///
/// Safe to call in a multithreaded process. The nursery does not depend on the calling thread, because it watches the
/// whole process. However, the kernel kills a warm nursery if the calling thread exits before the nursery is ready. The
/// nursery and its workers inherit descriptors 0 to 2, the working directory, the resource limits and the umask of this
/// process. If [`raise_descriptor_limit`](super::start::raise_descriptor_limit) has raised the soft limit on file
/// descriptors, the nursery and its workers get the previous limit. The images are tried in order, because some systems
/// do not allow the embedded image to be executed (`vm.memfd_noexec`, security modules).
///
/// `since` is an offset in the report file of a warm nursery. The records of earlier nurseries that died during these
/// imports start at this offset. The new nursery does not import the modules that killed them. `None` if no nursery has
/// died during these imports. See [`Warming::since`].
///
/// Blocks until a program has been executed, so it can block forever on a dead network file system. [`Interrupt::set`]
/// makes the call fail and kills the new processes.
pub fn launch(images: &[NurseryImage], since: Option<u64>, interrupt: &Interrupt) -> Result<Launched, LaunchError> {
    check_floor()?;
    let start = Start { token: Token::random()?, descriptors: given_descriptor_limit(), is_sentinel: false };
    launch_as(images, since, start, interrupt)
}

/// Starts the process that guards a nursery. `token` identifies the descendants of the nursery. Can block forever, see
/// [`launch`].
pub fn launch_sentinel(images: &[NurseryImage], token: Token, interrupt: &Interrupt) -> Result<Launched, LaunchError> {
    launch_as(images, None, Start { token, descriptors: None, is_sentinel: true }, interrupt)
}

fn launch_as(
    images: &[NurseryImage],
    since: Option<u64>,
    start: Start,
    interrupt: &Interrupt,
) -> Result<Launched, LaunchError> {
    let token = start.token;
    let (ours, theirs) = UnixStream::pair()?;
    let link = AgentLink::new(ours)?;
    let (stages, stages_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    let agent = process::open_pidfd(nix::unistd::getpid().as_raw())?;
    let [socket_number, agent_number, stages_number] = FIXED_FDS;
    let passed = [(theirs.as_fd(), socket_number), (agent.as_fd(), agent_number), (stages_end.as_fd(), stages_number)];
    let text = start.to_string();
    let mut stack = Stack::new()?;
    let mut failure = Failure::at(Stage::Exec)(Errno::ENOENT);
    for image in images {
        let memory_file;
        let (program, argv, env) = match image {
            NurseryImage::Warm(_) if start.is_sentinel => continue,
            NurseryImage::Warm(warm) => {
                let sentinel = Box::new(launch_sentinel(images, token, interrupt)?);
                let variables =
                    [Some((START_VARIABLE, text.clone())), since.map(|since| (SINCE_VARIABLE, since.to_string()))];
                let since = since.unwrap_or_else(|| report::length(&warm.report));
                let command = warm_command(warm, variables.into_iter().flatten(), &passed);
                let command = command.map(|command| Command { interrupt: Some(interrupt), ..command });
                match command.and_then(|command| spawn_unless(interrupt, &command, &mut stack)) {
                    Ok(Child { pid, pidfd }) => {
                        let warming = Some(Warming { warm: Arc::clone(warm), since });
                        return Ok(Launched { pid, pidfd, link, stages, token, warming, sentinel: Some(sentinel) });
                    }
                    Err(error) => failure = error,
                }
                sentinel.discard();
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
                (Program::File(memory_file.as_fd()), vec![NAME.to_owned()], Vec::new())
            }
            NurseryImage::Program { path, args } => (Program::Paths(vec![path.clone()]), args.clone(), environment()?),
        };
        let command = Command {
            program,
            argv: argv.into_iter().chain([c_string(text.clone())?]).collect(),
            env,
            cwd: None,
            stdio: [None, None, None],
            fds: passed.to_vec(),
            ignored: Vec::new(),
            dies_with_parent: false,
            keeps_orphans: false,
            cpus: None,
            oom_score_adj: None,
            stages: None,
            interrupt: Some(interrupt),
        };
        match spawn_unless(interrupt, &command, &mut stack) {
            Ok(Child { pid, pidfd }) => {
                return Ok(Launched { pid, pidfd, link, stages, token, warming: None, sentinel: None });
            }
            Err(error) => failure = error,
        }
    }
    Err(LaunchError::Start { stage: failure.stage, errno: failure.errno })
}

/// Same as [`spawn::spawn`], but kills the child and fails with `ECANCELED` if `interrupt` is set.
fn spawn_unless(interrupt: &Interrupt, command: &Command<'_>, stack: &mut Stack) -> Result<Child, Failure> {
    let Child { pid, pidfd } = spawn::spawn(command, stack)?;
    if interrupt.is_set() {
        end(pid, &pidfd);
        return Err(Failure::at(Stage::Exec)(Errno::ECANCELED));
    }
    Ok(Child { pid, pidfd })
}

/// Kills and reaps a child.
fn end(pid: i32, pidfd: &OwnedFd) {
    // Ignore the only possible error, ESRCH. It means that the child has already exited.
    let _ = process::send_signal(pidfd, libc::SIGKILL);
    process::reap(pid);
}

fn warm_command<'fd>(
    warm: &'fd Warm,
    variables: impl Iterator<Item = (&'static str, String)>,
    passed: &[(BorrowedFd<'fd>, i32)],
) -> Result<Command<'fd>, Failure> {
    let ignored: Vec<i32> = warm.ignored.iter().map(|signal| signal.number()).collect();
    let mut command = command(&warm.process, &ignored, &[])?;
    for (name, value) in variables {
        command.env.push(c_string(format!("{name}={value}")).map_err(Failure::at(Stage::Exec))?);
    }
    command.fds = passed.to_vec();
    command.fds.push((warm.report.as_fd(), REPORT_FD));
    Ok(command)
}

fn environment() -> Result<Vec<CString>, Errno> {
    let join = |(name, value): (OsString, OsString)| c_string([name.as_bytes(), b"=", value.as_bytes()].concat());
    std::env::vars_os().map(join).collect()
}

fn c_string(bytes: impl Into<Vec<u8>>) -> Result<CString, Errno> {
    CString::new(bytes).map_err(|_| Errno::EINVAL)
}
