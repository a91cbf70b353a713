//! Limits of other processes.

use std::ptr;

use nix::errno::Errno;
use nix::sys::resource::Resource;

/// The soft limit of a process. `EPERM` for one of another user (which may have taken it by its program), without the
/// permission for it (`CAP_SYS_RESOURCE`).
pub fn soft(pid: i32, resource: Resource) -> nix::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: nothing is set; what is read is written to a live local.
    Errno::result(unsafe { libc::prlimit(pid, resource as _, ptr::null(), &raw mut limit) })?;
    Ok(limit.rlim_cur)
}
