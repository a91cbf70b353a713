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
use tokio::task::JoinSet;

use super::{Current, Task};
use crate::supervisor::event::{Event, ExitStage, WorkerRaised};
use crate::supervisor::exit_progress::{self, Sample, progressed, ticks_per_second};
use crate::supervisor::state::Input;
use crate::supervisor::watch;
use crate::sys::pidfd;
use crate::sys::readiness::register;

/// Longest text of a notice, in bytes. A longer one is cut at its end; the hook sends at most this much.
const MAX_TEXT: usize = 4096;

/// Notices are taken in slices of this many. Any process of the network namespace may send some, and the search for the
/// worker that a sender descends from reads `/proc`.
const SLICE: usize = 64;

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
    /// The processes that have recorded their exceptions.
    raised: Vec<Raised>,
    /// Samples that are being taken, by local rank. A sample that takes too long is `None`.
    sampling: JoinSet<(u32, Option<Sample>)>,
}

/// What woke [`Exits::next`].
pub(super) enum Woken {
    /// There may be notices.
    Notices,
    /// A worker that has raised was sampled; `None`: that took too long.
    Sampled { local_rank: u32, sample: Option<Sample> },
}

#[derive(Debug)]
struct Raised {
    local_rank: u32,
    process: OwnedFd,
    is_sampled: bool,
    /// The last sample of its worker, unless that took too long.
    sample: Option<Sample>,
}

impl Exits {
    pub(super) fn are_watched(&self) -> bool {
        self.notices.is_some()
    }

    /// Waits for a notice or a sample. Cancel-safe.
    pub(super) async fn next(&mut self) -> Woken {
        let notices = async {
            match &self.notices {
                Some(notices) => match notices.readable().await {
                    // Stays ready until a read finds nothing.
                    Ok(mut ready) => ready.retain_ready(),
                    // The runtime shuts down.
                    Err(_) => std::future::pending().await,
                },
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = notices => Woken::Notices,
            Some(sampled) = self.sampling.join_next() => {
                let (local_rank, sample) = super::or_panic(sampled);
                Woken::Sampled { local_rank, sample }
            }
        }
    }

    /// Receives up to [`SLICE`] of the notices that have arrived; of each sender the first one.
    fn take(&self) -> Vec<Notice> {
        let mut found: Vec<Notice> = Vec::new();
        let Some(notices) = &self.notices else { return found };
        for _ in 0..SLICE {
            // The reactor may not have reported a notice yet that is there. The second attempt clears the readiness if there
            // is none.
            let again = |_| notices.try_io(Interest::READABLE, |notices| Ok(receive(notices)?));
            match receive(notices.get_ref()).or_else(again) {
                Ok(Some(notice)) if notice.may_be_a_worker() && found.iter().all(|other| other.pid != notice.pid) => {
                    found.push(notice);
                }
                Ok(_) => {}
                // There are no more, or the runtime shuts down.
                Err(_) => break,
            }
        }
        found
    }

    /// Another process takes the place of this worker.
    pub(super) fn forget(&mut self, local_rank: u32) {
        self.raised.retain(|raised| raised.local_rank != local_rank);
    }

    /// Returns whether the worker made progress since the sample before this one; `None` for its first sample.
    fn progressed(&mut self, local_rank: u32, sample: Option<Sample>) -> Option<bool> {
        let raised = self.raised.iter_mut().find(|raised| raised.local_rank == local_rank)?;
        let is_first = !std::mem::replace(&mut raised.is_sampled, true);
        match (std::mem::replace(&mut raised.sample, sample), sample) {
            _ if is_first => None,
            // Workers that were suspended in between, or a machine that was, cannot have made progress.
            (Some(before), Some(after)) if after.since(&before) > self.limit? + exit_progress::LIMIT => None,
            (Some(before), Some(after)) => Some(progressed(&before, &after, ticks_per_second())),
            _ => Some(false),
        }
    }

    pub(super) fn has_ended(&self, local_rank: u32) -> bool {
        let raised = self.raised.iter().find(|raised| raised.local_rank == local_rank);
        raised.is_none_or(|raised| watch::ended(&[raised.process.as_fd()]) == [true])
    }
}

/// One datagram: the pid of its sender, as the kernel reports it, and what it says, which may be anything.
#[derive(Debug, PartialEq, Eq)]
struct Notice {
    pid: i32,
    /// Real user id of the sender, as the kernel reports it.
    uid: u32,
    /// When the exception was recorded, in monotonic nanoseconds. This thread may see the notice much later, and the order of
    /// failures depends on it.
    recorded: Option<u64>,
    text: String,
}

impl Notice {
    /// Reads `NANOSECONDS\nTEXT`; without such a number all of it is the text.
    fn new(pid: i32, uid: u32, said: &[u8]) -> Self {
        let said = String::from_utf8_lossy(said);
        let parts = said.split_once('\n').and_then(|(number, text)| Some((number.parse().ok()?, text)));
        match parts {
            Some((recorded, text)) => Self { pid, uid, recorded: Some(recorded), text: text.to_owned() },
            None => Self { pid, uid, recorded: None, text: said.into_owned() },
        }
    }

    /// False for a process of another user, which is no worker. Workers of root may have given up its rights, and a worker
    /// may gain them (`sudo`).
    fn may_be_a_worker(&self) -> bool {
        let own = nix::unistd::getuid();
        own.is_root() || [own.as_raw(), 0].contains(&self.uid)
    }
}

/// Receives the next datagram; `None` if the kernel added no credentials.
fn receive(notices: &OwnedFd) -> nix::Result<Option<Notice>> {
    let mut control = nix::cmsg_space!(UnixCredentials);
    let mut buffer = [0; MAX_TEXT];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let message = recvmsg::<()>(notices.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let sender = message.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmCredentials(sender) => Some(sender),
        _ => None,
    });
    let size = message.bytes;
    Ok(sender.map(|sender| Notice::new(sender.pid(), sender.uid(), &buffer[..size])))
}

impl Task {
    pub(super) fn watch_exits(&mut self, notices: OwnedFd, limit: Option<Duration>) {
        match register(notices, Interest::READABLE) {
            Ok(notices) => self.exits = Exits { limit, notices: Some(notices), ..Exits::default() },
            Err(error) => {
                let message = format!("workers that raise and do not end are not noticed: {error}");
                self.shared.queue.push(Event::Degraded { message });
            }
        }
    }

    pub(super) async fn on_exits(&mut self, woken: Woken) {
        match woken {
            Woken::Notices => self.on_notices(),
            Woken::Sampled { local_rank, sample } => self.on_exit_sample(local_rank, sample),
        }
        // As for timers: a sender that never stops must not keep the runtime from its sockets and clocks.
        tokio::task::yield_now().await;
    }

    /// Records one slice of the notices that have arrived. Also called before an exit is recorded: a worker that raises and
    /// exits while this thread is delayed would otherwise seem to have ended without an exception.
    pub(super) fn on_notices(&mut self) {
        if matches!(self.current, Current::Starting(_)) {
            // They wait in the socket until the workers are known.
            return;
        }
        for Notice { pid, recorded, text, .. } in self.exits.take() {
            let Current::Running(running) = &self.current else { return };
            // Any other process may have sent one.
            let Some(local_rank) = running.worker_of(pid) else { continue };
            let process = pidfd::open(pid).ok().filter(|process| watch::ended(&[process.as_fd()]) != [true]);
            // The limit holds for a process that lives. Of several programs below one worker the first counts, as long as it
            // lives.
            let limit = match process {
                Some(process) if self.exits.has_ended(local_rank) => {
                    self.exits.forget(local_rank);
                    self.exits.raised.push(Raised { local_rank, process, is_sampled: false, sample: None });
                    self.exits.limit
                }
                Some(_) => continue,
                None => None,
            };
            let now = Stamp::now();
            let seen = recorded.map_or(now, |recorded| Stamp(recorded).min(now));
            let exit = ExitStage::Begun;
            self.input(Input::Raised(WorkerRaised { local_rank, pid, text, seen, limit, exit }));
        }
    }

    /// Samples a worker that has raised, on another thread. The worker as a whole is sampled, not only the process that
    /// raised, because a shell may have started other processes that save.
    pub(super) fn sample_exit(&mut self, local_rank: u32) {
        let Current::Running(running) = &self.current else { return };
        let mut members = running.members.iter().map(|member| member.pid);
        let Some(worker) = members.find(|pid| running.group.rank_of(*pid) == Some(local_rank)) else { return };
        self.exits.sampling.spawn_local(async move {
            let sampling = tokio::task::spawn_blocking(move || exit_progress::sample(worker));
            (local_rank, tokio::time::timeout(exit_progress::LIMIT, sampling).await.ok().map(super::or_panic))
        });
    }

    fn on_exit_sample(&mut self, local_rank: u32, sample: Option<Sample>) {
        // A worker that started the process may still go on.
        if !self.exits.has_ended(local_rank) {
            let progressed = self.exits.progressed(local_rank, sample);
            self.input(Input::ExitSampled { local_rank, progressed });
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
            let (pid, uid) = (std::process::id().cast_signed(), nix::unistd::getuid().as_raw());
            let expected = Notice { pid, uid, recorded, text: text.to_owned() };
            assert!(expected.may_be_a_worker());
            assert_eq!(receive(&notices), Ok(Some(expected)));
        }
    }
}
