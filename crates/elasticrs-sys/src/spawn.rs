//! Creates processes with `clone(CLONE_VM | CLONE_VFORK | CLONE_PIDFD)` and exec (Linux 5.2).
//!
//! The child shares the memory of its parent, whose calling thread is suspended until the child has executed its
//! program or exited. Nothing is copied, so the cost does not depend on the size of the parent. The child reports an
//! error by storing it in the shared memory.
//!
//! Because of the shared memory, these rules apply:
//!
//! 1. All data that the child needs (strings, tables, candidate paths) is built before the clone.
//! 2. The child makes only raw system calls. It does not allocate, lock, or use libc state other than `errno` of the
//!    suspended thread.
//! 3. All signals are blocked around the clone, so that no signal handler of the parent can run in the child.
//! 4. The child runs on its own stack.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid};

use super::process::{self, Waited};
use super::stage::Stage;

const STACK: usize = 256 * 1024;
const GUARD: usize = 64 * 1024;
const SIGNALS: c_int = 64;

/// Flags with which the child opens the files for its standard output and standard error.
const OUTPUT: c_int = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;

/// Program that the child executes.
#[derive(Debug)]
pub enum Program<'fd> {
    /// Execute the first of these paths that is executable, following the rules of `execvpe`.
    Paths(Vec<CString>),
    /// Execute an open file (`execveat` with an empty path, Linux 3.19).
    File(BorrowedFd<'fd>),
}

/// Description of a child process to start.
#[derive(Debug)]
pub struct Command<'fd> {
    pub program: Program<'fd>,
    /// Arguments, including the program's name.
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    /// Working directory of the child. Relative [`Program::Paths`] are resolved in this directory. `None` for the
    /// parent's working directory.
    pub cwd: Option<CString>,
    /// Paths of the files for the child's standard streams, relative to the parent's working directory. Standard input
    /// is opened for reading, the other two for appending. If a path is `None`, the child uses the parent's stream.
    pub stdio: [Option<CString>; 3],
    /// Descriptors to pass to the child, each with its number in the child. The child's program inherits no other
    /// descriptor above 2.
    pub fds: Vec<(BorrowedFd<'fd>, RawFd)>,
    /// Signals that the child ignores. All other signals are reset to their default action, and no signal is blocked.
    pub ignored: Vec<i32>,
    /// True to kill the child with SIGKILL when the thread that creates it exits.
    pub dies_with_parent: bool,
    /// True to make the child a child subreaper.
    pub keeps_orphans: bool,
    /// Mask of the CPUs that the child may run on, in the format of `sched_setaffinity`. `None` for the same CPUs as
    /// the parent.
    pub cpus: Option<&'fd [u8]>,
    /// Value for the child's `oom_score_adj`, or `None` to leave it unchanged. A failure to set it is ignored.
    pub oom_score_adj: Option<CString>,
    /// Pipe for progress reports. Before each stage that can block forever, the number of the [`Stage`] is written to
    /// the pipe as one byte.
    pub stages: Option<BorrowedFd<'fd>>,
    /// Handle with which another thread can abort a blocked call of [`spawn`].
    pub interrupt: Option<&'fd Interrupt>,
}

/// Aborts blocked calls of [`spawn`] from another thread, by killing a child that has not executed its program yet.
#[derive(Debug)]
pub struct Interrupt {
    is_set: AtomicBool,
    /// Pidfd of the child that has not executed its program yet, or -1 if there is no such child.
    child: AtomicI32,
    /// Locked while [`Interrupt::set`] uses the descriptor `child`, and while [`spawn`] resets `child` to -1.
    using: Mutex<()>,
}

impl Default for Interrupt {
    fn default() -> Self {
        Self { is_set: AtomicBool::new(false), child: AtomicI32::new(-1), using: Mutex::default() }
    }
}

impl Interrupt {
    /// Kills the child that has not executed its program yet, if there is one. All later calls of [`spawn`] with this
    /// handle fail with `ECANCELED`. A child that has already executed its program keeps running.
    pub fn set(&self) {
        let _using = self.using.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_set.store(true, Ordering::SeqCst);
        let child = self.child.load(Ordering::SeqCst);
        if child >= 0 {
            // SAFETY: `spawn` keeps the descriptor open until it has locked `using` and removed the number.
            let child = unsafe { BorrowedFd::borrow_raw(child) };
            // Ignore the only possible error, ESRCH. It means that the child has already exited.
            let _ = process::send_signal(child, libc::SIGKILL);
        }
    }

    /// Returns true if [`Self::set`] has been called.
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Registers a child that is about to execute its program. Returns false if the child has to exit instead, because
    /// the handle is set. The descriptor is stored before `is_set` is checked, because [`Self::set`] could otherwise
    /// miss the child.
    fn begin(&self, child: c_int) -> bool {
        self.child.store(child, Ordering::SeqCst);
        !self.is_set()
    }

    fn end(&self) {
        let _using = self.using.lock().unwrap_or_else(PoisonError::into_inner);
        self.child.store(-1, Ordering::SeqCst);
    }
}

/// A running child, which leads its own session and process group.
#[derive(Debug)]
pub struct Child {
    pub pid: i32,
    /// Close-on-exec pidfd of the child.
    pub pidfd: OwnedFd,
}

/// Reason why a child could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    pub stage: Stage,
    pub errno: Errno,
    /// Number of the standard descriptor whose file could not be opened. Only used with [`Stage::OpenLog`].
    pub descriptor: usize,
}

impl Failure {
    /// Returns a function that turns an error number into the failure of this stage of starting a child.
    pub fn at(stage: Stage) -> impl Fn(Errno) -> Self {
        move |errno| Self { stage, errno, descriptor: 0 }
    }
}

/// Stack on which a child runs until it executes its program. It can be reused for the next child.
#[derive(Debug)]
pub struct Stack {
    base: NonNull<c_void>,
}

impl Stack {
    /// Maps a stack of 256 KiB, with a guard area below it.
    pub fn new() -> nix::Result<Self> {
        const LENGTH: NonZeroUsize = NonZeroUsize::new(GUARD + STACK).expect("a constant above zero");
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_STACK | MapFlags::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address, so the new mapping does not replace another one.
        let base = unsafe { mmap_anonymous(None, LENGTH, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) }?;
        let stack = Self { base };
        // SAFETY: the range lies within the mapping that was just made.
        unsafe { mprotect(base, GUARD, ProtFlags::PROT_NONE) }?;
        Ok(stack)
    }

    pub(super) fn top(&self) -> *mut c_void {
        // SAFETY: the address is one past the end of the mapping. It is aligned, because both lengths are multiples of
        // the page size.
        unsafe { self.base.as_ptr().byte_add(GUARD + STACK) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // The only possible error is EINVAL, for an invalid address.
        // SAFETY: `new` created the mapping, and no child uses it, because `spawn` borrows the stack until the child
        // has executed its program.
        let _ = unsafe { munmap(self.base, GUARD + STACK) };
    }
}

/// Data that parent and child share. All pointers point to memory of the parent, whose calling thread is
/// suspended while the child uses them.
struct Shared<'a> {
    command: &'a Command<'a>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    parent: c_int,
    /// Lowest descriptor number above all targets. Sources are first duplicated to this number or above, so that no
    /// target overwrites a source.
    floor: RawFd,
    moved: Vec<RawFd>,
    stages: RawFd,
    file: RawFd,
    /// Pidfd of the child. The kernel stores it here before the child runs.
    pidfd: c_int,
    failure: Option<Failure>,
}

impl<'a> Shared<'a> {
    fn new(command: &'a Command<'a>, parent: c_int) -> Self {
        Self {
            command,
            argv: pointers(&command.argv),
            env: pointers(&command.env),
            parent,
            floor: command.fds.iter().map(|&(_, target)| target).fold(2, RawFd::max).saturating_add(1),
            moved: vec![-1; command.fds.len()],
            stages: -1,
            file: -1,
            pidfd: -1,
            failure: None,
        }
    }
}

/// Starts a child in its own session. Returns when the child has executed its program or has failed.
///
/// This function can block forever on a dead network file system, because the child opens log files, changes its
/// directory and executes a program. [`Interrupt::set`] aborts a blocked call. The blocked thread can also be killed.
pub fn spawn(command: &Command<'_>, stack: &mut Stack) -> Result<Child, Failure> {
    let mut shared = Shared::new(command, nix::unistd::getpid().as_raw());
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let before = set_signal_mask(u64::MAX);
    // SAFETY: the stack is a live mapping that no other code uses. `shared` outlives the call, and the child uses it
    // only while this thread is suspended in `clone` (CLONE_VFORK). The kernel stores the pidfd before the child runs.
    let pid = unsafe {
        let argument = &raw mut shared;
        let pidfd = &raw mut (*argument).pidfd;
        Errno::result(libc::clone(child_main, stack.top(), flags, argument.cast::<c_void>(), pidfd))
    };
    set_signal_mask(before);
    if let Some(interrupt) = command.interrupt {
        interrupt.end();
    }
    let pid = pid.map_err(Failure::at(Stage::Clone))?;
    // SAFETY: the kernel has created the descriptor for this call, and no other code owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(shared.pidfd) };
    match shared.failure {
        None => Ok(Child { pid, pidfd }),
        Some(failure) => {
            process::reap(pid);
            Err(failure)
        }
    }
}

/// Runs `entry` with a pointer to `shared` in a helper process that shares the memory of this one. Returns when the
/// helper has exited. The helper has its own signal handlers, and blocks all signals until it unblocks some of them. It
/// has no exit signal, so that no other code in this process notices its exit or reaps it.
pub(super) fn run_in_helper<T>(entry: extern "C" fn(*mut c_void) -> c_int, shared: &mut T) -> nix::Result<Waited> {
    let stack = Stack::new()?;
    let before = set_signal_mask(u64::MAX);
    // SAFETY: the stack is a live mapping that no other code uses. `shared` outlives the call, and the child uses it
    // only while this thread is suspended in `clone` (CLONE_VFORK).
    let pid = Errno::result(unsafe {
        libc::clone(entry, stack.top(), libc::CLONE_VM | libc::CLONE_VFORK, ptr::from_mut(shared).cast())
    });
    set_signal_mask(before);
    Ok(process::reap(pid?))
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// Sets the signal mask of this thread, including the signals that libc reserves for itself. Returns the previous mask.
pub(super) fn set_signal_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: the kernel reads 8 bytes from one live local variable and writes 8 bytes to another.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut before, size_of::<u64>());
    }
    before
}

extern "C" fn child_main(argument: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes a pointer to its `Shared` and is suspended until the child has finished with it, so this
    // is the only reference.
    let shared = unsafe { &mut *argument.cast::<Shared<'_>>() };
    if shared.command.interrupt.is_some_and(|interrupt| !interrupt.begin(shared.pidfd)) {
        shared.failure = Some(Failure::at(Stage::Exec)(Errno::ECANCELED));
        return 127;
    }
    if let Err(failure) = run(shared) {
        shared.failure = Some(failure);
    }
    127
}

/// Sets up the child and executes its program. Returns only on failure.
fn run(shared: &mut Shared<'_>) -> Result<(), Failure> {
    prepare(shared, |_| {
        // `CLOSE_RANGE_CLOEXEC` requires Linux 5.11. On older kernels, these descriptors are closed anyway, because the
        // parent opens all its descriptors with close-on-exec.
        raw::close_on_exec_from(3);
    })?;
    for signal in 1..=SIGNALS {
        raw::set_disposition(signal, shared.command.ignored.contains(&signal));
    }
    set_signal_mask(0);
    raw::announce(shared.stages, Stage::Exec);
    Err(Failure::at(Stage::Exec)(execute(shared)))
}

/// Sets up a forked child in the same way as a child that is about to execute a program, but keeps the signal handlers
/// and other open descriptors.
pub(super) fn settle(command: &Command<'_>, parent: i32) -> Result<(), Failure> {
    let mut shared = Shared::new(command, parent);
    prepare(&mut shared, |_| {})?;
    for &fd in shared.moved.iter().chain([&shared.stages]).filter(|&&fd| fd >= 0) {
        raw::close(fd);
    }
    set_signal_mask(0);
    Ok(())
}

/// Makes the kernel kill the child when this process dies or the thread that starts the child exits. Unblocks all
/// signals in the child.
pub fn die_with_thread(command: &mut std::process::Command) -> &mut std::process::Command {
    let parent = getpid();
    let arm = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        SigSet::empty().thread_set_mask()?;
        // Fail if the parent has already died, because the kernel would then never send the signal.
        if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
    };
    // SAFETY: before exec, the child makes only three system calls and does not allocate.
    unsafe { command.pre_exec(arm) }
}

fn prepare(shared: &mut Shared<'_>, close_others: impl FnOnce(&Shared<'_>)) -> Result<(), Failure> {
    let command = shared.command;
    raw::setsid().map_err(Failure::at(Stage::NewSession))?;
    if command.dies_with_parent {
        raw::die_with_parent(shared.parent).map_err(Failure::at(Stage::ParentDeathSignal))?;
    }
    if command.keeps_orphans {
        raw::keep_orphans().map_err(Failure::at(Stage::NewSession))?;
    }
    if let Some(mask) = command.cpus {
        raw::set_affinity(mask).map_err(Failure::at(Stage::Affinity))?;
    }
    if let Some(value) = &command.oom_score_adj {
        raw::write_file(c"/proc/self/oom_score_adj", value);
    }
    move_descriptors(shared).map_err(Failure::at(Stage::Descriptors))?;
    close_others(shared);
    open_standard(shared)?;
    for (&(_, target), &source) in command.fds.iter().zip(&shared.moved) {
        raw::dup_to(source, target).map_err(Failure::at(Stage::Descriptors))?;
    }
    if let Some(directory) = &command.cwd {
        raw::announce(shared.stages, Stage::ChangeDir);
        raw::chdir(directory).map_err(Failure::at(Stage::ChangeDir))?;
    }
    Ok(())
}

/// Duplicates the child's descriptors. The duplicates have numbers above all target numbers, because a later `dup3` to
/// a target number could otherwise close one of them.
fn move_descriptors(shared: &mut Shared<'_>) -> Result<(), Errno> {
    for (moved, (source, _)) in shared.moved.iter_mut().zip(&shared.command.fds) {
        *moved = raw::dup_above(source.as_raw_fd(), shared.floor)?;
    }
    if let Some(stages) = shared.command.stages {
        shared.stages = raw::dup_above(stages.as_raw_fd(), shared.floor)?;
    }
    if let Program::File(file) = &shared.command.program {
        shared.file = raw::dup_above(file.as_raw_fd(), shared.floor)?;
    }
    Ok(())
}

fn open_standard(shared: &Shared<'_>) -> Result<(), Failure> {
    for (descriptor, path) in (0..).zip(&shared.command.stdio) {
        let Some(path) = path else { continue };
        raw::announce(shared.stages, Stage::OpenLog);
        let flags = if descriptor == 0 { libc::O_RDONLY } else { OUTPUT };
        raw::open_as(path, flags, descriptor).map_err(|errno| Failure {
            stage: Stage::OpenLog,
            errno,
            descriptor: descriptor.cast_unsigned() as usize,
        })?;
    }
    Ok(())
}

/// Executes the program. If a path fails, for example because the file is missing or not executable, tries the
/// next path. Returns the error if no path works.
fn execute(shared: &Shared<'_>) -> Errno {
    let paths = match &shared.command.program {
        Program::File(_) => return raw::exec_file(shared.file, &shared.argv, &shared.env),
        Program::Paths(paths) => paths,
    };
    let mut denied = false;
    let mut last = Errno::ENOENT;
    for path in paths {
        last = raw::exec(path, &shared.argv, &shared.env);
        match last {
            Errno::EACCES => denied = true,
            Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE | Errno::ENODEV | Errno::ETIMEDOUT => {}
            _ => return last,
        }
    }
    if denied { Errno::EACCES } else { last }
}

/// Raw system calls for the child.
mod raw {
    use super::{CStr, Errno, RawFd, Stage, c_char, c_int, c_long};

    /// The kernel's `struct sigaction`. Only its first word, the handler, is ever nonzero here.
    #[repr(C)]
    struct Disposition {
        handler: usize,
        rest: [usize; 3],
    }

    fn check(result: c_long) -> Result<c_int, Errno> {
        // The result fits into an int, because it is a descriptor, a pid or zero.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        Errno::result(result).map(|value| value as c_int)
    }

    pub(super) fn setsid() -> Result<(), Errno> {
        // SAFETY: the call takes no arguments and accesses no memory.
        check(unsafe { libc::syscall(libc::SYS_setsid) }).map(drop)
    }

    pub(super) fn die_with_parent(parent: c_int) -> Result<(), Errno> {
        // SAFETY: the call takes only integers.
        check(unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) })?;
        // Fail if the parent has already died, because the kernel would then never send the signal.
        // SAFETY: the call takes no arguments and accesses no memory.
        let now = check(unsafe { libc::syscall(libc::SYS_getppid) })?;
        if now == parent { Ok(()) } else { Err(Errno::ESRCH) }
    }

    pub(super) fn keep_orphans() -> Result<(), Errno> {
        // SAFETY: the call takes only integers.
        check(unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
    }

    pub(super) fn set_affinity(mask: &[u8]) -> Result<(), Errno> {
        // SAFETY: the kernel reads only the mask, whose length is passed.
        check(unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, mask.len(), mask.as_ptr()) }).map(drop)
    }

    /// Writes `value` to a file and ignores errors. Used for optional settings.
    pub(super) fn write_file(path: &CStr, value: &CStr) {
        let value = value.to_bytes();
        // SAFETY: `path` and `value` are live strings, and the length of `value` is passed.
        unsafe {
            let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if fd >= 0 {
                libc::syscall(libc::SYS_write, fd, value.as_ptr(), value.len());
                libc::syscall(libc::SYS_close, fd);
            }
        }
    }

    pub(super) fn dup_above(source: RawFd, floor: RawFd) -> Result<RawFd, Errno> {
        // SAFETY: the call takes only integers, and the child has its own copy of the descriptor table.
        check(unsafe { libc::syscall(libc::SYS_fcntl, source, libc::F_DUPFD_CLOEXEC, floor) })
    }

    pub(super) fn close_on_exec_from(first: RawFd) {
        // SAFETY: the call takes only integers, and closes no descriptor before the exec.
        unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    }

    /// Duplicates `source` to `target`. The two numbers differ, because `source` was moved above all targets. The
    /// duplicate stays open across the exec.
    pub(super) fn dup_to(source: RawFd, target: RawFd) -> Result<(), Errno> {
        // SAFETY: the call takes only integers.
        check(unsafe { libc::syscall(libc::SYS_dup3, source, target, 0) }).map(drop)
    }

    pub(super) fn open_as(path: &CStr, flags: c_int, target: RawFd) -> Result<(), Errno> {
        let flags = flags | libc::O_CLOEXEC | libc::O_NOCTTY;
        // SAFETY: `path` is a live string, and the other arguments are integers.
        let fd = check(unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o644) })?;
        if fd == target {
            // The number `target` was free, so `open` has already used it. Only clear close-on-exec.
            // SAFETY: the call takes only integers.
            return check(unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_SETFD, 0) }).map(drop);
        }
        dup_to(fd, target)?;
        close(fd);
        Ok(())
    }

    pub(super) fn close(fd: RawFd) {
        // SAFETY: the call takes only integers. The caller has created the descriptor or owns it.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }

    pub(super) fn announce(pipe: RawFd, stage: Stage) {
        if pipe >= 0 {
            let byte = stage as u8;
            // Ignore errors, because the child must start even if the pipe is full or closed.
            // SAFETY: the call reads one byte of a live local variable.
            unsafe { libc::syscall(libc::SYS_write, pipe, &raw const byte, 1) };
        }
    }

    pub(super) fn chdir(path: &CStr) -> Result<(), Errno> {
        // SAFETY: `path` is a live string.
        check(unsafe { libc::syscall(libc::SYS_chdir, path.as_ptr()) }).map(drop)
    }

    pub(super) fn set_disposition(signal: c_int, ignore: bool) {
        let new = Disposition { handler: if ignore { libc::SIG_IGN } else { libc::SIG_DFL }, rest: [0; 3] };
        let none = std::ptr::null_mut::<Disposition>();
        // Ignore errors, because the kernel returns EINVAL for SIGKILL and SIGSTOP.
        // SAFETY: `new` has the size of the kernel's struct. The child has its own handler table, so the parent's
        // handlers stay unchanged.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &raw const new, none, size_of::<u64>()) };
    }

    pub(super) fn exec(path: &CStr, argv: &[*const c_char], env: &[*const c_char]) -> Errno {
        // SAFETY: `path` is a live string, and the two tables are null-terminated and contain live strings.
        unsafe { libc::syscall(libc::SYS_execve, path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
        Errno::last()
    }

    pub(super) fn exec_file(file: RawFd, argv: &[*const c_char], env: &[*const c_char]) -> Errno {
        // SAFETY: as in `exec`, but with an empty path.
        unsafe {
            libc::syscall(libc::SYS_execveat, file, c"".as_ptr(), argv.as_ptr(), env.as_ptr(), libc::AT_EMPTY_PATH)
        };
        Errno::last()
    }
}
