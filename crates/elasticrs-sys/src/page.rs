//! A page of memory that two processes share.

use std::ffi::CStr;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl, open};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::Mode;

/// Size of the mapping in bytes. The kernel rounds the size up to whole pages.
const LENGTH: NonZeroUsize = NonZeroUsize::new(SIZE as usize).expect("a constant above zero");
const SIZE: u16 = 4096;
const WORDS: usize = SIZE as usize / size_of::<u64>();
/// Seals of the page's file. They prevent resizing, because accessing memory beyond the end of a shrunken file
/// causes SIGBUS.
const SEALS: SealFlag = SealFlag::F_SEAL_SEAL.union(SealFlag::F_SEAL_SHRINK).union(SealFlag::F_SEAL_GROW);

/// Page of memory that processes share by passing its close-on-exec descriptor. The page is an array of numbers.
/// Some callers use only the first number.
#[derive(Debug)]
pub struct Page {
    memory: NonNull<AtomicU64>,
    file: OwnedFd,
}

// SAFETY: the memory is only accessed through atomics, and stays mapped while the value exists.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Creates a page of zeros that can be shared with an untrusted process. The file is sealed, so that no process can
    /// shrink it while it is mapped here.
    ///
    /// # Errors
    /// No descriptor or memory is available, or the system does not support sealed memory.
    pub fn sealed(name: &CStr) -> io::Result<Self> {
        let file = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        nix::unistd::ftruncate(&file, i64::from(SIZE))?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Self::map(file)
    }

    /// Creates a shared memory page of zeros. Share the page only with trusted processes, because it may not be sealed.
    /// If sealed memory is not supported, the page is an unnamed file in `/dev/shm` or in the temporary directory.
    ///
    /// # Errors
    ///
    /// No descriptor or memory is available.
    pub fn of_our_own(name: &CStr) -> io::Result<Self> {
        match Self::sealed(name) {
            // A seccomp filter blocks sealed memory.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                let file = nameless_file()?;
                nix::unistd::ftruncate(&file, i64::from(SIZE))?;
                Self::map_our_own(file)
            }
            made => made,
        }
    }

    /// Maps a shared memory page into this process. `file` is a descriptor of the page that another process has sent.
    /// That process may be untrusted.
    ///
    /// # Errors
    ///
    /// `EINVAL` if [`Self::sealed`] did not create the page. Also fails if no memory is available.
    pub fn map(file: OwnedFd) -> io::Result<Self> {
        if sealed_by(&file).is_some_and(|seals| seals.contains(SEALS)) { Self::map_any(file) } else { Err(invalid()) }
    }

    /// Maps a shared memory page into this process. `file` is a descriptor of the page that a trusted process has sent.
    ///
    /// # Errors
    ///
    /// `EINVAL` if [`Self::sealed`] or [`Self::of_our_own`] did not create the page. Also fails if no memory is
    /// available.
    pub fn map_our_own(file: OwnedFd) -> io::Result<Self> {
        let facts = nix::sys::stat::fstat(&file)?;
        let is_nameless = facts.st_mode & libc::S_IFMT == libc::S_IFREG && facts.st_nlink == 0;
        // Check only the seals that prevent a change of the file's size, because every file on tmpfs has the seal
        // `F_SEAL_SEAL`.
        let size = SEALS.difference(SealFlag::F_SEAL_SEAL);
        match sealed_by(&file) {
            Some(seals) if seals.intersects(size) => Self::map(file),
            Some(_) | None if is_nameless => Self::map_any(file),
            Some(_) | None => Err(invalid()),
        }
    }

    fn map_any(file: OwnedFd) -> io::Result<Self> {
        if nix::sys::stat::fstat(&file)?.st_size != i64::from(SIZE) {
            return Err(invalid());
        }
        // SAFETY: the kernel chooses the address, so the new mapping does not replace another one.
        let memory = unsafe {
            mmap(None, LENGTH, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, &file, 0)
        }?;
        Ok(Self { memory: memory.cast(), file })
    }

    /// Returns the first number of the page.
    pub fn number(&self) -> &AtomicU64 {
        &self.words()[0]
    }

    /// Returns the whole page as numbers.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the address is page-aligned, the mapping has room for `WORDS` numbers and stays mapped while `self`
        // lives, and every value is a valid `u64`. All processes access the numbers atomically.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), WORDS) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // The only possible error is EINVAL, for an invalid address.
        // SAFETY: `map` created the mapping, and no reference to it outlives `self`.
        let _ = unsafe { munmap(self.memory.cast(), LENGTH.get()) };
    }
}

impl AsFd for Page {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the seals of a file, or `None` if the file does not support seals.
fn sealed_by(file: &OwnedFd) -> Option<SealFlag> {
    fcntl(file, FcntlArg::F_GET_SEALS).ok().map(SealFlag::from_bits_retain)
}

/// Creates an unnamed file in memory or, if that is not possible, in the temporary directory.
fn nameless_file() -> io::Result<OwnedFd> {
    // Prefer `/dev/shm`, because the temporary directory may be on a network file system that does not respond.
    nameless_file_in(Path::new("/dev/shm")).or_else(|_| nameless_file_in(&std::env::temp_dir()))
}

/// Creates an unnamed file. `O_EXCL` prevents the file from getting a name later, so no other program can open it.
fn nameless_file_in(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    Ok(open(folder, flags, Mode::S_IRUSR | Mode::S_IWUSR)?)
}

fn invalid() -> io::Error {
    Errno::EINVAL.into()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_number_written_to_a_shared_page_is_read_through_the_other_mapping() {
        let ours = Page::sealed(c"elasticrs-probe").unwrap();
        let theirs = Page::map(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
        ours.number().store(7, Ordering::Release);
        assert_eq!(theirs.number().load(Ordering::Acquire), 7);
        drop(ours);
        assert_eq!(theirs.number().load(Ordering::Acquire), 7);
    }

    #[test]
    fn a_process_that_receives_a_shared_page_cannot_shrink_it() {
        let page = Page::sealed(c"elasticrs-probe").unwrap();
        let theirs = page.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(nix::unistd::ftruncate(&theirs, 0), Err(Errno::EPERM));
        assert_eq!(fcntl(&theirs, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)), Err(Errno::EPERM));
    }

    #[test]
    fn unnamed_files_of_any_file_system_are_shared_only_between_trusted_processes() {
        // Test a tmpfs, and a file system that does not support seals.
        for folder in ["/dev/shm", env!("CARGO_MANIFEST_DIR")] {
            let file = nameless_file_in(Path::new(folder)).unwrap();
            nix::unistd::ftruncate(&file, 4096).unwrap();
            let ours = Page::map_our_own(file.try_clone().unwrap()).unwrap();
            ours.number().store(7, Ordering::Release);
            let theirs = Page::map_our_own(file.try_clone().unwrap()).unwrap();
            assert_eq!(theirs.number().load(Ordering::Acquire), 7);
            assert_eq!(Page::map(file).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        }
        let named = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(Page::map_our_own(named.into()).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_file_that_could_shrink_is_refused() {
        let file = memfd_create(c"elasticrs-probe", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&file, 4096).unwrap();
        assert_eq!(Page::map(file).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let pipe = nix::unistd::pipe().unwrap().0;
        assert_eq!(Page::map(pipe).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
