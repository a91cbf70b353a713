//! Makes the allocator return freed memory to the kernel.

/// Returns all unused whole pages of the heap to the kernel.
///
/// Without this call, glibc keeps the memory of freed small and medium-sized blocks. With other C libraries, this
/// function does nothing. It takes about a millisecond for a few hundred MiB. During that time, other threads may
/// have to wait when they allocate memory.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes only an integer, and acquires the allocator's locks itself.
    unsafe {
        libc::malloc_trim(0);
    }
}
