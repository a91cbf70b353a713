//! A file that blocks every process that opens it, like a file on a network file system whose server is down.
//!
//! The test holds a lease on the file, see fcntl(2). Any other process that opens or executes the file waits until the
//! test releases the lease, or until the process is killed. The wait lasts for at most 45 s, because the kernel then
//! revokes the lease (`/proc/sys/fs/lease-break-time`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Number of the `fcntl` operation that sets the signal with which the kernel requests the release of a lease.
const F_SETSIG: i32 = 10;

/// A file that cannot be opened while this value exists.
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
