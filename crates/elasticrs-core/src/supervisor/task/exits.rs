//! Workers that have raised: their notice, and whether they have ended by the limit.
//!
//! The hook of a worker sends a datagram with the time and the end of its traceback to an abstract socket of the attempt, and the kernel
//! adds the sender's pid, which must be a worker or descend from one. The text is for the user only; no decision of the core
//! depends on it. The agent reads no file for it, so a line that names the exception never waits for a file system.

use std::io::{self, IoSliceMut};
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

/// Longest text of a notice, in bytes. A longer one is cut at its end; the hook sends at most this much.
const MAX_TEXT: usize = 4096;

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

    /// Receives the notices that have arrived.
    fn take(&self) -> Vec<Notice> {
        let mut found = Vec::new();
        while let Some(Ok(notice)) = self.notices.as_ref().map(|notices| receive(notices.get_ref())) {
            found.extend(notice);
        }
        found
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

/// One datagram: the pid of its sender, as the kernel reports it, and what it says, which may be anything.
#[derive(Debug, PartialEq, Eq)]
struct Notice {
    pid: i32,
    /// When the exception was recorded, in monotonic nanoseconds. This thread may see the notice much later, and the order of
    /// failures depends on it.
    recorded: Option<u64>,
    text: String,
}

impl Notice {
    /// Reads `NANOSECONDS\nTEXT`; without such a number all of it is the text.
    fn new(pid: i32, said: &[u8]) -> Self {
        let said = String::from_utf8_lossy(said);
        let parts = said.split_once('\n').and_then(|(number, text)| Some((number.parse().ok()?, text)));
        match parts {
            Some((recorded, text)) => Self { pid, recorded: Some(recorded), text: text.to_owned() },
            None => Self { pid, recorded: None, text: said.into_owned() },
        }
    }
}

/// Receives the next datagram; `None` if the kernel added no credentials.
fn receive(notices: &OwnedFd) -> nix::Result<Option<Notice>> {
    let mut control = nix::cmsg_space!(UnixCredentials);
    let mut buffer = [0; MAX_TEXT];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let message = recvmsg::<()>(notices.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let pid = message.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmCredentials(sender) => Some(sender.pid()),
        _ => None,
    });
    let size = message.bytes;
    Ok(pid.map(|pid| Notice::new(pid, &buffer[..size])))
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

    /// Records the notices that have arrived. Also called before an exit is recorded: a worker that raises and exits while
    /// this thread is delayed would otherwise seem to have ended without an exception.
    pub(super) fn on_notices(&mut self) {
        if !matches!(self.current, Current::Running(_)) {
            return;
        }
        for Notice { pid, recorded, text } in self.exits.take() {
            let Current::Running(running) = &self.current else { return };
            // Any other process may have sent one.
            let Some(local_rank) = running.worker_of(pid) else { continue };
            let process = pidfd::open(pid).ok().filter(|process| watch::ended(&[process.as_fd()]) != [true]);
            // The limit holds for a process that lives. Of several programs below one worker the first counts, as long as it
            // lives.
            let limit = match process {
                Some(process) if self.exits.has_ended(local_rank) => {
                    self.exits.raised.retain(|(rank, _)| *rank != local_rank);
                    self.exits.raised.push((local_rank, process));
                    self.exits.limit
                }
                Some(_) => continue,
                None => None,
            };
            let now = Stamp::now();
            let seen = recorded.map_or(now, |recorded| Stamp(recorded).min(now));
            self.input(Input::Raised(WorkerRaised { local_rank, pid, text, seen, limit, is_overdue: false }));
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
        assert_eq!(receive(&notices), Err(nix::errno::Errno::EAGAIN));
        let address = SocketAddr::from_abstract_name(name).expect("an address");
        let long = "x".repeat(2 * MAX_TEXT);
        let cases = [
            ("", None, ""),
            ("4711 is what I say", None, "4711 is what I say"),
            ("12\nE: x\nmore", Some(12), "E: x\nmore"),
            ("x\ny", None, "x\ny"),
            (&long, None, &long[..MAX_TEXT]),
        ];
        for (said, recorded, text) in cases {
            UnixDatagram::unbound().expect("a socket").send_to_addr(said.as_bytes(), &address).expect("sent");
            let (pid, text) = (std::process::id().cast_signed(), text.to_owned());
            assert_eq!(receive(&notices), Ok(Some(Notice { pid, recorded, text })));
        }
    }
}
