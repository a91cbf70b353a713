//! The followed files: what is new in them, and what is wrong with them.
//!
//! - **FOLLOW-1** a file is read only while its destination has room: the file is the buffer.
//! - **FOLLOW-2** files take turns, one block each, so that a rank that floods starves nobody.
//! - **FOLLOW-3** a stream ends at the end of its file, and only after [`Follower::finish`]; everything before it has
//!   then been put on its output.
//! - **FOLLOW-4** a file that shrinks below what was read of it was truncated (copy and truncate): it is read from its
//!   beginning.
//! - **FOLLOW-5** nothing is polled where the kernel tells: a time-out exists only for file systems that can change
//!   behind the kernel's back, without inotify, and while something waits to be shown or checked.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::statfs::fstatfs;
use nix::sys::statvfs::fstatvfs;
use nix::sys::uio::pread;
use nix::unistd::geteuid;

use super::console::Output;
use super::lines::LineSplitter;
use super::{Notice, Notify, StreamId, StreamInfo};

/// One turn of one file.
const BLOCK: usize = 64 * 1024;

/// While data arrives, and once after it, the file system is asked this often whether it is full.
const SPACE_INTERVAL: Duration = Duration::from_secs(5);

/// Bounds of the polling interval: from the first data to an idle file.
const POLL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Network file systems and FUSE by the magic number of `statfs`: NFS, SMB, SMB2, CIFS, FUSE, AFS, Coda, Ceph, 9P,
/// Lustre, GPFS, `BeeGFS`.
const CHANGES_UNSEEN: [u32; 12] = [
    0x6969,
    0x517b,
    0xfe53_4d42,
    0xff53_4d42,
    0x6573_5546,
    0x5346_414f,
    0x7375_7245,
    0x00c3_6400,
    0x0102_1997,
    0x0bd0_0bd0,
    0x4750_4653,
    0x1983_0326,
];

/// A file that was opened before its writer started.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) info: Arc<StreamInfo>,
    pub(super) file: File,
    /// What is before it was written by somebody else, earlier.
    pub(super) offset: u64,
    pub(super) output: Option<usize>,
}

#[derive(Debug)]
struct Followed {
    info: Arc<StreamInfo>,
    file: File,
    output: Option<usize>,
    watch: Option<WatchDescriptor>,
    splitter: LineSplitter,
    /// In the file.
    offset: u64,
    /// Bytes read, and how many of them are on the console.
    taken: u64,
    shown: u64,
    /// The output's sequence number behind the last byte that was put there.
    put_until: u64,
    is_queued: bool,
    is_polled: bool,
    phase: Phase,
    told: Told,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Its writers are gone: the end of the file is the end of the stream.
    Finishing,
    /// Its last byte was put on the output, or there is none to put it on.
    Ended,
}

/// What has been reported of a file.
#[derive(Debug, Default)]
struct Told {
    trouble: bool,
    full: bool,
}

/// All followed files.
pub(super) struct Follower {
    files: BTreeMap<StreamId, Followed>,
    queue: VecDeque<StreamId>,
    inotify: Option<Inotify>,
    watches: HashMap<WatchDescriptor, Vec<StreamId>>,
    block: Box<[u8]>,
    space_check: Option<Instant>,
    poll_at: Option<Instant>,
    poll_interval: Duration,
    notify: Notify,
}

impl Follower {
    pub(super) fn new(notify: Notify) -> Self {
        let mut follower = Self {
            files: BTreeMap::new(),
            queue: VecDeque::new(),
            inotify: None,
            watches: HashMap::new(),
            block: vec![0; BLOCK].into_boxed_slice(),
            space_check: None,
            poll_at: None,
            poll_interval: POLL.0,
            notify,
        };
        match Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK) {
            Ok(inotify) => follower.inotify = Some(inotify),
            Err(errno) => follower.fall_back(errno),
        }
        follower
    }

    /// No more instances or watches for this user: from now on every file without a watch is polled.
    fn fall_back(&mut self, errno: Errno) {
        (self.notify)(Notice::Polling { errno });
    }

    pub(super) fn inotify_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn add(&mut self, opened: Opened, now: Instant) {
        let Opened { info, file, offset, output } = opened;
        let id = info.id;
        let watch = output.and_then(|_| self.watch(id, &info));
        let is_polled = output.is_some() && (watch.is_none() || changes_unseen(&file));
        if is_polled && self.poll_at.is_none() {
            self.poll_at = Some(now + self.poll_interval);
        }
        let followed = Followed {
            info,
            file,
            output,
            watch,
            splitter: LineSplitter::default(),
            offset,
            taken: 0,
            shown: 0,
            put_until: 0,
            is_queued: false,
            is_polled,
            phase: Phase::Open,
            told: Told::default(),
        };
        self.files.insert(id, followed);
        // Something may have been written before the watch was there.
        self.enqueue(id);
    }

    fn watch(&mut self, id: StreamId, info: &StreamInfo) -> Option<WatchDescriptor> {
        match self.inotify.as_ref()?.add_watch(&info.stream.path, AddWatchFlags::IN_MODIFY) {
            Ok(watch) => {
                self.watches.entry(watch).or_default().push(id);
                Some(watch)
            }
            Err(errno) => {
                self.fall_back(errno);
                None
            }
        }
    }

    /// The writers of this stream are gone.
    pub(super) fn finish(&mut self, id: StreamId) {
        let Some(file) = self.files.get_mut(&id) else { return };
        if file.phase == Phase::Open {
            file.phase = Phase::Finishing;
        }
        file.check_space(&self.notify);
        self.enqueue(id);
    }

    fn enqueue(&mut self, id: StreamId) {
        if let Some(file) = self.files.get_mut(&id)
            && !file.is_queued
        {
            file.is_queued = true;
            self.queue.push_back(id);
        }
    }

    /// Returns how many are wanted.
    fn enqueue_all(&mut self, is_wanted: impl Fn(&Followed) -> bool) -> usize {
        let wanted: Vec<StreamId> = self.files.iter().filter(|(_, f)| is_wanted(f)).map(|(id, _)| *id).collect();
        for id in &wanted {
            self.enqueue(*id);
        }
        wanted.len()
    }

    /// Takes what inotify has to say; one buffer of events at a time.
    pub(super) fn take_events(&mut self) {
        let Some(Ok(events)) = self.inotify.as_ref().map(Inotify::read_events) else { return };
        for event in events {
            if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                self.enqueue_all(|_| true);
            } else if let Some(streams) = self.watches.get(&event.wd) {
                for id in streams.clone() {
                    self.enqueue(id);
                }
            }
        }
    }

    /// Gives every file whose destination has room one turn.
    pub(super) fn read(&mut self, outputs: &mut [Output], now: Instant) {
        for _ in 0..self.queue.len() {
            let Some(id) = self.queue.pop_front() else { break };
            let Some(file) = self.files.get_mut(&id) else { continue };
            let output = file.output.map(|index| &mut outputs[index]);
            if output.as_ref().is_some_and(|output| !output.has_room()) {
                self.queue.push_back(id);
                continue;
            }
            file.is_queued = false;
            let taken = file.taken;
            let more = file.take_turn(output, &mut self.block, now, &self.notify);
            if file.taken > taken {
                self.space_check.get_or_insert(now + SPACE_INTERVAL);
                self.poll_interval = POLL.0;
            }
            if more {
                self.enqueue(id);
            }
        }
    }

    /// Whether [`Self::read`] would do something.
    pub(super) fn can_read(&self, outputs: &[Output]) -> bool {
        let outputs_of = self.queue.iter().filter_map(|id| self.files.get(id)).map(|file| file.output);
        outputs_of.into_iter().any(|output| output.is_none_or(|index| outputs[index].has_room()))
    }

    /// Does what is due now, in those files whose destination has room.
    pub(super) fn tick(&mut self, outputs: &mut [Output], now: Instant) {
        for file in self.files.values_mut() {
            if let Some(output) = file.ready_output(outputs) {
                file.tick(output, now);
            }
        }
        if self.space_check.is_some_and(|at| at <= now) {
            self.space_check = None;
            self.files.values_mut().for_each(|file| file.check_space(&self.notify));
        }
        if self.poll_at.is_some_and(|at| at <= now) {
            self.poll_interval = (self.poll_interval * 2).min(POLL.1);
            let polled = self.enqueue_all(|file| file.is_polled);
            self.poll_at = (polled > 0).then_some(now + self.poll_interval);
        }
    }

    /// When [`Self::tick`] has something to do.
    pub(super) fn deadline(&self, outputs: &mut [Output]) -> Option<Instant> {
        let lines = self.files.values().filter(|file| file.ready_output(outputs).is_some());
        lines.filter_map(|file| file.splitter.deadline()).chain(self.space_check).chain(self.poll_at).min()
    }

    /// Accounts for what has been written, and lets go of the streams that are through. Returns those.
    pub(super) fn settle(&mut self, outputs: &mut [Output]) -> Vec<StreamId> {
        for output in outputs.iter_mut() {
            while let Some(mark) = output.pop_reached() {
                if let Some(file) = self.files.get_mut(&mark.stream) {
                    file.shown = mark.taken;
                }
            }
        }
        let mut through = Vec::new();
        for (id, file) in &mut self.files {
            if file.phase != Phase::Open && file.is_through(outputs) {
                through.push(*id);
            }
        }
        for id in &through {
            self.remove(*id);
        }
        through
    }

    fn remove(&mut self, id: StreamId) {
        let Some(watch) = self.files.remove(&id).and_then(|file| file.watch) else { return };
        let Some(streams) = self.watches.get_mut(&watch) else { return };
        streams.retain(|other| *other != id);
        if streams.is_empty() {
            self.watches.remove(&watch);
            if let Some(inotify) = &self.inotify {
                // It can only fail when the kernel has removed the watch already, together with the file.
                let _gone_already = inotify.rm_watch(watch);
            }
        }
    }
}

impl Followed {
    /// The destination, when it takes bytes now.
    fn ready_output<'a>(&self, outputs: &'a mut [Output]) -> Option<&'a mut Output> {
        let output = &mut outputs[self.output?];
        (self.phase != Phase::Ended && output.has_room()).then_some(output)
    }

    /// Reads one block. Returns whether there may be more.
    fn take_turn(&mut self, output: Option<&mut Output>, block: &mut [u8], now: Instant, notify: &Notify) -> bool {
        let Some(output) = output.filter(|output| !output.is_lost()) else {
            if self.phase == Phase::Finishing {
                self.phase = Phase::Ended;
            }
            return false;
        };
        let more = match pread(&self.file, block, self.offset.cast_signed()) {
            Ok(0) if self.was_truncated() => {
                self.offset = 0;
                self.end_line(output);
                true
            }
            Ok(0) => {
                self.end(output);
                false
            }
            Ok(n) => {
                output.compact();
                let (id, prefix) = (self.info.id, &self.info.stream.prefix);
                self.splitter.push(&block[..n], now, |unit| output.put(id, prefix, unit));
                self.offset += n as u64;
                self.taken += n as u64;
                self.mark(output);
                // A short read is the end of the file, and what comes later is told by a later event.
                n == block.len() || self.phase == Phase::Finishing
            }
            Err(Errno::EINTR) => true,
            Err(errno) => {
                if !std::mem::replace(&mut self.told.trouble, true) {
                    notify(self.info.trouble(errno));
                }
                self.end(output);
                false
            }
        };
        self.info.behind.store(self.behind(), Ordering::Relaxed);
        more
    }

    fn tick(&mut self, output: &mut Output, now: Instant) {
        if self.splitter.deadline().is_some_and(|at| at <= now) {
            let (id, prefix) = (self.info.id, &self.info.stream.prefix);
            self.splitter.tick(now, |unit| output.put(id, prefix, unit));
            self.mark(output);
        }
    }

    fn end(&mut self, output: &mut Output) {
        if self.phase == Phase::Finishing {
            self.end_line(output);
            self.phase = Phase::Ended;
        }
    }

    fn end_line(&mut self, output: &mut Output) {
        let (id, prefix) = (self.info.id, &self.info.stream.prefix);
        self.splitter.finish(|unit| output.put(id, prefix, unit));
        self.mark(output);
    }

    fn mark(&mut self, output: &mut Output) {
        self.put_until = output.accepted();
        output.mark(self.info.id, self.taken - self.splitter.held() as u64);
    }

    fn check_space(&mut self, notify: &Notify) {
        if !self.told.full && is_full(&self.file) {
            self.told.full = true;
            notify(self.info.trouble(Errno::ENOSPC));
        }
    }

    fn was_truncated(&self) -> bool {
        self.file.metadata().is_ok_and(|stat| stat.len() < self.offset)
    }

    fn is_through(&mut self, outputs: &[Output]) -> bool {
        self.info.behind.store(self.behind(), Ordering::Relaxed);
        let Some(output) = self.output.map(|index| &outputs[index]) else { return true };
        output.is_lost() || (self.phase == Phase::Ended && output.written() >= self.put_until)
    }

    /// Bytes of the file that are not on the console.
    fn behind(&self) -> u64 {
        let size = self.file.metadata().map_or(self.offset, |stat| stat.len());
        size.saturating_sub(self.offset) + (self.taken - self.shown)
    }
}

fn changes_unseen(file: &File) -> bool {
    // An unknown file system is asked again, too: that costs one wake-up per second.
    let Ok(fs) = fstatfs(file) else { return true };
    // The type's width depends on the platform; the magic numbers have 32 bits.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the magic number has 32 bits")]
    let magic = fs.filesystem_type().0 as u32;
    CHANGES_UNSEEN.contains(&magic)
}

/// No block is left for us. File systems without a size (0 blocks) are never full.
fn is_full(file: &File) -> bool {
    fstatvfs(file).is_ok_and(|fs| {
        let left = if geteuid().is_root() { fs.blocks_free() } else { fs.blocks_available() };
        fs.blocks() > 0 && left == 0
    })
}
