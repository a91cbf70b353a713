//! Creates and removes the FIFO for timer records.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

/// Capacity of the FIFO in bytes. About 5,000 records fit into it, so that workers do not block while the agent waits
/// for a CPU. Unprivileged processes cannot set a larger capacity by default.
pub const CAPACITY: i32 = 1 << 20;

/// A FIFO that only this process reads. Dropping it removes the file, and its directory if one was created for it.
#[derive(Debug)]
pub struct Fifo {
    path: PathBuf,
    directory: Option<PathBuf>,
    /// The FIFO, opened for both reading and writing. If it were opened only for reading, a read would return the end
    /// of the file while no process has the FIFO open for writing. The file is locked, so that other instances of this
    /// program can see that the FIFO is in use.
    file: Flock<File>,
}

impl Fifo {
    /// Creates a FIFO at `path`, or in a new directory that only this user can enter.
    ///
    /// If a killed process has left a FIFO at `path`, takes over that FIFO. A FIFO counts as left behind if it belongs
    /// to this user, other users have no access to it, and no process reads it. Otherwise, leaves an existing file
    /// unchanged and fails: with `EBUSY` if another process reads the FIFO, and with `EEXIST` for any other file.
    /// Creating and dropping a FIFO blocks if the file system hangs.
    pub fn create(path: Option<&Path>) -> io::Result<Self> {
        let Some(path) = path else {
            let directory = make_directory()?;
            let path = directory.join("timers");
            return Self::at(path, Some(directory.clone())).inspect_err(|_| {
                // Ignore a failed clean-up, because the caller needs the original error.
                let _ = fs::remove_dir(&directory);
            });
        };
        Self::at(path.to_owned(), None)
    }

    fn at(path: PathBuf, directory: Option<PathBuf>) -> io::Result<Self> {
        let file = match mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR) {
            Err(Errno::EEXIST) => check_abandoned(&path).and_then(|()| take(&path)),
            made => {
                made?;
                take(&path).inspect_err(|error| {
                    // Do not remove the FIFO if another process was the first to lock it.
                    if error.kind() != io::ErrorKind::ResourceBusy {
                        // Ignore a failed clean-up, because the caller needs the original error.
                        let _ = fs::remove_file(&path);
                    }
                })
            }
        }?;
        // Ignore an error, because the FIFO also works with its default capacity. The call fails if the pipes of this
        // user already use too much memory.
        let _ = fcntl(&*file, FcntlArg::F_SETPIPE_SZ(CAPACITY));
        Ok(Self { path, directory, file })
    }

    /// Returns the path of the FIFO.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a duplicate of the FIFO's descriptor, for polling and reading.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }

    fn is_still_there(&self) -> bool {
        let (Ok(ours), Ok(there)) = (self.file.metadata(), fs::symlink_metadata(&self.path)) else { return false };
        (ours.dev(), ours.ino()) == (there.dev(), there.ino())
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        // Remove the file only if it is still this FIFO. Another process may have removed or replaced it.
        if self.is_still_there() {
            let _ = fs::remove_file(&self.path);
        }
        if let Some(directory) = &self.directory {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Opens an existing FIFO and locks it, so that no other instance of this program can use it.
fn take(path: &Path) -> io::Result<Flock<File>> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.file_type().is_fifo() {
        return Err(Errno::EEXIST.into());
    }
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
    lock.map_err(|(_, errno)| if errno == Errno::EWOULDBLOCK { in_use() } else { errno.into() })
}

fn in_use() -> io::Error {
    Errno::EBUSY.into()
}

fn check_abandoned(path: &Path) -> io::Result<()> {
    let there = fs::symlink_metadata(path)?;
    // Reject a FIFO to which other users have access, because this program did not create it.
    let is_ours = there.mode() == libc::S_IFIFO | 0o600 && there.uid() == nix::unistd::geteuid().as_raw();
    if !is_ours {
        return Err(Errno::EEXIST.into());
    }
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    match OpenOptions::new().write(true).custom_flags(flags).open(path) {
        Ok(_) => Err(in_use()),
        // No process has the FIFO open for reading.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
        Err(error) => Err(error),
    }
}

fn make_directory() -> io::Result<PathBuf> {
    let mut random = [0; 8];
    loop {
        io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut random)?;
        let name = format!("elasticrs-timers-{:016x}", u64::from_le_bytes(random));
        let directory = std::env::temp_dir().join(name);
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| directory),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_default_fifo_is_private_and_removed_when_dropped() {
        let fifo = Fifo::create(None).unwrap();
        let (path, directory) = (fifo.path().to_owned(), fifo.path().parent().unwrap().to_owned());
        assert_eq!((mode(&path), mode(&directory)), (0o600, 0o700));
        drop(fifo);
        assert!(!path.exists() && !directory.exists());
    }

    #[test]
    fn an_existing_file_or_symlink_at_the_fifo_path_is_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "precious").unwrap();
        assert_eq!(Fifo::create(Some(&file)).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&file).unwrap(), b"precious");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(Fifo::create(Some(&link)).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn an_existing_fifo_is_refused_unless_its_mode_is_0600() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        for mode in [0o666, 0o620, 0o400, 0o2600] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Fifo::create(Some(&path)).unwrap_err().raw_os_error(), Some(libc::EEXIST), "{mode:o}");
            assert!(path.exists(), "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        drop(Fifo::create(Some(&path)).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn an_unused_fifo_is_taken_over_but_never_shared_by_two_servers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let first = Fifo::create(Some(&path)).unwrap();
        assert_eq!(Fifo::create(Some(&path)).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        assert!(path.exists());
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn a_new_fifo_that_cannot_be_opened_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, theirs) = (directory.path().join("ours"), directory.path().join("theirs"));
        mkfifo(&theirs, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // The limit applies only to new descriptors, not to those that are already open.
        setrlimit(Resource::RLIMIT_NOFILE, 0, hard).unwrap();
        let refused = [&ours, &theirs].map(|path| Fifo::create(Some(path)).unwrap_err().raw_os_error());
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        assert_eq!(refused, [Some(libc::EMFILE); 2]);
        assert!(!ours.exists() && theirs.exists());
    }

    #[test]
    fn a_file_that_replaced_the_fifo_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        let fifo = Fifo::create(Some(&path)).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "theirs").unwrap();
        drop(fifo);
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
    }
}
