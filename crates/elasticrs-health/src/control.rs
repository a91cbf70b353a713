//! Control socket of an agent: the Unix socket `PID.sock` in a per-user folder, over which the command `elasticctl`
//! sends requests to the agent.
//!
//! Only the user and root can use the folder (mode 0700) and the socket (0600).

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use std::os::fd::AsRawFd;

/// Path of a control socket. Dropping this value removes the socket file, except in a forked child of this process.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    path: PathBuf,
    owner: u32,
}

impl ControlSocket {
    /// Listens on the control socket of this process in `folder`. Creates the folder if it is missing.
    pub(crate) fn open(folder: &Path) -> io::Result<(Self, UnixListener)> {
        let owner = std::process::id();
        let [path, new] = ["sock", "new"].map(|suffix| folder.join(format!("{owner}.{suffix}")));
        // Check the length of the final path here, because `bind` gets a shorter one.
        let address = UnixAddr::new(&path)?;
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_folder(folder)?,
            created => created?,
        }
        // Do not replace a socket that is in use, because a process in another PID namespace may have the same pid.
        if is_served(&path, &address) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        if fs::symlink_metadata(&new).is_ok() {
            // Remove the file that an earlier process with the same pid has left behind.
            fs::remove_file(&new)?;
        }
        // Give the socket its final name only when it listens, because `elasticctl` removes a socket on which no
        // process listens.
        let listener = UnixListener::bind(&new)?;
        listener.set_nonblocking(true)?;
        fs::set_permissions(&new, Permissions::from_mode(0o600))?;
        fs::rename(&new, &path)?;
        Ok((Self { path, owner }, listener))
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if std::process::id() == self.owner {
            // Ignore the error, because the file or its folder is already gone.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns an error unless `folder` is a directory that only this user can access.
fn check_folder(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() {
        return Err(io::Error::other("not a folder"));
    }
    if found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::other(format!("the folder belongs to user {}", found.uid())));
    }
    if found.mode() & 0o077 != 0 {
        return Err(io::Error::other("other users can open the folder (chmod 700)"));
    }
    Ok(())
}

/// Returns true if a process listens on the socket. Does not block, even if the backlog of the socket is full.
fn is_served(path: &Path, address: &UnixAddr) -> bool {
    if fs::symlink_metadata(path).is_err() {
        return false;
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let Ok(probe) = socket(AddressFamily::Unix, SockType::Stream, flags, None) else { return false };
    !matches!(connect(probe.as_raw_fd(), address), Err(Errno::ECONNREFUSED | Errno::ENOENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_replaced_only_if_no_process_listens_on_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        let (socket, listener) = ControlSocket::open(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(&socket.path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(ControlSocket::open(&folder).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        fs::write(folder.join(format!("{}.new", socket.owner)), "").unwrap();
        let (other, _listener) = ControlSocket::open(&folder).unwrap();
        drop(other);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        drop(socket);
    }

    #[test]
    fn a_path_that_no_client_could_connect_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("{}.sock", std::process::id());
        let longest = 108 - folder.path().join("x").join(name).as_os_str().len();
        let (socket, _listener) = ControlSocket::open(&folder.path().join("x".repeat(longest))).unwrap();
        std::os::unix::net::UnixStream::connect(&socket.path).unwrap();
        let refused = ControlSocket::open(&folder.path().join("y".repeat(longest + 1))).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::ENAMETOOLONG as i32));
    }
}
