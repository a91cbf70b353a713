//! Memory, priority and limits of processes.
//!
//! If memory was moved to huge pages (`MADV_COLLAPSE`, Linux 6.1), a fork has to copy about 500 times fewer page table
//! entries for it.

use std::{fs, ptr};

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

const MADV_COLLAPSE: libc::c_int = 25;
const HUGE: usize = 2 << 20;

/// Returns the addresses at which a huge page fits into the private, writable, anonymous memory of this process.
pub fn huge_page_places() -> Vec<usize> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter_map(anonymous).flat_map(|(start, end)| whole_places(start, end)).collect()
}

/// Returns the address range in a line of `/proc/PID/maps`. `None` unless the memory is private, writable and
/// anonymous.
fn anonymous(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_private = fields.next()? == "rw-p";
    let is_anonymous = matches!(fields.nth(3), None | Some("[heap]"));
    let parse = |text| usize::from_str_radix(text, 16).ok();
    (is_private && is_anonymous).then_some((parse(start)?, parse(end)?))
}

fn whole_places(start: usize, end: usize) -> impl Iterator<Item = usize> {
    (start.next_multiple_of(HUGE)..end).step_by(HUGE).take_while(move |place| place + HUGE <= end)
}

/// Replaces the small pages at this address with one huge page. Takes about a millisecond.
///
/// # Errors
/// Huge pages are unsupported, not permitted, or not available at the moment.
pub fn collapse(place: usize) -> nix::Result<()> {
    // SAFETY: the call does not change the content of the memory. The kernel checks the range, which may be unmapped.
    Errno::result(unsafe { libc::madvise(place as *mut libc::c_void, HUGE, MADV_COLLAPSE) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_anonymous_writable_memory_is_found() {
        let heap = "5581a2c00000-5581a3a00000 rw-p 00000000 00:00 0                          [heap]";
        assert_eq!(anonymous(heap), Some((0x5581_a2c0_0000, 0x5581_a3a0_0000)));
        assert_eq!(
            anonymous("7f0000000000-7f0000400000 rw-p 00000000 00:00 0 "),
            Some((0x7f00_0000_0000, 0x7f00_0040_0000))
        );
        for other in [
            "7f0000000000-7f0000400000 r--p 00000000 00:00 0",
            "7f0000000000-7f0000400000 rw-s 00000000 00:01 12 /memfd:x (deleted)",
            "7f0000000000-7f0000400000 rw-p 00000000 fe:01 12 /usr/lib/libc.so.6",
            "7ffd00000000-7ffd00400000 rw-p 00000000 00:00 0 [stack]",
            "",
        ] {
            assert_eq!(anonymous(other), None, "{other}");
        }
    }

    #[test]
    fn only_whole_aligned_huge_page_ranges_are_returned() {
        assert_eq!(whole_places(HUGE + 1, 4 * HUGE).collect::<Vec<_>>(), [2 * HUGE, 3 * HUGE]);
        assert_eq!(whole_places(HUGE, 2 * HUGE - 1).count(), 0);
    }

    #[test]
    fn collapsing_memory_keeps_its_content() {
        let memory = vec![7_u8; 3 * HUGE];
        for place in huge_page_places() {
            // Ignore the result, because not every kernel supports or permits huge pages.
            let _ = collapse(place);
        }
        assert!(memory.iter().all(|&byte| byte == 7));
    }
}
