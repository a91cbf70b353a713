//! Changes what `/proc/PID/cmdline` and `/proc/PID/environ` show, for a forked process that continues as a
//! different program.

use std::ffi::CString;
use std::num::NonZeroUsize;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use crate::procfs::Stat;

/// `struct prctl_mm_map` of linux/prctl.h.
#[repr(C)]
struct Map {
    code: [u64; 2],
    data: [u64; 2],
    heap: [u64; 2],
    stack: u64,
    arguments: [u64; 2],
    environment: [u64; 2],
    /// Address of the auxiliary vector. If address and size are 0, the current vector is kept.
    auxiliary: u64,
    auxiliary_size: u32,
    /// File descriptor of the executable. -1 keeps the current one.
    executable: i32,
}

/// Sets the environment that `/proc` shows. Also sets the arguments if they differ from the current ones. Unchanged
/// arguments stay where they are in memory, so that a program can still change its title by overwriting them.
///
/// # Errors
/// The kernel was built without support for checkpoint and restore, or `/proc` is not mounted.
pub fn show(argv: &[CString], env: &[CString]) -> nix::Result<()> {
    let (arguments, environment) = (block(argv), block(env));
    let mut map = current()?;
    if read("cmdline")? != arguments {
        map.arguments = place(&arguments)?;
    }
    map.environment = place(&environment)?;
    let (option, size) = (libc::PR_SET_MM, size_of::<Map>());
    // SAFETY: the kernel reads a structure of this size, and checks its content.
    let set = unsafe { libc::prctl(option, libc::PR_SET_MM_MAP, &raw const map, size, 0) };
    Errno::result(set).map(drop)
}

fn block(strings: &[CString]) -> Vec<u8> {
    strings.iter().flat_map(CString::as_bytes_with_nul).copied().collect()
}

/// Copies `block` to new memory that is never freed. Returns the start and end address of the memory.
fn place(block: &[u8]) -> nix::Result<[u64; 2]> {
    let length = NonZeroUsize::new(block.len()).ok_or(Errno::EINVAL)?;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the memory was just mapped with the length of `block`, and no other code uses it.
    let start = unsafe {
        let memory = mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE)?;
        memory.as_ptr().cast::<u8>().copy_from_nonoverlapping(block.as_ptr(), block.len());
        memory.as_ptr() as u64
    };
    Ok([start, start + block.len() as u64])
}

/// Returns the current memory layout of this process.
fn current() -> nix::Result<Map> {
    let stat = Stat::parse(&read("stat")?).ok_or(Errno::EINVAL)?;
    let field = |number| stat.field(number).ok_or(Errno::EINVAL);
    // SAFETY: with a null argument, `brk` changes nothing and returns the end of the heap.
    let end_of_heap = unsafe { libc::syscall(libc::SYS_brk, 0) };
    Ok(Map {
        code: [field(26)?, field(27)?],
        data: [field(45)?, field(46)?],
        heap: [field(47)?, u64::try_from(end_of_heap).map_err(|_| Errno::EINVAL)?],
        stack: field(28)?,
        arguments: [field(48)?, field(49)?],
        environment: [field(50)?, field(51)?],
        auxiliary: 0,
        auxiliary_size: 0,
        executable: -1,
    })
}

fn read(file: &str) -> nix::Result<Vec<u8>> {
    let read = std::fs::read(format!("/proc/self/{file}"));
    read.map_err(|error| error.raw_os_error().map_or(Errno::EINVAL, Errno::from_raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<CString> {
        texts.iter().map(|text| CString::new(*text).unwrap()).collect()
    }

    #[test]
    fn proc_shows_the_command_line_and_environment_that_were_set() {
        for (argv, env) in [(["a", ""], ["NAME=value", "EMPTY="]), (["another", "argument"], ["ONE=1", "TWO=2"])] {
            match show(&strings(&argv), &strings(&env)) {
                // This kernel does not support `PR_SET_MM_MAP`, so skip the test.
                Err(Errno::EINVAL) => return,
                shown => shown.unwrap(),
            }
            assert_eq!(read("cmdline").unwrap(), block(&strings(&argv)));
            assert_eq!(read("environ").unwrap(), block(&strings(&env)));
        }
    }
}
