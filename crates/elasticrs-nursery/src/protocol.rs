//! Messages between the agent and its nursery (the process that starts the workers), and both ends of the Unix stream
//! socket that connects the two.
//!
//! The agent and its nursery normally come from the same build. [`PROTOCOL`] detects a nursery from another build that
//! is run by mistake. A frame consists of a little-endian `u32` length and a message of that length in the postcard
//! format. Descriptors are sent as `SCM_RIGHTS` with the first byte of the frame to which they belong.
//!
//! Sending never waits for the peer to read, because unsent bytes are queued in this process. The owner of a [`Link`]
//! calls [`Link::receive`] when the socket is readable, and [`Link::flush`] when the socket is writable and
//! [`Link::has_unsent`] is true.
//!
//! The receiver knows which descriptors belong to which frame, because a `recvmsg` returns no data beyond a segment
//! that carries descriptors. Therefore, each frame with descriptors produces exactly one batch of descriptors at the
//! receiver, in order. The batch is incomplete if the receiver has reached its limit on open files.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::socket;
use elasticrs_sys::stage::Stage;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::connections::{LastWord, Release};
use super::fence::Holder;
use crate::spec::ProcessSpec;

/// Version of this protocol. Increment it with every change to this file.
pub const PROTOCOL: u32 = 16;

/// Maximum length of a frame in bytes. The environments of 1024 workers need far less.
const MAX_FRAME: usize = 256 * 1024 * 1024;

/// Numbers of the file descriptors that the nursery process inherits. They are the socket, the agent's pidfd, and the
/// pipe for reporting the progress of starting a worker.
pub const FIXED_FDS: [i32; 3] = [3, 4, 5];

/// A message that is sent as one frame.
pub trait Message {
    /// Maximum number of bytes to queue for a peer that does not read.
    const MAX_UNSENT: usize;

    /// Number of file descriptors that are sent with the message.
    fn descriptors(&self) -> usize;
}

impl Message for Request {
    /// The limit is high, because the agent sends the start requests for all workers of a group at once, and each
    /// request contains the environment of a worker.
    const MAX_UNSENT: usize = 4 * MAX_FRAME;

    fn descriptors(&self) -> usize {
        match self {
            Self::Spawn { process, .. } => process.pass_fds.len(),
            Self::Hold { .. } => 1,
            Self::Fence { .. } | Self::Activity => 2,
            Self::Guard => 3,
            Self::SignalGroup { .. } | Self::Sweep { .. } | Self::Release(_) | Self::Leave => 0,
        }
    }
}

impl Message for Reply {
    /// The limit is high enough for hundreds of thousands of replies, because replies are queued while the agent is
    /// stopped. Each stop or resumption of a worker causes a reply.
    const MAX_UNSENT: usize = 16 * 1024 * 1024;

    fn descriptors(&self) -> usize {
        usize::from(matches!(self, Self::Spawned { .. }))
    }
}

/// Time limits of a clean-up of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepLimits {
    /// How long processes may continue to run before the first signal.
    pub linger: Duration,
    /// Time from SIGTERM to SIGKILL. Zero sends SIGKILL at once.
    pub grace: Duration,
    /// Time to wait for processes that SIGKILL has not ended. The remaining ones are then reported.
    pub give_up: Duration,
}

impl SweepLimits {
    /// Returns the time limits of a clean-up that begins with SIGKILL.
    pub const fn at_once(give_up: Duration) -> Self {
        Self { linger: Duration::ZERO, grace: Duration::ZERO, give_up }
    }
}

/// Selects the processes that a sweep does not kill, because they received a stop signal and may be saving. Their
/// worker was only a wrapper that the signal killed.
///
/// A process is selected if it is in the session of one of the workers and handles the signal. Descendants of selected
/// processes are selected as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Savers {
    /// Pids of the workers. The workers have already exited.
    pub workers: Vec<i32>,
    pub signal: i32,
}

/// A message from the agent to the nursery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Start one worker. The frame carries the descriptors of `pass_fds`, in the same order. Each `source` is an
    /// index into them.
    Spawn {
        process: ProcessSpec,
        /// Signals that the worker ignores, because they were already ignored when the agent was started (`nohup`).
        keep_ignored: Vec<i32>,
    },
    /// Send a signal to the process group of a worker. Unknown pids are ignored.
    ///
    /// The agent uses this request for SIGKILL, because the nursery spares [processes that unlink shared
    /// memory](super::cleaner). Before Linux 6.9, the agent uses it for all signals, because the kernel cannot signal a
    /// process group through a pidfd.
    SignalGroup {
        /// Pid of the worker, which leads its process group.
        pid: i32,
        signal: i32,
    },
    /// Stop all descendants of the nursery process, including workers, and wait until they have exited. The nursery
    /// answers with [`Reply::Swept`].
    ///
    /// A second request before the answer can only shorten the time limits. Both requests then get a single answer. A
    /// request with `left_by` is not answered if a request without `left_by` replaces it. The agent sends the next
    /// request with `left_by` only after the answer.
    Sweep {
        /// Number of this request. A single answer can complete several requests, and contains the number of the last
        /// one. An answer with a lower number does not complete this request.
        number: u32,
        /// Pid of an exited worker. Only the processes that this worker has left behind are stopped. These are never in
        /// the session of another worker, or below a running worker that is a
        /// [subreaper](ProcessSpec::keeps_orphans). `None` to stop all descendants.
        left_by: Option<i32>,
        limits: SweepLimits,
        /// Processes that are not killed, because they may still be saving after a stop signal.
        ///
        /// `None` to kill all processes. A second request before the answer replaces this value.
        savers: Option<Savers>,
    },
    /// Keep the connection whose descriptor is sent with this request open until the nursery process exits.
    ///
    /// Even if the agent dies, the peer sees the connection close only after all of the agent's processes have exited.
    Hold {
        /// True to keep the descriptors that are already held, false to replace them.
        beside: bool,
        /// Secret to send on the descriptor after the agent and all of its processes have exited. `None` to send
        /// nothing.
        word: Option<LastWord>,
    },
    /// Close some or all of the descriptors that earlier [`Self::Hold`] requests keep open.
    Release(Release),
    /// Check the fence deadline whenever the timer expires. The timer and the page that contains the deadline are sent
    /// with this request. See [`super::fence`].
    Fence {
        /// Number of the nursery that receives this request.
        holder: Holder,
    },
    /// Publish the current activity of the nursery process in shared memory, so that a hang can be detected. The memory
    /// page and a timer are sent with this request. See [`super::activity`].
    Activity,
    /// Kill the job's processes if a nursery process cannot do it. The nursery's pidfd, shared memory page and timer
    /// are sent with this request.
    ///
    /// Sent only to the process that guards the nursery process.
    Guard,
    /// Exit at once and leave all descendants running (`--keep-descendants`).
    Leave,
}

/// A message from the nursery to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The nursery is ready. This is its first message.
    Ready {
        /// Protocol version of the nursery's build. See [`PROTOCOL`].
        protocol: u32,
        pid: i32,
    },
    /// A worker was started and runs its program. The worker's pidfd is sent with this message.
    ///
    /// The pidfd is missing if the agent has reached its limit on open files; see [`Stage::Receive`].
    Spawned {
        local_rank: u32,
        /// Pid of the worker, which is also the id of its session and process group.
        pid: i32,
    },
    /// A worker could not be started. If a process was created for it, that process has been reaped.
    SpawnFailed {
        local_rank: u32,
        stage: Stage,
        errno: i32,
        /// Path or program on which the stage failed. Empty if the stage uses none.
        subject: String,
    },
    /// A worker has exited and was reaped. Sent once for each worker.
    Exited {
        pid: i32,
        exit: WorkerExit,
        /// Time at which the nursery noticed the exit. Exits noticed in the same iteration of the nursery's loop have
        /// the same time.
        seen: Stamp,
    },
    /// A worker was stopped by a signal (SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU).
    Stopped {
        pid: i32,
        signal: i32,
    },
    Continued {
        pid: i32,
    },
    /// The nursery process is killing all workers and their descendants, because the agent's lease was not renewed in
    /// time. Sent before the exits of the workers are reported.
    Fenced,
    /// A [`Request::Hold`] or [`Request::Fence`] failed.
    NotGuarded {
        /// Error number. `EMFILE` means that the nursery holds the maximum number of links, or did not receive a
        /// descriptor because of its limit on open files.
        errno: i32,
    },
    /// A clean-up of leftover processes is complete.
    Swept {
        /// Number of the last request that this message answers.
        number: u32,
        outcome: SweepOutcome,
    },
}

/// Outcome of cleaning up the processes that workers left behind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepOutcome {
    /// The first 64 processes that had to be signalled, not including workers.
    pub ended: Vec<Descendant>,
    /// Number of processes that had to be signalled but are not listed in `ended`.
    pub more: u32,
    /// Processes, including workers, that could not be killed in time (state D).
    pub stuck: Vec<Descendant>,
    /// Processes that were not killed, because they have left their worker's session and have reset the token.
    pub spared: Vec<Descendant>,
    /// Pids of processes, including workers, that have exited but cannot be reaped yet, because a tracer holds them.
    pub held: Vec<i32>,
}

/// A process in the result of a sweep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descendant {
    pub pid: i32,
    /// The kernel's short name of the process, at most 15 bytes. Empty if the process was gone.
    pub command: String,
}

const HEADER: usize = size_of::<u32>();
const CHUNK: usize = 64 * 1024;

/// The agent's end of the connection to its nursery.
pub type AgentLink = Link<Request, Reply>;
/// The nursery's end of the connection to its agent.
pub type NurseryLink = Link<Reply, Request>;

/// One end of the connection between the agent and its nursery. Sends messages of type `Out` and receives messages of
/// type `In`.
#[derive(Debug)]
pub struct Link<Out, In> {
    socket: OwnedFd,
    unsent: VecDeque<Frame>,
    unsent_bytes: usize,
    received: Received,
    kinds: PhantomData<fn(&Out) -> In>,
}

#[derive(Debug)]
struct Frame {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

impl<Out: Message + Serialize, In: Message + DeserializeOwned> Link<Out, In> {
    /// Takes over a connected Unix stream socket and makes it non-blocking.
    pub fn new(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        let socket = socket.into();
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self { socket, unsent: VecDeque::new(), unsent_bytes: 0, received: Received::default(), kinds: PhantomData })
    }

    /// Queues a message, and sends as many queued bytes as the socket accepts.
    ///
    /// Closes `fds` in this process once they are sent. Returns `InvalidInput` if the number of descriptors differs
    /// from [`Message::descriptors`] or exceeds the kernel's limit, or if the frame is too large. Returns `OutOfMemory`
    /// if queueing the message would exceed [`Message::MAX_UNSENT`] because the peer does not read. Other errors come
    /// from the socket.
    pub fn send(&mut self, message: &Out, fds: Vec<OwnedFd>) -> io::Result<()> {
        if fds.len() != message.descriptors() || fds.len() > socket::MAX_DESCRIPTORS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let frame = Frame { bytes: encode(message)?, sent: 0, fds };
        if self.unsent_bytes + frame.size() > Out::MAX_UNSENT {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "the other end does not read"));
        }
        self.unsent_bytes += frame.size();
        self.unsent.push_back(frame);
        self.flush()
    }

    /// Sends as many queued bytes as the socket accepts.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.unsent.front_mut() {
            match frame.send(&self.socket) {
                Ok(()) if frame.sent == frame.bytes.len() => {
                    self.unsent_bytes -= frame.size();
                    self.unsent.pop_front();
                }
                Ok(()) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// True if bytes are queued. The owner should then call [`Link::flush`] once the socket is writable.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns the next message and its descriptors. `None` if no complete message has arrived yet.
    ///
    /// Returns fewer descriptors than [`Message::descriptors`] if this process has reached its limit on open files. The
    /// error is `UnexpectedEof` if the other end is closed, and `InvalidData` if the bytes are not a valid message.
    pub fn receive(&mut self) -> io::Result<Option<(In, Vec<OwnedFd>)>> {
        loop {
            if let Some(message) = self.received.next()? {
                return Ok(Some(message));
            }
            match self.received.read(&self.socket) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

impl<Out, In> AsFd for Link<Out, In> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<Out, In> AsRawFd for Link<Out, In> {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Frame {
    /// Returns the memory that the queued frame uses, in bytes. Counts the struct itself, too, because it is larger
    /// than the content of a small frame.
    fn size(&self) -> usize {
        self.bytes.len() + size_of::<Self>()
    }

    fn send(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        let raw: Vec<RawFd> = self.fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        let bytes = [IoSlice::new(&self.bytes[self.sent..])];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        self.sent += sendmsg::<()>(socket.as_raw_fd(), &bytes, control, flags, None)?;
        // Do not send the descriptors again, because they were attached to the first byte.
        self.fds.clear();
        Ok(())
    }
}

fn encode<M: Serialize>(message: &M) -> io::Result<Vec<u8>> {
    let mut bytes = postcard::to_extend(message, vec![0; HEADER]).map_err(invalid)?;
    let length = bytes.len() - HEADER;
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too large"));
    }
    let header = u32::try_from(length).expect("below MAX_FRAME").to_le_bytes();
    bytes[..HEADER].copy_from_slice(&header);
    Ok(bytes)
}

fn invalid(error: postcard::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Received bytes and descriptors that have not been returned as messages yet.
#[derive(Debug, Default)]
struct Received {
    /// Buffer for received bytes. It is kept between calls, because zeroing a new buffer would take longer than the
    /// rest of a call.
    buffer: Vec<u8>,
    /// Number of received bytes in `buffer`.
    filled: usize,
    /// Number of bytes at the start of `buffer` that were already returned as messages.
    used: usize,
    batches: VecDeque<Vec<OwnedFd>>,
}

impl Received {
    fn read(&mut self, socket: &OwnedFd) -> io::Result<()> {
        self.buffer.copy_within(self.used..self.filled, 0);
        (self.filled, self.used) = (self.filled - self.used, 0);
        if self.filled == self.buffer.len() {
            // Double the buffer, so that a large frame needs only a few calls.
            self.buffer.resize(CHUNK.max(2 * self.filled), 0);
        } else if self.filled == 0 && self.buffer.len() > CHUNK {
            self.buffer.truncate(CHUNK);
            self.buffer.shrink_to_fit();
        }
        let chunk = socket::receive(socket, &mut self.buffer[self.filled..])?;
        self.filled += chunk.bytes;
        if chunk.truncated || !chunk.fds.is_empty() {
            self.batches.push_back(chunk.fds);
        }
        if chunk.bytes == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    fn next<M: Message + DeserializeOwned>(&mut self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let unused = &self.buffer[self.used..self.filled];
        let Some((header, rest)) = unused.split_first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MAX_FRAME {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the frame is too large"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message: M = postcard::from_bytes(body).map_err(invalid)?;
        self.used += HEADER + length;
        let fds = if message.descriptors() > 0 { self.batches.pop_front().unwrap_or_default() } else { Vec::new() };
        Ok(Some((message, fds)))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use proptest::prelude::*;

    use super::*;
    use crate::spec::{PassedFd, ProcessSpec};

    fn ends() -> (AgentLink, NurseryLink) {
        let (a, b) = UnixStream::pair().unwrap();
        (AgentLink::new(a).unwrap(), NurseryLink::new(b).unwrap())
    }

    fn spawn(descriptors: u32, argument: usize) -> Request {
        let pass_fds = (0..descriptors).zip(3..).map(|(source, target)| PassedFd { source, target }).collect();
        let argv = vec![CString::new("x".repeat(argument)).unwrap()];
        let process = ProcessSpec { pass_fds, ..ProcessSpec::new(argv, Vec::new()) };
        Request::Spawn { process, keep_ignored: Vec::new() }
    }

    fn nulls(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
    }

    fn arbitrary_request() -> impl Strategy<Value = Request> {
        prop_oneof![
            // Generates some messages that are larger than a socket buffer, so that frames are sent and received in
            // parts.
            (0..5_u32, prop_oneof![4 => 0..200_usize, 1 => 200_000..600_000_usize])
                .prop_map(|(n, size)| spawn(n, size)),
            (any::<i32>(), any::<i32>()).prop_map(|(pid, signal)| Request::SignalGroup { pid, signal }),
            Just(Request::Leave),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn requests_arrive_in_order_each_with_its_descriptors(
            requests in prop::collection::vec((arbitrary_request(), any::<bool>()), 1..20)
        ) {
            let (mut agent, mut nursery) = ends();
            let mut arrived = Vec::new();
            let mut receive = |nursery: &mut NurseryLink| while let Some((request, fds)) = nursery.receive().unwrap() {
                assert_eq!(fds.len(), request.descriptors());
                arrived.push(request);
            };
            for (request, read_now) in &requests {
                agent.send(request, nulls(request.descriptors())).unwrap();
                if *read_now {
                    receive(&mut nursery);
                }
            }
            while agent.has_unsent() {
                receive(&mut nursery);
                agent.flush().unwrap();
            }
            receive(&mut nursery);
            let sent: Vec<_> = requests.into_iter().map(|(request, _)| request).collect();
            assert_eq!(arrived, sent);
        }

        #[test]
        fn random_bytes_are_received_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let (mut a, b) = UnixStream::pair().unwrap();
            let mut nursery = NurseryLink::new(b).unwrap();
            a.write_all(&bytes).unwrap();
            while let Ok(Some(_)) = nursery.receive() {}
        }
    }

    #[test]
    fn paths_that_are_not_utf_8_arrive() {
        let odd = Some(CString::from(c"log\xff/\n"));
        let stdio = [None, odd.clone(), None];
        let process = ProcessSpec { cwd: odd, stdio, ..ProcessSpec::new(Vec::new(), Vec::new()) };
        let request = Request::Spawn { process, keep_ignored: Vec::new() };
        let (mut agent, mut nursery) = ends();
        agent.send(&request, Vec::new()).unwrap();
        assert_eq!(nursery.receive().unwrap().unwrap().0, request);
    }

    #[test]
    fn sending_to_a_peer_that_does_not_read_does_not_block() {
        let (mut agent, _nursery) = ends();
        while !agent.has_unsent() {
            agent.send(&spawn(1, 10_000), nulls(1)).unwrap();
        }
        agent.send(&Request::Leave, Vec::new()).unwrap();
    }

    #[test]
    fn the_queue_for_a_peer_that_does_not_read_is_limited() {
        let (agent, mut nursery) = ends();
        let reply = Reply::Continued { pid: 1 };
        // Send enough messages to exceed the limit. The number is finite, so that the test finishes even if the limit
        // is missing.
        let refused = (0..Reply::MAX_UNSENT / size_of::<Frame>() + 10_000)
            .map(|_| nursery.send(&reply, Vec::new()))
            .find_map(Result::err);
        assert_eq!(refused.map(|error| error.kind()), Some(io::ErrorKind::OutOfMemory));
        drop(agent);
    }

    #[test]
    fn the_end_of_the_stream_is_an_error_after_the_last_message() {
        let (mut agent, mut nursery) = ends();
        agent.send(&Request::Leave, Vec::new()).unwrap();
        drop(agent);
        assert_eq!(nursery.receive().unwrap().unwrap().0, Request::Leave);
        assert_eq!(nursery.receive().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(nursery.send(&Reply::Continued { pid: 1 }, Vec::new()).is_err());
    }

    #[test]
    fn a_message_with_the_wrong_number_of_descriptors_is_not_sent() {
        let (mut agent, mut nursery) = ends();
        for (request, fds) in [(spawn(2, 0), 1), (Request::Leave, 1), (spawn(254, 0), 254)] {
            assert_eq!(agent.send(&request, nulls(fds)).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert!(nursery.receive().unwrap().is_none());
    }

    #[test]
    fn descriptors_beyond_the_limit_are_lost_but_the_next_frame_is_complete() {
        let (mut agent, mut nursery) = ends();
        agent.send(&spawn(3, 0), nulls(3)).unwrap();
        agent.send(&spawn(2, 0), nulls(2)).unwrap();
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // Leave room for exactly one more descriptor by setting the limit just above the lowest free number.
        let free = OwnedFd::from(File::open("/dev/null").unwrap()).as_raw_fd();
        let limit = libc::rlim_t::try_from(free).unwrap() + 1;
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, limit, hard).unwrap();
        let (_, cut_off) = nursery.receive().unwrap().unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        assert_eq!(cut_off.len(), 1);
        assert_eq!(nursery.receive().unwrap().unwrap().1.len(), 2);
    }
}
