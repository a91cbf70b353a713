//! Receives the notices that workers send, and samples the exits of workers that have recorded an uncaught exception. The
//! notices of workers that can copy their state are described in [`super::keepers`].
//!
//! A notice of an exception is a datagram that the exception hook of a worker sends to an abstract Unix socket of the attempt. It
//! contains the time and the last part of the traceback. The kernel adds the sender's pid, which must belong to a
//! worker or to a descendant of one. The traceback is only shown to the user, and no decision of the core depends on
//! it. Notices arrive even if a file system hangs, because no file is involved.

use std::collections::HashSet;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use elasticrs_runtime::readiness::register;
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, UnixCredentials, bind, getsockname,
    recvmsg, setsockopt, socket, sockopt,
};
use nix::unistd::{Uid, getuid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;

use super::keepers::KeepNotice;
use super::running::Running;
use crate::supervisor::event::{ExitStage, Origin, WorkerRaised};
use crate::supervisor::exit_progress::{self, Sample, progressed, ticks_per_second};

/// Maximum length of a notice in bytes. Workers respect it, so only notices from unrelated programs are truncated.
const MAX_TEXT: usize = 4096;

/// Maximum number of notices to receive at once. The limit is needed because any process in the network namespace
/// can send notices. Each notice is expensive, because finding the sender's worker requires reading `/proc`.
const SLICE: usize = 64;

/// How long to cache the pids of processes that belong to no worker. The time is short, because the kernel may reuse a
/// cached pid for a process of a worker.
const STRANGER_LIFETIME: Duration = Duration::from_secs(1);

/// Opens the socket for notices in the abstract namespace, under a name chosen by the kernel. The socket needs no file,
/// and its name disappears when the descriptor is closed.
pub(in crate::supervisor) fn open_notices() -> io::Result<(OwnedFd, String)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let notices = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
    setsockopt(&notices, sockopt::PassCred, &true)?;
    bind(notices.as_raw_fd(), &UnixAddr::new_unnamed())?;
    let address: UnixAddr = getsockname(notices.as_raw_fd())?;
    let name = address.as_abstract().ok_or_else(|| io::Error::other("the kernel gave the socket no name"))?;
    Ok((notices, String::from_utf8_lossy(name).into_owned()))
}

/// Workers that have recorded an uncaught exception and whose exits are being watched.
#[derive(Debug, Default)]
pub(super) struct RaisedWorkers {
    limit: Option<Duration>,
    notices: Option<AsyncFd<OwnedFd>>,
    /// Processes that have recorded an uncaught exception.
    raised: Vec<Raised>,
    strangers: Strangers,
    /// Samples in progress. Each task returns the local rank of the worker, and the sample, or `None` if sampling
    /// timed out.
    sampling: JoinSet<(u32, Option<Sample>)>,
}

/// Event returned by [`RaisedWorkers::next`].
#[derive(Debug, Clone, Copy)]
pub(super) enum RaisedEvent {
    /// The socket may contain notices.
    Notices,
    /// Result of measuring the progress of an exiting worker. `sample` is `None` if the measurement timed out.
    Sampled { local_rank: u32, sample: Option<Sample> },
}

#[derive(Debug)]
struct Raised {
    local_rank: u32,
    process: OwnedFd,
    is_sampled: bool,
    /// Last measurement of the worker's progress. `None` before the first measurement, or if the last one timed out.
    sample: Option<Sample>,
}

/// Cache of processes that sent an exception notice but do not belong to any worker.
#[derive(Debug, Default)]
struct Strangers {
    pids: HashSet<i32>,
    /// Time at which the oldest pid in the set was added. `None` if the set is empty.
    since: Option<Instant>,
}

impl Strangers {
    /// Returns the local rank of the worker to which the process belongs, or `None` if it belongs to no worker.
    ///
    /// Calls `look_up` only if the process is not in the cache, because `look_up` has to read `/proc`.
    fn worker_of(&mut self, pid: i32, now: Instant, look_up: impl FnOnce(i32) -> Option<u32>) -> Option<u32> {
        if self.since.is_some_and(|since| now.saturating_duration_since(since) >= STRANGER_LIFETIME) {
            *self = Self::default();
        }
        if self.pids.contains(&pid) {
            return None;
        }
        let local_rank = look_up(pid);
        if local_rank.is_none() {
            self.since.get_or_insert(now);
            self.pids.insert(pid);
        }
        local_rank
    }
}

impl RaisedWorkers {
    /// Starts to receive notices about uncaught exceptions in the workers of the next group. `limit` is the time limit
    /// for a worker to exit after an exception. `None` means no limit.
    pub(super) fn watch(&mut self, notices: OwnedFd, limit: Option<Duration>) -> io::Result<()> {
        let notices = register(notices, Interest::READABLE)?;
        *self = Self { limit, notices: Some(notices), ..Self::default() };
        Ok(())
    }

    pub(super) fn are_watched(&self) -> bool {
        self.notices.is_some()
    }

    /// Waits for a notice about an uncaught exception, or for the result of a progress check. Cancel-safe.
    pub(super) async fn next(&mut self) -> RaisedEvent {
        let notices = async {
            match &self.notices {
                Some(notices) => match notices.readable().await {
                    // Leave the socket marked as readable, because `take` clears the mark after it has read all
                    // datagrams.
                    Ok(mut ready) => ready.retain_ready(),
                    // The runtime is shutting down.
                    Err(_) => std::future::pending().await,
                },
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = notices => RaisedEvent::Notices,
            Some(sampled) = self.sampling.join_next() => {
                let (local_rank, sample) = super::or_panic(sampled);
                RaisedEvent::Sampled { local_rank, sample }
            }
        }
    }

    /// Returns the socket for notices.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.notices.as_ref().map(|notices| notices.get_ref().as_fd())
    }

    /// Returns the local rank of the worker to which the sender of a notice belongs; `None` if it belongs to no worker.
    pub(super) fn worker_of(&mut self, pid: i32, running: &Running) -> Option<u32> {
        self.strangers.worker_of(pid, Instant::now(), |pid| running.worker_of(pid))
    }

    /// Receives up to [`SLICE`] notices. Skips senders that cannot be workers, and keeps only the first exception from
    /// each sender.
    pub(super) fn take(&self) -> Vec<Notice> {
        let mut found: Vec<Notice> = Vec::new();
        let mut raised = HashSet::new();
        let Some(notices) = &self.notices else { return found };
        let own = getuid();
        for _ in 0..SLICE {
            // First call `receive` directly, because a notice may have arrived that the reactor has not seen yet. If
            // there is no notice, call `receive` again through `try_io`, which clears the readiness.
            let again = |_| notices.try_io(Interest::READABLE, |notices| Ok(receive(notices)?));
            match receive(notices.get_ref()).or_else(again) {
                Ok(Some(datagram)) if datagram.may_be_of_a_worker(own) => match KeepNotice::of(&datagram.said) {
                    Some(notice) => found.push(Notice::Keep(datagram.pid, notice)),
                    None if raised.insert(datagram.pid) => {
                        found.push(Notice::Exception(ExceptionNotice::new(datagram.pid, &datagram.said)));
                    }
                    None => {}
                },
                Ok(_) => {}
                // There are no more notices, or the runtime is shutting down.
                Err(_) => break,
            }
        }
        found
    }

    /// Handles a notice about an uncaught exception, and watches the exit of the sender.
    ///
    /// Returns `None` if the sender does not belong to a worker, or if another process of the same worker is already
    /// being watched.
    pub(super) fn add(&mut self, notice: ExceptionNotice, running: &Running) -> Option<WorkerRaised> {
        let ExceptionNotice { pid, recorded, origin, text, .. } = notice;
        let local_rank = self.worker_of(pid, running)?;
        let process = process::open_pidfd(pid).ok().filter(|process| process::have_ended(&[process.as_fd()]) != [true]);
        // Watch the sender's exit, unless the sender has already exited. Ignore the notice if another process of the
        // same worker is already being watched.
        let limit = match process {
            Some(process) if self.has_exited(local_rank) => {
                self.forget(local_rank);
                self.raised.push(Raised { local_rank, process, is_sampled: false, sample: None });
                self.limit
            }
            Some(_) => return None,
            None => None,
        };
        let now = Stamp::now();
        let seen = recorded.map_or(now, |recorded| Stamp(recorded).min(now));
        Some(WorkerRaised { local_rank, pid, text, seen, limit, origin, exit: ExitStage::Begun })
    }

    /// Measures the progress of an exiting worker, on another thread. Includes the worker's descendants, because the
    /// worker may be a shell whose child is saving a checkpoint.
    pub(super) fn sample(&mut self, local_rank: u32, worker: i32) {
        self.sampling.spawn_local(async move {
            let sampling = tokio::task::spawn_blocking(move || exit_progress::sample(worker));
            (local_rank, tokio::time::timeout(exit_progress::LIMIT, sampling).await.ok().map(super::or_panic))
        });
    }

    /// Stops watching the exit of the worker with this local rank.
    pub(super) fn forget(&mut self, local_rank: u32) {
        self.raised.retain(|raised| raised.local_rank != local_rank);
    }

    /// Returns true if the worker has made progress since its previous sample. `None` if progress cannot be
    /// determined, for example because this is the first sample. A sample that timed out is treated as no progress.
    pub(super) fn progressed(&mut self, local_rank: u32, sample: Option<Sample>) -> Option<bool> {
        let raised = self.raised.iter_mut().find(|raised| raised.local_rank == local_rank)?;
        let is_first = !std::mem::replace(&mut raised.is_sampled, true);
        match (std::mem::replace(&mut raised.sample, sample), sample) {
            _ if is_first => None,
            // Draw no conclusion from samples that are so far apart: the workers or the whole machine must have been
            // suspended in between.
            (Some(before), Some(after)) if after.since(&before) > self.limit? + exit_progress::LIMIT => None,
            (Some(before), Some(after)) => Some(progressed(&before, &after, ticks_per_second())),
            _ => Some(false),
        }
    }

    /// Clears the cache of pids that belong to no worker. Called when a process becomes a worker, because its pid may
    /// still be in the cache.
    pub(super) fn forget_strangers(&mut self) {
        self.strangers = Strangers::default();
    }

    /// Returns true if the process that recorded the worker's exception has exited, or if no exception was recorded.
    ///
    /// The process may be a descendant, so the worker itself may still be running.
    pub(super) fn has_exited(&self, local_rank: u32) -> bool {
        let raised = self.raised.iter().find(|raised| raised.local_rank == local_rank);
        raised.is_none_or(|raised| process::have_ended(&[raised.process.as_fd()]) == [true])
    }
}

/// A datagram from the socket for notices. `pid` and `uid` (the sender's real user ID) are reliable, because they come
/// from the kernel. The sender controls the text.
#[derive(Debug, PartialEq, Eq)]
struct Datagram {
    pid: i32,
    uid: u32,
    said: Vec<u8>,
}

/// A notice that a worker has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Notice {
    Exception(ExceptionNotice),
    /// Pid of the sender, and what it says about copies of its state.
    Keep(i32, KeepNotice),
}

/// A notice that a process has recorded an uncaught exception. Only `pid` is reliable, because it comes from the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExceptionNotice {
    pid: i32,
    /// Time at which the exception was recorded, in nanoseconds of the monotonic clock. `None` if the sender did not
    /// send a time. Failures are ordered by this time, because notices may be received much later than they are sent.
    recorded: Option<u64>,
    origin: Origin,
    text: String,
}

impl ExceptionNotice {
    /// Parses a datagram of the form `NANOSECONDS ORIGIN\nTEXT`. The origin may be missing. If the datagram does not
    /// start with a number, the whole datagram is the text.
    fn new(pid: i32, said: &[u8]) -> Self {
        let said = String::from_utf8_lossy(said);
        let parts = said.split_once('\n').and_then(|(first, text)| {
            let (number, origin) = first.split_once(' ').unwrap_or((first, Origin::Unknown.name()));
            Some((number.parse().ok()?, Origin::of_name(origin)?, text))
        });
        match parts {
            Some((recorded, origin, text)) => Self { pid, recorded: Some(recorded), origin, text: text.to_owned() },
            None => Self { pid, recorded: None, origin: Origin::Unknown, text: said.into_owned() },
        }
    }
}

impl Datagram {
    /// Returns true if the sender's user ID may belong to a worker. Accepts the agent's own user ID (`own`), and root,
    /// because a worker may use `sudo`. If the agent runs as root, accepts any user ID, because workers may have
    /// dropped their privileges.
    fn may_be_of_a_worker(&self, own: Uid) -> bool {
        own.is_root() || [own.as_raw(), 0].contains(&self.uid)
    }
}

/// Receives the next datagram. Returns `None` if the kernel did not add credentials.
fn receive(notices: &OwnedFd) -> nix::Result<Option<Datagram>> {
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
    Ok(sender.map(|sender| Datagram { pid: sender.pid(), uid: sender.uid(), said: buffer[..size].to_vec() }))
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    #[test]
    fn the_sender_of_a_notice_is_identified_by_the_kernel() {
        let (notices, name) = open_notices().expect("a socket");
        assert_eq!(receive(&notices), Err(nix::errno::Errno::EAGAIN));
        let address = SocketAddr::from_abstract_name(name).expect("an address");
        let long = "x".repeat(2 * MAX_TEXT);
        let cases = [
            ("", None, Origin::Unknown, ""),
            ("4711 is what I say", None, Origin::Unknown, "4711 is what I say"),
            ("12\nE: x\nmore", Some(12), Origin::Unknown, "E: x\nmore"),
            ("12 own\nE: x\nmore", Some(12), Origin::Own, "E: x\nmore"),
            ("12 peer\nE: x\nmore", Some(12), Origin::Peer, "E: x\nmore"),
            ("12 unknown\nE: x", Some(12), Origin::Unknown, "E: x"),
            ("12 other\nE: x", None, Origin::Unknown, "12 other\nE: x"),
            ("x\ny", None, Origin::Unknown, "x\ny"),
            (&long, None, Origin::Unknown, &long[..MAX_TEXT]),
        ];
        for (said, recorded, origin, text) in cases {
            UnixDatagram::unbound().expect("a socket").send_to_addr(said.as_bytes(), &address).expect("sent");
            let (pid, uid) = (std::process::id().cast_signed(), getuid().as_raw());
            let datagram = receive(&notices).expect("a datagram").expect("credentials");
            assert_eq!((datagram.pid, datagram.uid), (pid, uid));
            let expected = ExceptionNotice { pid, recorded, origin, text: text.to_owned() };
            assert_eq!(ExceptionNotice::new(pid, &datagram.said), expected);
        }
    }

    #[test]
    fn a_notice_from_another_user_is_refused_unless_one_of_them_is_root() {
        let (root, own, other) = (0, 1000, 1001);
        let is_accepted =
            |agent, uid| Datagram { pid: 7, uid, said: Vec::new() }.may_be_of_a_worker(Uid::from_raw(agent));
        assert!(!is_accepted(own, other));
        assert!(is_accepted(own, own) && is_accepted(own, root));
        assert!(is_accepted(root, root) && is_accepted(root, other));
    }

    #[test]
    fn the_lookup_of_an_unknown_sender_is_cached_for_a_limited_time() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        let look_up = |strangers: &mut Strangers, pid, now, worker| {
            let mut count = 0;
            let found = strangers.worker_of(pid, now, |_| {
                count += 1;
                worker
            });
            (found, count)
        };
        let late = start + STRANGER_LIFETIME.saturating_sub(Duration::from_nanos(1));
        assert_eq!(look_up(&mut strangers, 7, start, None), (None, 1));
        assert_eq!(look_up(&mut strangers, 8, late, None), (None, 1));
        for pid in [7, 8] {
            assert_eq!(look_up(&mut strangers, pid, late, Some(0)), (None, 0));
        }
        for _ in 0..2 {
            assert_eq!(look_up(&mut strangers, 9, late, Some(1)), (Some(1), 1));
        }
        // The whole cache expires at once, because each pid in it may have been reused by now.
        let end = start + STRANGER_LIFETIME;
        for pid in [7, 8] {
            assert_eq!(look_up(&mut strangers, pid, end, Some(0)), (Some(0), 1));
        }
        assert_eq!(look_up(&mut strangers, 7, end, None), (None, 1));
        assert_eq!(look_up(&mut strangers, 7, end, None), (None, 0));
    }
}
