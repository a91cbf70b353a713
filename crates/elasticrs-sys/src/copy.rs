//! Copies memory, and computes the checksum of the copy in the same pass.

use std::ffi::{c_int, c_void};
use std::{mem, ptr};

use super::process::Waited;
use super::spawn::{run_in_helper, set_signal_mask};

/// Number of bytes that are copied at once: a line of the processor's cache.
const LINE: usize = 64;

/// A cache line as 8-byte words.
type Line = [u64; LINE / 8];

/// A block of memory to copy. Its addresses are numbers, because they come from Python.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// Address of the first byte to read.
    pub source: usize,
    /// Address of the first byte to write. Must be a multiple of 64.
    pub target: usize,
    /// Number of bytes to copy.
    pub length: usize,
}

/// Copies all blocks. Returns the sum of the copied 8-byte words, modulo 2 to the power of 64. If the last word of a
/// block is incomplete, the sum contains it with zeros in place of the missing bytes.
///
/// The sum is that of the bytes that were written, even if another thread changes a source during the copy.
///
/// # Safety
/// All sources are readable, all targets are writable, and no source overlaps a target, until the function returns.
///
/// # Panics
/// The target of a block is not a multiple of 64.
pub unsafe fn copy_and_sum(blocks: &[Block]) -> u64 {
    let mut sums = Line::default();
    for block in blocks {
        assert_eq!(block.target % LINE, 0, "the target of a copy is not aligned");
        let whole = block.length / LINE * LINE;
        for at in (0..whole).step_by(LINE) {
            let source = ptr::with_exposed_provenance::<Line>(block.source + at);
            // SAFETY: the caller guarantees that the source is readable. An array of numbers may have any bytes.
            let line = unsafe { source.read_unaligned() };
            add(&mut sums, &line);
            // SAFETY: the caller guarantees that the block's target is writable. The target is a multiple of 64.
            unsafe { store(block.target + at, &line) };
        }
        let mut line = Line::default();
        let rest = line.as_mut_ptr().cast::<u8>();
        // SAFETY: fewer than 64 bytes are left, so they fit into `line`. The caller guarantees that the source is
        // readable, and the target writable.
        unsafe {
            rest.copy_from(ptr::with_exposed_provenance(block.source + whole), block.length - whole);
            rest.copy_to(ptr::with_exposed_provenance_mut(block.target + whole), block.length - whole);
        }
        add(&mut sums, &line);
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: all processors with this architecture have the instruction. It orders the writes of `store` before those
    // that follow, so that another process that sees a copy marked as complete also sees its data.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// Arguments and result of a copy that a helper process makes.
struct Shared<'a> {
    blocks: &'a [Block],
    parent: c_int,
    sum: Option<u64>,
}

/// Reason why a helper process has not completed a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incomplete {
    /// A source was not readable.
    Unreadable,
    /// A signal such as SIGKILL ended the helper.
    Killed,
}

/// Copies all blocks like [`copy_and_sum`], but in a helper process that shares the memory of this one. If another
/// thread frees a source during the copy, the access to it ends only the helper.
///
/// If no helper can be started, for example because of a limit of processes, this thread makes the copy.
///
/// # Safety
/// All targets are writable until the function returns, and no source overlaps a target. Any bytes may be at a source
/// that another thread frees during the copy.
///
/// # Panics
/// The target of a block is not a multiple of 64.
pub unsafe fn copy_in_helper(blocks: &[Block]) -> Result<u64, Incomplete> {
    assert!(blocks.iter().all(|block| block.target % LINE == 0), "the target of a copy is not aligned");
    if blocks.is_empty() {
        return Ok(0);
    }
    let mut shared = Shared { blocks, parent: nix::unistd::getpid().as_raw(), sum: None };
    match run_in_helper(helper_main, &mut shared) {
        Ok(ended) => shared.sum.ok_or(match ended {
            Waited::Changed { status, .. } if libc::WIFEXITED(status) => Incomplete::Unreadable,
            _ => Incomplete::Killed,
        }),
        // SAFETY: the caller guarantees what `copy_and_sum` requires, with one exception: another thread may free a
        // source during the copy. Then this process may crash, because no helper could be started.
        Err(_) => Ok(unsafe { copy_and_sum(blocks) }),
    }
}

/// Entry point of the helper. Makes only system calls, and does not allocate, as in [`super::spawn`].
extern "C" fn helper_main(argument: *mut c_void) -> c_int {
    // SAFETY: the parent passes a pointer to its `Shared` and is suspended until the helper has exited, so this is the
    // only reference.
    let shared = unsafe { &mut *argument.cast::<Shared<'_>>() };
    // SAFETY: the struct consists of integers and an optional handler, for which zero is a valid value.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = exit_at_fault as *const () as usize;
    let mut others = u64::MAX;
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: `action` is a live local variable, and its handler makes one system call. The helper has its own
        // handlers, so those of the parent stay unchanged.
        unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
        others &= !(1 << (signal - 1));
    }
    set_signal_mask(others);
    // Have the kernel kill the helper when the parent dies.
    // SAFETY: the calls take only integers.
    let parent = unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::syscall(libc::SYS_getppid)
    };
    if parent == shared.parent.into() {
        // SAFETY: the caller of `copy_in_helper` guarantees that the targets are writable, and that no source overlaps a
        // target. If a source is no longer readable, reading it ends only this helper; see `exit_at_fault`.
        shared.sum = Some(unsafe { copy_and_sum(shared.blocks) });
    }
    0
}

extern "C" fn exit_at_fault(_signal: c_int) {
    // SAFETY: the call takes only integers. It ends the helper, and not its parent, which is another process.
    unsafe { libc::syscall(libc::SYS_exit_group, 1) };
}

fn add(sums: &mut Line, line: &Line) {
    for (sum, word) in sums.iter_mut().zip(line) {
        *sum = sum.wrapping_add(*word);
    }
}

/// Writes a line of memory past the processor's caches. This is faster, because the processor does not read the old
/// content of the memory first, and data that the program uses stays in the caches.
///
/// # Safety
/// The address is a multiple of 64, and the line there is writable.
#[cfg(target_arch = "x86_64")]
unsafe fn store(address: usize, line: &Line) {
    use std::arch::x86_64::{__m128i, _mm_stream_si128};

    // SAFETY: both types have 64 bytes, and any bytes are valid for both.
    let parts: [__m128i; LINE / size_of::<__m128i>()] = unsafe { std::mem::transmute(*line) };
    let target = ptr::with_exposed_provenance_mut::<__m128i>(address);
    for (number, part) in parts.into_iter().enumerate() {
        // SAFETY: the caller guarantees that 64 bytes are writable at this address; the four parts have 64 bytes.
        unsafe { _mm_stream_si128(target.add(number), part) };
    }
}

/// Writes a line of memory.
///
/// # Safety
/// The address is a multiple of 64, and the line there is writable.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn store(address: usize, line: &Line) {
    // SAFETY: the caller guarantees it.
    unsafe { ptr::with_exposed_provenance_mut::<Line>(address).write(*line) };
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::atomic::{AtomicBool, Ordering};

    use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    #[repr(align(64))]
    struct Aligned([u8; 1024]);

    #[test]
    fn blocks_of_any_length_and_alignment_are_copied_and_summed_and_nothing_else_is_written() {
        let source: Vec<u8> = (0..400_usize).map(|at| u8::try_from(at * 97 % 256).unwrap()).collect();
        for skipped in [0, 1, 4, 8] {
            for length in [0, 1, 7, 8, 63, 64, 65, 128, 200, 333] {
                let (mut target, from) = (Aligned([7; 1024]), &source[skipped..]);
                let to = target.0.as_mut_ptr().expose_provenance();
                let block = |at| Block { source: from.as_ptr().expose_provenance(), target: to + at, length };
                // SAFETY: each block writes at most 333 bytes, at 64 and at 512 of the 1,024 bytes of `target`, and reads
                // from `source`.
                let sum = unsafe { copy_and_sum(&[block(64), block(512)]) };
                let mut expected = [7; 1024];
                for at in [64, 512] {
                    expected[at..at + length].copy_from_slice(&from[..length]);
                }
                assert_eq!(target.0, expected);
                let words = from[..length].chunks(8).map(|word| {
                    let mut whole = [0; 8];
                    whole[..word.len()].copy_from_slice(word);
                    u64::from_ne_bytes(whole)
                });
                assert_eq!(sum, words.fold(0, u64::wrapping_add).wrapping_mul(2));
            }
        }
    }

    #[test]
    fn a_source_that_is_not_readable_ends_the_copy_but_not_this_process() {
        let (mut target, source) = (Aligned([7; 1024]), [1_u64; 64]);
        let to = target.0.as_mut_ptr().expose_provenance();
        let readable = Block { source: source.as_ptr().expose_provenance(), target: to, length: 512 };
        let length = NonZeroUsize::new(4096).unwrap();
        // SAFETY: the kernel chooses the address, so the new mapping does not replace another one.
        let page = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) }.unwrap();
        let unreadable = Block { source: page.as_ptr().expose_provenance(), target: to + 512, length: 512 };
        // SAFETY: the blocks write the 1,024 bytes of `target`. No source overlaps them.
        let sums = unsafe { [copy_in_helper(&[readable]), copy_in_helper(&[readable, unreadable])] };
        assert_eq!(sums, [Ok(64), Err(Incomplete::Unreadable)]);
        assert_eq!(target.0[512..], [7; 512]);
        // SAFETY: no other code uses the mapping.
        unsafe { munmap(page, 4096) }.unwrap();
    }

    #[test]
    fn a_helper_that_is_killed_is_told_from_a_source_that_is_not_readable() {
        let (source, mut target) = (vec![1_u8; 64 << 20], vec![0_u8; (64 << 20) + LINE]);
        let to = target.as_mut_ptr().expose_provenance().next_multiple_of(LINE);
        let block = Block { source: source.as_ptr().expose_provenance(), target: to, length: source.len() };
        let children = format!("/proc/self/task/{}/children", nix::unistd::gettid());
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    if let Ok(helper) = std::fs::read_to_string(&children).unwrap().trim().parse() {
                        let _ = kill(Pid::from_raw(helper), Signal::SIGKILL);
                    }
                }
            });
            // A helper may complete its copy before the other thread kills it, so try several times.
            // SAFETY: the block writes the 64 MiB of `target` from its first aligned address on.
            let found = (0..1000).map(|_| unsafe { copy_in_helper(&[block]) }).find(Result::is_err);
            has_ended.store(true, Ordering::Relaxed);
            assert_eq!(found, Some(Err(Incomplete::Killed)));
        });
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn a_target_that_is_not_aligned_is_refused() {
        let mut target = Aligned([0; 1024]);
        let to = target.0.as_mut_ptr().expose_provenance();
        // SAFETY: the block reads the bytes from 512 to 575 of `target`, and writes those from 8 to 71.
        unsafe { copy_and_sum(&[Block { source: to + 512, target: to + 8, length: 64 }]) };
    }
}
