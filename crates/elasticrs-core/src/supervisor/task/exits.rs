//! Workers that have raised: their notice, and whether they have ended by the limit.
//!
//! The hook of a worker sends an empty datagram to an abstract socket of the attempt, and the kernel adds the sender's pid.
//! So nothing has to be believed, no file and no descriptor in the worker is needed, and nobody is woken before.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use elasticrs_runtime::clock::Stamp;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, UnixCredentials, bind, getsockname,
    recvmsg, setsockopt, socket, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Current, Task};
use crate::supervisor::event::{Event, WorkerRaised};
use crate::supervisor::state::Input;
use crate::supervisor::watch;
use crate::sys::pidfd;
use crate::sys::readiness::register;

/// A socket for notices, with a name that the kernel chose: no file, and gone with its descriptor.
pub(in crate::supervisor) fn open_notices() -> io::Result<(OwnedFd, String)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let notices = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
    setsockopt(&notices, sockopt::PassCred, &true)?;
    bind(notices.as_raw_fd(), &UnixAddr::new_unnamed())?;
    let address: UnixAddr = getsockname(notices.as_raw_fd())?;
    let name = address.as_abstract().ok_or_else(|| io::Error::other("the kernel gave the socket no name"))?;
    Ok((notices, String::from_utf8_lossy(name).into_owned()))
}

/// What is known of the group's workers that are about to end.
#[derive(Default)]
pub(super) struct Exits {
    limit: Option<Duration>,
    notices: Option<AsyncFd<OwnedFd>>,
    /// By local rank, the process that has recorded its exception.
    raised: Vec<(u32, OwnedFd)>,
}

impl Exits {
    pub(super) fn are_watched(&self) -> bool {
        self.notices.is_some()
    }

    /// A notice may be there. Cancel-safe.
    pub(super) async fn next(&self) {
        match &self.notices {
            Some(notices) => match notices.readable().await {
                Ok(mut ready) => ready.clear_ready(),
                // The runtime shuts down.
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

    /// Pids of those that have given notice.
    fn take(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        while let Some(Ok(pid)) = self.notices.as_ref().map(|notices| sender(notices.get_ref())) {
            pids.extend(pid);
        }
        pids
    }

    /// Another process takes the place of this worker.
    pub(super) fn forget(&mut self, local_rank: u32) {
        self.raised.retain(|(rank, _)| *rank != local_rank);
    }

    pub(super) fn has_ended(&self, local_rank: u32) -> bool {
        let process = self.raised.iter().find(|(rank, _)| *rank == local_rank);
        process.is_none_or(|(_, process)| watch::ended(&[process.as_fd()]) == [true])
    }
}

/// Who sent the next datagram, as the kernel says; what else it holds is dropped.
fn sender(notices: &OwnedFd) -> nix::Result<Option<i32>> {
    let mut control = nix::cmsg_space!(UnixCredentials);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(notices.as_raw_fd(), &mut [], Some(&mut control), flags)?;
    Ok(message.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmCredentials(sender) => Some(sender.pid()),
        _ => None,
    }))
}

impl Task {
    pub(super) fn watch_exits(&mut self, notices: OwnedFd, limit: Option<Duration>) {
        match register(notices, Interest::READABLE) {
            Ok(notices) => self.exits = Exits { limit, notices: Some(notices), raised: Vec::new() },
            Err(error) => {
                let message = format!("workers that raise and do not end are not noticed: {error}");
                self.shared.queue.push(Event::Degraded { message });
            }
        }
    }

    pub(super) fn on_notices(&mut self) {
        for pid in self.exits.take() {
            let Current::Running(running) = &self.current else { return };
            // Any other process may have sent one.
            let (Ok(process), Some(local_rank)) = (pidfd::open(pid), running.worker_of(pid)) else { continue };
            // Of several programs below one worker the first counts, as long as it lives.
            if watch::ended(&[process.as_fd()]) == [true] || !self.exits.has_ended(local_rank) {
                continue;
            }
            self.exits.raised.retain(|(rank, _)| *rank != local_rank);
            self.exits.raised.push((local_rank, process));
            let (seen, limit) = (Stamp::now(), self.exits.limit);
            self.input(Input::Raised(WorkerRaised { local_rank, pid, seen, limit, is_overdue: false }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    #[test]
    fn the_kernel_says_who_sent_a_notice() {
        let (notices, name) = open_notices().expect("a socket");
        assert_eq!(sender(&notices), Err(nix::errno::Errno::EAGAIN));
        let address = SocketAddr::from_abstract_name(name).expect("an address");
        for text in [&b""[..], b"4711 is what I say"] {
            UnixDatagram::unbound().expect("a socket").send_to_addr(text, &address).expect("sent");
            assert_eq!(sender(&notices), Ok(Some(std::process::id().cast_signed())));
        }
    }
}
