//! Files that hang, like files on a network file system whose server is down.
//!
//! A process that maps a [`HungFile`] hangs in the kernel.
//!
//! The test serves the file system through FUSE. It replies to all requests except the first request for the file's
//! content, so the only page of the file stays locked. The command `hang-in-map` reads the file in one thread and then
//! maps it in another. To map the file, the kernel waits for the locked page. This wait cannot be interrupted, and the
//! kernel holds the lock of the process's memory map in the meantime.
//!
//! A process that opens a [`SlowFile`] waits, because the test holds a lease on the file, see fcntl(2). Any other
//! process that opens or executes the file waits until the test releases the lease, or until the process is killed. The
//! wait lasts for at most 45 s, because the kernel then revokes the lease (`/proc/sys/fs/lease-break-time`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

const HEADER: usize = 40;
/// Flags `FOPEN_DIRECT_IO` and `FOPEN_KEEP_CACHE` for the reply to an open request. The kernel then invalidates the
/// file's cached pages when the file is mapped, not when it is opened.
const UNCACHED: u32 = 1 | 2;
const NOT_THERE: i32 = -libc::ENOSYS;
const A_YEAR: u64 = 31_536_000;

/// A file whose reads hang while this value exists. Dropping the value makes the reads fail, so that the hanging
/// processes continue.
#[derive(Debug)]
pub struct HungFile {
    folder: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl HungFile {
    /// Mounts the file for this thread and for processes that it starts later. Returns `None` if the thread may not
    /// mount file systems.
    pub fn new(folder: &Path) -> Option<Self> {
        unshare(CloneFlags::CLONE_NEWNS).ok()?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).expect("a private mount namespace");
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        mount(Some("hung"), folder, Some("fuse"), MsFlags::empty(), Some(options.as_str())).expect("a mounted FUSE");
        let server = Some(thread::spawn(move || serve(device)));
        Some(Self { folder: folder.to_owned(), server })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder.join("file")
    }
}

impl Drop for HungFile {
    fn drop(&mut self) {
        // With `MNT_FORCE`, the kernel aborts all pending requests. The server's next read then returns no request,
        // which makes the server exit.
        umount2(&self.folder, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH).expect("it is mounted");
        self.server.take().map(JoinHandle::join).transpose().expect("a server that ended");
    }
}

/// Hangs while the [`HungFile`] exists. First reads the file in another thread, which locks the file's page in
/// the page cache. Then opens the file again, bypassing the cache, and maps it. The mapping hangs because the
/// kernel cannot invalidate the locked page.
pub fn hang_in_map(path: &Path) -> std::io::Result<()> {
    let mut cached = File::open(path)?;
    thread::spawn(move || cached.read(&mut [0; 1]));
    // This call returns only after the other thread has started to read, because the server delays its reply until
    // then.
    let uncached = File::open(path)?;
    let length = std::num::NonZeroUsize::MIN;
    let (prot, flags) = (nix::sys::mman::ProtFlags::PROT_READ, nix::sys::mman::MapFlags::MAP_PRIVATE);
    // SAFETY: the kernel chooses the address of the new mapping, and no code accesses the mapping.
    unsafe { nix::sys::mman::mmap(None, length, prot, flags, uncached, 0) }?;
    Ok(())
}

/// Replies to the kernel's requests until the file system is unmounted.
fn serve(mut device: File) {
    let mut request = vec![0; 1 << 17];
    let (mut opened, mut is_read, mut waits) = (0, false, None);
    while let Ok(length @ HEADER..) = device.read(&mut request) {
        let request = &request[..length];
        let opcode = u32::from_ne_bytes(request[4..8].try_into().expect("four bytes"));
        let unique = u64::from_ne_bytes(request[8..16].try_into().expect("eight bytes"));
        let node = u64::from_ne_bytes(request[16..24].try_into().expect("eight bytes"));
        let mut answer = |unique, body: &[u8]| reply(&mut device, unique, 0, body);
        match opcode {
            // Reply with protocol version 7.31 and without optional features. The body has 64 bytes.
            INIT => answer(unique, &words(&[7, 31, 0, 0, 0, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            LOOKUP => answer(unique, &[longs(&[2, 0, A_YEAR, A_YEAR, 0]), attributes(2)].concat()),
            GETATTR => answer(unique, &[longs(&[A_YEAR, 0]), attributes(node)].concat()),
            OPEN if opened == 0 => {
                opened = 1;
                answer(unique, &longs(&[0, 0]));
            }
            OPEN if !is_read => waits = Some(unique),
            OPEN => answer(unique, &[longs(&[0]), words(&[UNCACHED, 0])].concat()),
            READ => {
                is_read = true;
                if let Some(unique) = waits.take() {
                    answer(unique, &[longs(&[0]), words(&[UNCACHED, 0])].concat());
                }
            }
            FORGET | BATCH_FORGET | INTERRUPT => {}
            _ => reply(&mut device, unique, NOT_THERE, &[]),
        }
    }
}

fn reply(device: &mut File, unique: u64, error: i32, body: &[u8]) {
    let length = u32::try_from(16 + body.len()).expect("a short one");
    let header = [length.to_ne_bytes(), error.to_ne_bytes()].concat();
    // Ignore an error, because the process that sent the request may have been killed.
    let _ = device.write_all(&[header, longs(&[unique]), body.to_vec()].concat());
}

/// Returns the attributes of a node. Node 1 is the root folder, and every other node is the file.
fn attributes(node: u64) -> Vec<u8> {
    let mode = if node == 1 { libc::S_IFDIR | 0o755 } else { libc::S_IFREG | 0o644 };
    [longs(&[node, 4096, 8, 0, 0, 0]), words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])].concat()
}

fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Waits until a process hangs in [`hang_in_map`].
pub fn wait_until_it_hangs(pid: i32) {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let maps = format!("{} ", libc::SYS_mmap);
    super::wait_until("a process that hangs", || {
        assert!(super::is_running(pid), "{pid} has ended");
        super::state(pid) == Some('D') && read("syscall").starts_with(&maps)
    });
}

/// Number of the `fcntl` operation that sets the signal with which the kernel requests the release of a lease.
const F_SETSIG: i32 = 10;

/// A file that other processes cannot open while this value exists.
#[derive(Debug)]
pub struct SlowFile(File);

impl SlowFile {
    /// Blocks every process that opens the file later. First waits until no process has the file open.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("a file");
        // Replace the default signal SIGIO with SIGURG, because SIGIO would kill this process and SIGURG is ignored by
        // default.
        control(&file, F_SETSIG, libc::SIGURG).expect("a valid signal");
        super::wait_until("the end of all users of the file", || {
            control(&file, libc::F_SETLEASE, libc::F_WRLCK).is_ok()
        });
        Self(file)
    }

    /// Waits until a process tries to open the file.
    pub fn wait_until_opened(&self) {
        super::wait_until("an attempt to open the file", || {
            control(&self.0, libc::F_GETLEASE, 0).expect("an open file") != libc::F_WRLCK
        });
    }
}

fn control(file: &File, operation: i32, argument: i32) -> io::Result<i32> {
    // SAFETY: the call takes only integers.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), operation, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
