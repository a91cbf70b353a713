//! Simulates an older kernel for a program: a seccomp filter denies newer system calls.

use std::ffi::CString;
use std::io;

use libc::{sock_filter, sock_fprog};

use super::{Problem, Request};

/// Offsets of fields in `struct seccomp_data`: the system call number, and the lower halves of the first and the
/// fourth argument.
const NUMBER: u32 = 0;
const FIRST_ARGUMENT: u32 = 16;
const FOURTH_ARGUMENT: u32 = 16 + 3 * 8;

/// Opcodes of the BPF instructions used here: load a word from a fixed offset, jump if equal, and return.
const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// `old-kernel NAME[,NAME…] PROGRAM [ARGUMENT …]`: executes the program under a filter that denies the named system
/// calls. The name `group_signal` denies only calls to `pidfd_send_signal` with flags. The name `subreaper` denies only
/// the `prctl` calls for child subreapers, which qemu-user does not support either. Descendants of the program inherit
/// the filter.
pub(super) fn run(request: &mut Request) -> Result<std::convert::Infallible, Problem> {
    let filter = request.next()?.split(',').map(denial).collect::<Result<Vec<_>, _>>()?.concat();
    deny([filter, vec![statement(RETURN, libc::SECCOMP_RET_ALLOW)]].concat())?;
    let arguments = request.arguments.by_ref().map(CString::new).collect::<Result<Vec<_>, _>>()?;
    let program = arguments.first().ok_or("a program is missing")?;
    Ok(nix::unistd::execvp(program, &arguments)?)
}

fn denial(name: &str) -> Result<Vec<sock_filter>, Problem> {
    let call = match name {
        "close_range" => libc::SYS_close_range,
        "memfd" => libc::SYS_memfd_create,
        "pidfd_open" => libc::SYS_pidfd_open,
        "group_signal" => {
            return Ok(vec![
                statement(LOAD, NUMBER),
                jump_unless(number(libc::SYS_pidfd_send_signal)?, 3),
                statement(LOAD, FOURTH_ARGUMENT),
                jump_if(0, 1),
                fail(libc::EINVAL),
            ]);
        }
        "subreaper" => {
            return Ok(vec![
                statement(LOAD, NUMBER),
                jump_unless(number(libc::SYS_prctl)?, 4),
                statement(LOAD, FIRST_ARGUMENT),
                jump_if(libc::PR_SET_CHILD_SUBREAPER.cast_unsigned(), 1),
                jump_unless(libc::PR_GET_CHILD_SUBREAPER.cast_unsigned(), 1),
                fail(libc::EINVAL),
            ]);
        }
        other => return Err(format!("`{other}` cannot be denied").into()),
    };
    let load = statement(LOAD, NUMBER);
    Ok(vec![load, jump_unless(number(call)?, 1), fail(libc::ENOSYS)])
}

fn number(call: libc::c_long) -> Result<u32, Problem> {
    Ok(u32::try_from(call)?)
}

fn fail(errno: i32) -> sock_filter {
    statement(RETURN, libc::SECCOMP_RET_ERRNO | errno.cast_unsigned())
}

fn statement(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// Returns an instruction that skips `skip` instructions unless the loaded value is `k`.
fn jump_unless(k: u32, skip: u8) -> sock_filter {
    sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: skip, k }
}

/// Returns an instruction that skips `skip` instructions if the loaded value is `k`.
fn jump_if(k: u32, skip: u8) -> sock_filter {
    sock_filter { code: JUMP_IF_EQUAL, jt: skip, jf: 0, k }
}

fn deny(mut filter: Vec<sock_filter>) -> io::Result<()> {
    let program = sock_fprog { len: u16::try_from(filter.len()).expect("a few lines"), filter: filter.as_mut_ptr() };
    // SAFETY: the call takes only integers.
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the filter program and its instructions are valid during the call, which copies them.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if promised == 0 && set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
