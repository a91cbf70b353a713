//! Memory, priority and limits of processes.

use std::ptr;

use nix::errno::Errno;
use nix::sys::resource::Resource;

/// Returns all unused whole pages of the heap to the kernel.
///
/// Without this call, glibc keeps the memory of freed small and medium-sized blocks. With other C libraries, this
/// function does nothing. For a few hundred MiB, the call takes about a millisecond. During that time, other threads
/// may have to wait when they allocate memory.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes only an integer, and acquires the allocator's locks itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Sets the nice value of the calling thread and returns the previous value. Fails with `EACCES` if this process is not
/// permitted to lower the value (`CAP_SYS_NICE`, `RLIMIT_NICE`).
pub fn set_nice(value: i32) -> nix::Result<i32> {
    // `getpriority` cannot fail for the calling thread, so a result of −1 is a nice value and not an error.
    // SAFETY: the call takes only integers.
    let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // SAFETY: the call takes only integers.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, value) })?;
    Ok(before)
}

/// Returns the soft limit of a process. Fails with `EPERM` if the process belongs to another user and this
/// process lacks `CAP_SYS_RESOURCE`. A process can belong to another user because it executed a set-user-id
/// program.
pub fn soft_limit(pid: i32, resource: Resource) -> nix::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: no new limit is passed, and the old limit is written to a live local variable.
    Errno::result(unsafe { libc::prlimit(pid, resource as _, ptr::null(), &raw mut limit) })?;
    Ok(limit.rlim_cur)
}
