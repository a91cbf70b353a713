//! Stops this process with SIGSTOP, unless a SIGCONT has already arrived.
//!
//! A process that handles SIGTSTP may have work to do before it stops itself with SIGSTOP. A SIGCONT that arrives
//! during that work would have no effect, and the process would stop for good. To detect this case, the caller keeps a
//! blocked SIGTSTP pending, because every SIGCONT discards a pending SIGTSTP, even a blocked one. If SIGTSTP is no
//! longer pending after SIGSTOP was sent, then a SIGCONT has arrived earlier. A helper process makes this check,
//! because this process is stopped by then.

use std::ffi::{CString, c_int, c_long, c_void};
use std::ptr;

use nix::errno::Errno;

use super::spawn::run_in_helper;

/// Size of the buffer for `/proc/PID/status`. It is large enough for all lines up to the signal masks.
const STATUS: usize = 4096;

struct Shared {
    parent: c_int,
    status: CString,
    buffer: [u8; STATUS],
}

/// Stops this process and returns when the process is continued. The calling thread must block SIGTSTP, and a SIGTSTP
/// must be pending. If SIGCONT has arrived since SIGTSTP became pending, the process is continued immediately.
pub fn stop_unless_continued() -> nix::Result<()> {
    let parent = nix::unistd::getpid().as_raw();
    let status = CString::new(format!("/proc/{parent}/task/{}/status", nix::unistd::gettid()));
    let mut shared = Shared { parent, status: status.map_err(|_| Errno::EINVAL)?, buffer: [0; STATUS] };
    // This process stays stopped in this call until it is continued.
    run_in_helper(child_main, &mut shared).map(drop)
}

/// Blocks each of SIGTSTP and SIGCONT while the handler of the other signal runs. The handlers then run in the order in
/// which the signals arrive.
pub fn order_signals() -> nix::Result<()> {
    for (number, waits) in [(libc::SIGTSTP, libc::SIGCONT), (libc::SIGCONT, libc::SIGTSTP)] {
        // SAFETY: the struct consists of integers and an optional handler, for which zero is a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: each pointer is null or points to a live local variable. The handler is valid, because only the
        // signal mask of the installed handler is changed.
        Errno::result(unsafe { libc::sigaction(number, ptr::null(), &raw mut action) })?;
        // SAFETY: as above. The signal number is valid.
        Errno::result(unsafe { libc::sigaddset(&raw mut action.sa_mask, waits) })?;
        // SAFETY: as above.
        Errno::result(unsafe { libc::sigaction(number, &raw const action, ptr::null_mut()) })?;
    }
    Ok(())
}

/// Entry point of the child. Makes only raw system calls, as in [`super::spawn`].
extern "C" fn child_main(argument: *mut c_void) -> c_int {
    // SAFETY: the parent passes a pointer to its `Shared` and is suspended until the child has exited, so this is the
    // only reference.
    let shared = unsafe { &mut *argument.cast::<Shared>() };
    send(shared.parent, libc::SIGSTOP);
    if !is_pending(read(shared), libc::SIGTSTP) {
        send(shared.parent, libc::SIGCONT);
    }
    0
}

fn send(pid: c_int, number: c_int) {
    // SAFETY: the call takes only integers.
    unsafe { libc::syscall(libc::SYS_kill, pid, number) };
}

fn read(shared: &mut Shared) -> &[u8] {
    let Shared { status, buffer, .. } = shared;
    // Do not close the descriptor, because the kernel closes it when the child exits.
    // SAFETY: `status` is a live C string, and the other arguments are integers.
    let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, status.as_ptr(), libc::O_RDONLY) };
    // SAFETY: the kernel writes only into the buffer, whose length is passed.
    let count: c_long = unsafe { libc::syscall(libc::SYS_read, fd, buffer.as_mut_ptr(), buffer.len()) };
    // A negative count means that a call failed. Return no bytes in that case.
    buffer.get(..usize::try_from(count).unwrap_or(0)).unwrap_or_default()
}

/// Returns true if the signal is pending according to a thread's `status` file. If the content cannot be parsed, also
/// returns true, because the caller would otherwise continue a process that must stay stopped. Neither allocates nor
/// panics.
fn is_pending(status: &[u8], number: c_int) -> bool {
    const NAME: &[u8] = b"SigPnd:\t";
    let at = status.windows(NAME.len()).position(|window| window == NAME);
    let digits = at.and_then(|at| status.get(at + NAME.len()..)?.get(..16));
    let mask = digits.and_then(|digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
    mask.is_none_or(|mask| mask >> (number - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{SigSet, Signal, raise};

    use super::*;

    fn own_status() -> Vec<u8> {
        std::fs::read(format!("/proc/self/task/{}/status", nix::unistd::gettid())).unwrap()
    }

    #[test]
    fn pending_signals_are_read_from_the_status_file() {
        assert!(!is_pending(&own_status(), libc::SIGTSTP));
        let mut set = SigSet::empty();
        set.add(Signal::SIGTSTP);
        set.thread_block().unwrap();
        // `raise` sends the signal to this thread only.
        raise(Signal::SIGTSTP).unwrap();
        assert!(is_pending(&own_status(), libc::SIGTSTP));
        assert!(!is_pending(&own_status(), libc::SIGCONT));
        assert_eq!(set.wait(), Ok(Signal::SIGTSTP));
        assert!(!is_pending(&own_status(), libc::SIGTSTP));
    }

    #[test]
    fn an_unreadable_status_file_counts_as_a_pending_signal() {
        for status in [b"".as_slice(), b"SigPnd:\t", b"SigPnd:\t0000", b"SigPnd:\t00000000000000zz", b"\xff"] {
            assert!(is_pending(status, libc::SIGTSTP), "{status:?}");
        }
    }
}
