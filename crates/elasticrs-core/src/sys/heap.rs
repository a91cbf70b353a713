//! Returns freed memory, which the allocator keeps, to the kernel.

/// Gives the kernel back all whole pages that nothing lives in.
///
/// glibc keeps what small and middle-sized blocks were freed from; other C libraries are left to what they do themselves.
/// Takes a millisecond for some hundred MiB, in which other threads that allocate may wait.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: an integer; it takes the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
