//! Resource limits of other processes.

use std::ptr;

use nix::errno::Errno;
use nix::sys::resource::Resource;

/// Returns the soft limit of a process. Fails with `EPERM` if the process belongs to another user and this
/// process lacks `CAP_SYS_RESOURCE`. A process can belong to another user because it executed a set-user-id
/// program.
pub fn soft(pid: i32, resource: Resource) -> nix::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: no new limit is passed, and the old limit is written to a live local variable.
    Errno::result(unsafe { libc::prlimit(pid, resource as _, ptr::null(), &raw mut limit) })?;
    Ok(limit.rlim_cur)
}
