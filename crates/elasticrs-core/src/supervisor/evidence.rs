//! Gathers evidence of what each worker of a group is doing when one of them hangs, does not release a timer in time,
//! or makes no progress with its exit. The evidence is gathered before any worker gets a signal to stop.
//!
//! The state, the wait channel and, if it is readable, the kernel stack of each thread come from `/proc`. The Python
//! stacks of a worker come from `faulthandler`: when the worker gets [`stack_signal`], `faulthandler` writes its stacks
//! to a file that the worker's hook has opened. The signal handler is written in C and does not need the GIL, so it
//! also works if the worker is blocked in a collective or never releases the GIL. If a worker does not write its
//! stacks, `py-spy` inspects it, provided that `py-spy` is installed.
//!
//! The flight record of torch comes from a thread of the worker, which `python/elasticrs/_engine/inside/flight.py` starts. The
//! thread is blocked while it opens a FIFO, until this module opens the other end. It then writes the record to a file,
//! which the agent reads. The thread needs the GIL, so a worker that never releases the GIL writes no record.
//!
//! - **EVI-1** a process gets the signal only if it has a handler for the signal, and if the file that the hook opened
//!   exists;
//! - **EVI-2** all ranks are examined in parallel, each on its own thread, and the caller gets the evidence by the
//!   deadline. If access to the files of a rank hangs, only the evidence about that rank is missing;
//! - **EVI-3** only regular files are opened, because a worker may have replaced its file with a FIFO, and opening a
//!   FIFO could block;
//! - **EVI-4** the traceback of a crash stays in the file, even if it is written while evidence is gathered;
//! - **EVI-5** if the evidence is no longer needed, the threads stop at once and kill `py-spy`;
//! - **EVI-6** a flight record is requested only after the stacks are complete, because `faulthandler` reads the frames
//!   of running threads without a lock. A record of an earlier request is removed first;
//! - **EVI-7** a worker that goes on, because only hung ones are replaced, gets no signal and is not paused by `py-spy`:
//!   the signal interrupts system calls, and has crashed busy workers. Its flight record contains its stack, too.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use elasticrs_nursery::tree::{Status, descendants, threads};
use elasticrs_sys::process;
use elasticrs_sys::procfs::{self, Stat, wait_channel};
use elasticrs_sys::spawn::die_with_thread;
use memchr::memmem;
use serde::Deserialize;

use super::exit_progress::{is_busy, sample, ticks_per_second};
use crate::timer::hang::{Activity, Collectives, activity};

/// Total time limit for gathering diagnostics, such as stack traces, about all ranks.
pub const LIMIT: Duration = Duration::from_secs(2);
/// Time limit within [`LIMIT`] for a worker to write its stacks and its flight record. `py-spy` gets the remaining time.
const ANSWERS: Duration = Duration::from_millis(1200);
/// Time without growth after which a stack file is considered complete.
const SETTLED: Duration = Duration::from_millis(40);
const PAUSE: Duration = Duration::from_millis(5);
/// Period over which a worker's CPU use and I/O are measured, to find out whether the worker is busy.
const WINDOW: Duration = Duration::from_millis(250);
/// Time limit for the workers to write their flight records, after a failure that another worker may have caused. The
/// running workers are stopped only after they have written their records or the limit has passed, because the records
/// are lost when the workers exit.
pub(crate) const RECORDS: Duration = Duration::from_millis(300);
/// Time limit for `py-spy` to exit after SIGKILL. Like the worker that it inspects, `py-spy` may hang in the kernel.
const REAPED: Duration = Duration::from_millis(100);
const MAX_THREADS: usize = 64;
const MAX_DESCENDANTS: usize = 64;
const MAX_STACKS: usize = 256 * 1024;
/// Maximum length of the first line of a flight record, in bytes. This line lists the members of all process groups of
/// torch.
const MAX_HEADER: u64 = 1024 * 1024;
/// Maximum number of bytes of the stack file that are searched for the traceback of a crash.
const MAX_ANSWER: u64 = 16 * 1024 * 1024;
/// Text with which `faulthandler` starts the traceback of a crash. Stacks requested with [`stack_signal`] do not
/// contain it.
const CRASH: &[u8] = b"Fatal Python error";

/// Returns the signal that makes a worker write its Python stacks. `python/elasticrs/_engine/inside/hook/sitecustomize.py`
/// uses the same number.
pub(crate) fn stack_signal() -> i32 {
    libc::SIGRTMIN() + 12
}

/// Paths of the files that contain the stack traces and the hang report of one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvidenceFiles {
    /// File that the worker's hook has opened for `faulthandler`.
    pub stacks: PathBuf,
    pub report: PathBuf,
}

impl EvidenceFiles {
    /// Returns the path of the worker's flight record. `python/elasticrs/_engine/inside/flight.py` uses the same name.
    fn flight_record(&self) -> PathBuf {
        self.stacks.with_extension("flight")
    }

    /// Returns the path of the FIFO through which a flight record is requested. `python/elasticrs/_engine/inside/flight.py`
    /// uses the same name.
    fn flight_requests(&self) -> PathBuf {
        self.stacks.with_extension("flight_requests")
    }
}

/// A worker to gather evidence about.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) local_rank: u32,
    pub(super) pid: i32,
    pub(super) files: Option<EvidenceFiles>,
    pub(super) title: String,
    /// True if the examination also measures whether the worker is busy. The measurement is skipped if the worker is in
    /// a collective.
    pub(super) measures_work: bool,
    /// True if the worker goes on afterwards. Then it gets no signal (**EVI-7**).
    pub(super) is_spared: bool,
}

/// Evidence about one worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WorkerEvidence {
    pub local_rank: u32,
    /// State of the process: a letter as in `/proc/PID/stat`, or a space if the state is unknown.
    pub state: char,
    /// Kernel function in which the process waits. Empty if the process is running or the function cannot be read.
    pub wait_channel: String,
    /// Innermost Python frame of the thread that handled the signal, usually the main thread. `None` if it is
    /// unknown.
    pub frame: Option<String>,
    /// Activity of the worker. `Unknown` if the activity was not measured.
    pub activity: Activity,
    /// Reason why the report could not be written. `None` if it was written.
    pub problem: Option<String>,
}

/// Deadline for gathering diagnostics, and a flag that stops the gathering early.
#[derive(Debug)]
pub(super) struct GatheringLimit {
    pub(super) deadline: Instant,
    /// True if the threads that gather diagnostics must stop, because their results are no longer needed (**EVI-5**).
    pub(super) is_cancelled: AtomicBool,
}

impl GatheringLimit {
    pub(super) fn until(deadline: Instant) -> Self {
        Self { deadline, is_cancelled: AtomicBool::new(false) }
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.deadline || self.is_cancelled.load(Ordering::Relaxed)
    }
}

/// Requests the flight record of a worker, and waits until the worker has written the record. Does not wait if the
/// worker cannot write a record.
///
/// If the worker is already exiting in the kernel, waits until the worker has been reaped. The exit of this worker may
/// have caused the failure, although the exit of another worker was noticed first.
pub(super) fn take_record(pid: i32, files: &EvidenceFiles, limit: &GatheringLimit) {
    let record = if remove_record(files) { request_record(files).ok() } else { None };
    let is_due = || record.as_ref().is_some_and(|record| record.symlink_metadata().is_err()) && can_answer(pid);
    let is_exiting = || Stat::of(pid).is_some_and(|stat| stat.is_ending());
    while (is_due() || is_exiting()) && !limit.is_over() {
        std::thread::sleep(PAUSE);
    }
}

/// Examines a worker until the time limit `limit`. Exceeds it only if a file system does not respond.
pub(super) fn gather(subject: Subject, py_spy: Option<&Path>, limit: &GatheringLimit) -> WorkerEvidence {
    let mut examination = Examination::begin(subject);
    let answers_until = Instant::now() + ANSWERS;
    while examination.waits() && Instant::now() < answers_until && !limit.is_over() {
        std::thread::sleep(PAUSE);
    }
    let (pid, measures_work, collectives) =
        (examination.subject.pid, examination.subject.measures_work, examination.collectives());
    let (mut found, spy) = examination.write(py_spy.filter(|_| !limit.is_over()));
    if measures_work {
        found.activity = activity(found.frame.as_deref(), collectives, || works(pid, limit));
    }
    if let Some(mut spy) = spy {
        while !limit.is_over() && matches!(spy.child.try_wait(), Ok(None)) {
            std::thread::sleep(PAUSE);
        }
        found.frame = spy.end();
    }
    found
}

/// Returns true if the worker and its descendants are busy: if they use a CPU, read or write. Blocks for [`WINDOW`],
/// but not longer than until `limit`.
fn works(pid: i32, limit: &GatheringLimit) -> bool {
    let (before, until) = (sample(pid), Instant::now() + WINDOW);
    while Instant::now() < until && !limit.is_over() {
        std::thread::sleep(PAUSE);
    }
    is_busy(&before, &sample(pid), ticks_per_second())
}

/// Diagnostics about one worker that are still being collected.
struct Examination {
    subject: Subject,
    /// Pid of the process whose stacks are collected: the worker or one of its descendants.
    target: i32,
    status: Option<Status>,
    kernel: String,
    answer: Option<StackFile>,
    record: Record,
}

/// State of the request for a worker's flight record.
enum Record {
    /// The flight record has not been requested yet. The request is sent once the stack traces are complete.
    Due,
    /// The flight record has been requested. The worker writes it to the file with this path.
    Requested(PathBuf),
    /// The worker has not imported torch, so it has no flight record.
    Unused,
    /// No flight record can be requested from the worker.
    Done,
}

/// First line of the file that contains a worker's flight record.
#[derive(Debug, Deserialize)]
struct RecordHeader {
    /// Reason why there is no record.
    no_record: Option<String>,
    /// True if a collective in the record is not complete.
    is_waiting: Option<bool>,
}

/// A stack file that `faulthandler` was asked to write to, and the offset at which the new stacks start.
struct StackFile {
    file: File,
    start: u64,
    length: u64,
    grew: Instant,
}

impl StackFile {
    fn is_whole(&mut self) -> bool {
        let length = self.file.metadata().map_or(self.length, |facts| facts.len());
        if length != self.length {
            (self.length, self.grew) = (length, Instant::now());
        }
        self.length > self.start && self.grew.elapsed() >= SETTLED
    }
}

impl Examination {
    fn begin(subject: Subject) -> Self {
        let asked = target_of(subject.pid);
        let target = asked.as_ref().map_or(subject.pid, |(pid, _)| *pid);
        // Read the state before sending the signal, because the signal changes the state.
        let (status, kernel) = (Status::of(subject.pid), kernel_side(target));
        let answer = asked.filter(|(pid, _)| !subject.is_spared && can_answer(*pid));
        let answer = answer.and_then(|(_, pidfd)| ask(&pidfd, &subject.files.as_ref()?.stacks).ok());
        let is_removed = subject.files.as_ref().is_some_and(remove_record);
        let record = if is_removed && can_answer(target) { Record::Due } else { Record::Done };
        Self { subject, target, status, kernel, answer, record }
    }

    /// Returns true if the worker is still writing its stacks or its flight record. Requests the record when the stacks
    /// are complete.
    fn waits(&mut self) -> bool {
        if self.answer.as_mut().is_some_and(|answer| !answer.is_whole()) {
            return true;
        }
        match &self.record {
            Record::Due => {
                self.record = match self.subject.files.as_ref().map(request_record) {
                    Some(Ok(path)) => Record::Requested(path),
                    Some(Err(error)) if is_missing(&error) => Record::Unused,
                    Some(Err(_)) | None => Record::Done,
                };
                matches!(self.record, Record::Requested(_))
            }
            Record::Requested(path) => path.symlink_metadata().is_err(),
            Record::Unused | Record::Done => false,
        }
    }

    fn collectives(&self) -> Collectives {
        match &self.record {
            Record::Requested(path) => read_collectives(path).unwrap_or_default(),
            Record::Unused => Collectives::Unused,
            Record::Due | Record::Done => Collectives::Unknown,
        }
    }

    fn write(mut self, py_spy: Option<&Path>) -> (WorkerEvidence, Option<Spy>) {
        let stacks = self.answer.take().and_then(|answer| self.read(answer).ok()).unwrap_or_default();
        let mut found = WorkerEvidence {
            local_rank: self.subject.local_rank,
            state: self.status.map_or(' ', |status| status.state),
            wait_channel: wait_channel(self.subject.pid),
            frame: innermost_frame(&stacks),
            activity: Activity::Unknown,
            problem: None,
        };
        let Some(files) = &self.subject.files else { return (found, None) };
        let py_spy = py_spy.filter(|_| !self.subject.is_spared);
        let written = open(OpenOptions::new().read(true).create(true).append(true), &files.report);
        let spy = written.and_then(|mut file| {
            // Discard an earlier report, because it is about a hang from which the worker recovered.
            file.set_len(0)?;
            file.write_all(self.text(&stacks, found.state).as_bytes())?;
            if !stacks.is_empty() || self.status.is_none() {
                return Ok(None);
            }
            // Use the non-blocking mode of `py-spy` for a stopped or traced process. Otherwise, `py-spy` would try to
            // pause the process, which fails if the process is already stopped.
            let is_held = matches!(found.state, 'T' | 't');
            py_spy.map(|program| Spy::begin(program, self.target, is_held, file)).transpose()
        });
        match spy {
            Ok(spy) => (found, spy),
            Err(error) => {
                found.problem = Some(format!("{}: {error}", files.report.display()));
                (found, None)
            }
        }
    }

    /// Reads the new stacks and removes them from the stack file. Leaves the file unchanged if it contains the
    /// traceback of a crash (**EVI-4**).
    fn read(&self, answer: StackFile) -> io::Result<String> {
        let start = answer.start;
        let (stacks, has_crash) = answer.read()?;
        if let Some(files) = self.subject.files.as_ref().filter(|_| !has_crash) {
            open(File::options().write(true), &files.stacks)?.set_len(start)?;
        }
        Ok(stacks)
    }

    fn text(&self, stacks: &str, state: char) -> String {
        let mut text = format!("{}\npid {}, state {state}\n", self.subject.title, self.subject.pid);
        if self.target != self.subject.pid {
            // Ignore the result here and below, because writing to a string cannot fail.
            let _ = writeln!(text, "the program below it: pid {}", self.target);
        }
        if self.subject.is_spared {
            text.push_str("\nno Python stacks: it goes on, so it was not interrupted\n");
        } else if stacks.is_empty() {
            text.push_str("\nno Python stacks: it has no handler for the signal, or did not respond\n");
        } else {
            let _ = write!(text, "\nPython stacks, the most recent call first\n\n{}\n", stacks.trim_end());
        }
        let _ = write!(text, "\nthreads in the kernel: state, name, wait channel, stack\n\n{}", self.kernel);
        text
    }
}

/// Returns the first process that has a handler for the signal, searching the worker and then its descendants.
fn target_of(pid: i32) -> Option<(i32, OwnedFd)> {
    let below = descendants(pid, &[]).map(|listed| listed.pid).take(MAX_DESCENDANTS);
    let open = |pid| process::open_pidfd(pid).ok().map(|pidfd| (pid, pidfd));
    // Open the pidfd before reading `/proc`. Otherwise, the pid could be reused by another process between the two
    // steps.
    std::iter::once(pid).chain(below).filter_map(open).find(|(pid, _)| has_handler(*pid))
}

/// Returns true if the process has a handler for [`stack_signal`] (**EVI-1**), according to the mask of caught signals
/// in `/proc/PID/status`.
fn has_handler(pid: i32) -> bool {
    let status = procfs::read(pid, "status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (stack_signal() - 1)) != 0
}

/// Opens a regular file without blocking, and fails for any other kind of file (**EVI-3**).
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

fn can_answer(pid: i32) -> bool {
    Status::of(pid).is_some_and(|status| !matches!(status.state, 'T' | 't') && !status.has_ended())
}

fn ask(pidfd: &OwnedFd, stacks: &Path) -> io::Result<StackFile> {
    let file = open(File::options().read(true), stacks)?;
    let start = file.metadata()?.len();
    process::send_signal(pidfd, stack_signal())?;
    Ok(StackFile { file, start, length: start, grew: Instant::now() })
}

/// Requests a worker's flight record, and returns the path of the file to which the worker will write it. Fails if no
/// thread of the worker is waiting for a request.
fn request_record(files: &EvidenceFiles) -> io::Result<PathBuf> {
    // Open the FIFO without blocking, so that the call fails if no thread of the worker is waiting at the other end.
    // Write no data, because the open alone wakes the thread.
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let requests = File::options().write(true).custom_flags(flags).open(files.flight_requests())?;
    if !requests.metadata()?.file_type().is_fifo() {
        return Err(io::Error::other("it is not a FIFO"));
    }
    Ok(files.flight_record())
}

/// Returns the state of the collectives in a flight record. `None` if the file cannot be read or is invalid.
fn read_collectives(record: &Path) -> Option<Collectives> {
    let mut line = String::new();
    BufReader::new(open(File::options().read(true), record).ok()?.take(MAX_HEADER)).read_line(&mut line).ok()?;
    let RecordHeader { no_record, is_waiting } = serde_json::from_str(&line).ok()?;
    match is_waiting? {
        _ if no_record.is_some() => None,
        true => Some(Collectives::Pending),
        false => Some(Collectives::Complete),
    }
}

/// Removes an old flight record, because it describes an earlier hang from which the worker has recovered (**EVI-6**).
/// Returns true if the file no longer exists.
fn remove_record(files: &EvidenceFiles) -> bool {
    fs::remove_file(files.flight_record()).map_or_else(|error| is_missing(&error), |()| true)
}

fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

impl StackFile {
    /// Returns the new stack traces, and true if they include the traceback of a crash. The worker may crash, because
    /// the signal that requests the stack traces can make system calls fail with `EINTR`.
    fn read(mut self) -> io::Result<(String, bool)> {
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(self.start))?;
        self.file.take(MAX_ANSWER).read_to_end(&mut bytes)?;
        let has_crash = memmem::find(&bytes, CRASH).is_some();
        bytes.truncate(MAX_STACKS);
        Ok((String::from_utf8_lossy(&bytes).into_owned(), has_crash))
    }
}

/// Returns the innermost frame of the thread that received the signal. If no thread is marked as the current one, uses
/// the last thread, which is the main thread.
fn innermost_frame(stacks: &str) -> Option<String> {
    let current = stacks.find("Current thread").or_else(|| stacks.rfind("Thread 0x"))?;
    let frame = stacks[current..].lines().skip(1).map(str::trim).find(|line| line.starts_with("File "))?;
    Some(frame.to_owned())
}

/// Returns one line for each thread of a process, followed by the kernel stack of the thread if it is readable.
fn kernel_side(pid: i32) -> String {
    let mut text = String::new();
    for thread in threads(pid).into_iter().flatten().take(MAX_THREADS) {
        let read = |name: &str| fs::read_to_string(thread.join(name)).unwrap_or_default();
        let state = Stat::in_folder(&thread).and_then(|stat| stat.field(3)).unwrap_or('?');
        let channel = Some(read("wchan")).filter(|name| !matches!(name.as_str(), "" | "0"));
        let (id, name) = (thread.file_name().unwrap_or_default(), read("comm"));
        let channel = channel.as_deref().unwrap_or("-");
        let _ = writeln!(text, "{} {state} {} {channel}", id.display(), name.trim_end());
        for frame in read("stack").lines() {
            let _ = writeln!(text, "    {}", frame.trim_start_matches("[<0>] "));
        }
    }
    text
}

/// A running `py-spy` process that inspects a worker.
struct Spy {
    child: Child,
    report: File,
    /// Offset in the report at which the output of `py-spy` starts.
    start: u64,
}

impl Spy {
    fn begin(program: &Path, pid: i32, is_held: bool, report: File) -> io::Result<Self> {
        let (output, errors, start) = (report.try_clone()?, report.try_clone()?, report.metadata()?.len());
        let mut command = Command::new(program);
        // Print full file names, as `faulthandler` does, because the frames of different ranks are compared with each
        // other.
        command.args(["dump", "--full-filenames", "--pid", &pid.to_string()]);
        command.args(is_held.then_some("--nonblocking")).stdin(Stdio::null()).stdout(output).stderr(errors);
        // Make `py-spy` die together with this thread, because no other thread would kill and reap it.
        let child = die_with_thread(&mut command).spawn()?;
        Ok(Self { child, report, start })
    }

    /// Kills `py-spy` and returns the innermost frame from its output. `None` if the output does not contain that frame
    /// yet. The output stays in the report file.
    fn end(mut self) -> Option<String> {
        reap(self.child);
        let mut bytes = Vec::new();
        self.report.seek(SeekFrom::Start(self.start)).ok()?;
        self.report.take(MAX_STACKS as u64).read_to_end(&mut bytes).ok()?;
        innermost_spied(&String::from_utf8_lossy(&bytes))
    }
}

/// Kills and reaps a child process. If the child hangs in the kernel, a background thread reaps it later.
fn reap(mut child: Child) {
    // Ignore the only possible error of `kill`, which means that the child has already been reaped.
    let _ = child.kill();
    let deadline = Instant::now() + REAPED;
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    // Ignore an error, because a child that is not reaped only remains a zombie until this process exits.
    let _ = std::thread::Builder::new().name("elasticrs-reap".to_owned()).spawn(move || child.wait());
}

/// Returns the innermost frame of the main thread from the output of `py-spy`, in the format of [`innermost_frame`]. If
/// no thread is marked as the main thread, uses the first one.
fn innermost_spied(output: &str) -> Option<String> {
    let lines: Vec<&str> = output.lines().collect();
    let is_thread = |line: &&str| line.starts_with("Thread ");
    let main = lines.iter().position(|line| is_thread(line) && line.ends_with("\"MainThread\""));
    let thread = main.or_else(|| lines.iter().position(is_thread))?;
    lines[thread + 1..].iter().map_while(|line| line.strip_prefix("    ")).find_map(|frame| {
        let (name, place) = frame.split_once(" (")?;
        let (file, line) = place.strip_suffix(')')?.rsplit_once(':')?;
        // Drop the name of the class, because `faulthandler` writes only the name of the function.
        let function = name.rsplit('.').next()?;
        Some(format!("File \"{file}\", line {line} in {function}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "Thread 0x00007f0000000001 (most recent call first):\n  File \"a.py\", line 3 in wait\n\n\
        Current thread 0x00007f0000000002 (most recent call first):\n  File \"b.py\", line 7 in all_reduce\n  \
        File \"b.py\", line 9 in <module>\n";

    #[test]
    fn the_innermost_frame_comes_from_the_current_thread_or_else_the_last() {
        assert_eq!(innermost_frame(DUMP).as_deref(), Some("File \"b.py\", line 7 in all_reduce"));
        let others = DUMP.replace("Current thread", "Thread");
        assert_eq!(innermost_frame(&others).as_deref(), Some("File \"b.py\", line 7 in all_reduce"));
        assert_eq!(innermost_frame(""), None);
    }

    #[test]
    fn the_innermost_frame_is_read_from_py_spy_output() {
        let output = "Process 7: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n\
            Thread 9 (idle): \"T 1 (x)\"\n    Condition.wait (/lib/threading.py:327)\n\
            Thread 7 (active): \"MainThread\"\n    Loader.<locals>.read (/data (old)/a:b.py:41)\n    <module> (/b.py:9)\n";
        let read = "File \"/data (old)/a:b.py\", line 41 in read";
        assert_eq!(innermost_spied(output).as_deref(), Some(read));
        // `py-spy` sometimes omits thread names and line numbers.
        let nameless = "Thread 0x7F00 (idle)\n    native (/a.so)\n    f (/a.py:1)\nThread 8 (idle)\n    g (/a.py:2)\n";
        assert_eq!(innermost_spied(nameless).as_deref(), Some("File \"/a.py\", line 1 in f"));
        for none in
            ["", "Thread 7 (idle)", "Thread 7 (idle)\n    f (", "Error: Permission Denied\n    0: not a frame\n"]
        {
            assert_eq!(innermost_spied(none), None, "{none}");
        }
    }

    fn subject(pid: i32, files: &EvidenceFiles) -> Subject {
        Subject {
            local_rank: 3,
            pid,
            files: Some(files.clone()),
            title: "rank 3 hangs".into(),
            measures_work: false,
            is_spared: false,
        }
    }

    fn own_pid() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn a_process_without_a_stack_dump_handler_gets_no_signal() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(!has_handler(pid));
        let folder = tempfile::tempdir().unwrap();
        let files = EvidenceFiles { stacks: folder.path().join("stacks"), report: folder.path().join("hang.txt") };
        File::create(&files.stacks).unwrap();
        fs::write(&files.report, "an earlier one\n").unwrap();
        let found = gather(subject(pid, &files), None, &GatheringLimit::until(Instant::now() + LIMIT));
        assert_eq!((found.local_rank, &found.frame, &found.problem), (3, &None, &None));
        assert!(child.try_wait().unwrap().is_none(), "it lives");
        let report = fs::read_to_string(&files.report).unwrap();
        assert!(report.starts_with("rank 3 hangs\npid "), "{report}");
        assert!(report.contains("no Python stacks") && report.contains(" cat "), "{report}");
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn a_worker_that_goes_on_gets_no_signal() {
        let program = format!("trap 'exit 7' {}; echo up; read line; exit 0", stack_signal());
        let mut command = Command::new("sh");
        command.args(["-c", &program]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut up = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut up).unwrap();
        let pid = child.id().cast_signed();
        assert!(has_handler(pid));
        let folder = tempfile::tempdir().unwrap();
        let files = EvidenceFiles { stacks: folder.path().join("stacks"), report: folder.path().join("hang.txt") };
        File::create(&files.stacks).unwrap();
        let spared = Subject { is_spared: true, ..subject(pid, &files) };
        let found = gather(spared, None, &GatheringLimit::until(Instant::now() + LIMIT));
        assert_eq!((found.frame, found.problem), (None, None));
        assert!(fs::read_to_string(&files.report).unwrap().contains("it was not interrupted"));
        drop(child.stdin.take());
        assert_eq!(child.wait().unwrap().code(), Some(0), "EVI-7");
    }

    #[test]
    fn evidence_files_that_are_fifos_or_symlinks_are_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (fifo, link) = (folder.path().join("fifo"), folder.path().join("link"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(folder.path().join("precious"), "precious").unwrap();
        std::os::unix::fs::symlink("precious", &link).unwrap();
        for report in [fifo.clone(), link] {
            let files = EvidenceFiles { stacks: fifo.clone(), report };
            let found = gather(subject(own_pid(), &files), None, &GatheringLimit::until(Instant::now() + LIMIT));
            assert!(found.problem.is_some(), "EVI-3");
            assert!(ask(&process::open_pidfd(1).unwrap(), &fifo).is_err());
        }
        assert_eq!(fs::read(folder.path().join("precious")).unwrap(), b"precious");
    }

    #[test]
    fn the_stacks_file_is_emptied_unless_it_contains_a_crash() {
        let folder = tempfile::tempdir().unwrap();
        let files = EvidenceFiles { stacks: folder.path().join("stacks"), report: folder.path().join("hang.txt") };
        for (crash, left) in [("", 0), ("Fatal Python error: Segmentation fault\n\n", DUMP.len() * 2 + 40)] {
            fs::write(&files.stacks, format!("{DUMP}{crash}{}", if crash.is_empty() { "" } else { DUMP })).unwrap();
            let file = File::open(&files.stacks).unwrap();
            let (target, kernel, subject) = (own_pid(), String::new(), subject(own_pid(), &files));
            let examination = Examination { subject, target, status: None, kernel, answer: None, record: Record::Done };
            let answer = StackFile { file, start: 0, length: 0, grew: Instant::now() };
            let stacks = examination.read(answer).unwrap();
            assert_eq!(innermost_frame(&stacks).as_deref(), Some("File \"b.py\", line 7 in all_reduce"));
            let kept = fs::read(examination.subject.files.unwrap().stacks).unwrap();
            assert_eq!((kept.len(), crash.is_empty()), (left, kept.is_empty()), "EVI-4");
        }
    }

    #[test]
    fn a_flight_record_is_requested_only_from_a_waiting_thread() {
        let folder = tempfile::tempdir().unwrap();
        let files =
            EvidenceFiles { stacks: folder.path().join("error.json.fault"), report: folder.path().join("hang.txt") };
        let (requests, record) = (folder.path().join("error.json.flight_requests"), files.flight_record());
        nix::unistd::mkfifo(&requests, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(&record, "an earlier one").unwrap();
        let examine = || gather(subject(own_pid(), &files), None, &GatheringLimit::until(Instant::now() + LIMIT));
        let begun = Instant::now();
        examine();
        assert!(begun.elapsed() < ANSWERS && !record.exists(), "no thread waits, and the earlier record is gone");
        let (fifo, partial, answered) = (requests.clone(), folder.path().join("partial"), record.clone());
        let worker = std::thread::spawn(move || {
            drop(File::open(fifo).unwrap());
            fs::write(&partial, "a record").unwrap();
            fs::rename(partial, answered).unwrap();
        });
        // Retry, because a request for the record fails if the thread has not called `open` on the FIFO yet.
        while !record.exists() {
            examine();
        }
        worker.join().unwrap();
        assert_eq!(fs::read_to_string(&record).unwrap(), "a record");
        fs::remove_file(&requests).unwrap();
        fs::write(&requests, "").unwrap();
        assert!(request_record(&files).is_err(), "it is no FIFO");
    }

    #[test]
    fn the_first_line_of_a_flight_record_says_whether_a_collective_is_pending() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("record");
        for (line, expected) in [
            ("{\"is_waiting\": true, \"groups\": {\"0\": [0, 1]}}\n{}", Some(Collectives::Pending)),
            ("{\"is_waiting\": false, \"groups\": {}}", Some(Collectives::Complete)),
            ("{\"no_record\": \"off\"}", None),
            ("{\"no_record\": \"off\", \"is_waiting\": false}", None),
            ("{\"is_waiting\": 1}", None),
            ("", None),
        ] {
            fs::write(&record, line).unwrap();
            assert_eq!(read_collectives(&record), expected, "{line}");
        }
        assert_eq!(read_collectives(&folder.path().join("missing")), None);
    }

    #[test]
    fn a_worker_that_burns_cpu_time_works_and_a_worker_that_waits_does_not() {
        let limit = GatheringLimit::until(Instant::now() + Duration::from_secs(20));
        for (program, expected) in [("while :; do :; done", true), ("read line", false)] {
            let mut child = Command::new("sh").args(["-c", program]).stdin(Stdio::piped()).spawn().unwrap();
            let pid = child.id().cast_signed();
            // Wait until the shell runs the program, because the shell also uses CPU time while it starts.
            while works(pid, &limit) != expected && !limit.is_over() {}
            assert_eq!(works(pid, &limit), expected, "{program}");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_failure_to_write_the_hang_report_is_reported() {
        let files = EvidenceFiles { stacks: "/nonexistent/a".into(), report: "/nonexistent/hang.txt".into() };
        let found = gather(subject(own_pid(), &files), None, &GatheringLimit::until(Instant::now() + LIMIT));
        assert!(found.problem.as_deref().is_some_and(|problem| problem.contains("/nonexistent/hang.txt")));
    }
}
