//! Reads new bytes from the followed log files, and detects problems with the files.
//!
//! - **FOLLOW-1** A file is read only while its destination has room, so that the file is the only buffer.
//! - **FOLLOW-2** Files are read in turn, one block at a time, so that a rank with a lot of output does not delay the
//!   others.
//! - **FOLLOW-3** A stream ends only after [`Follower::finish`], once all bytes of its file have been passed to its
//!   output.
//! - **FOLLOW-4** If a file is smaller than the number of bytes already read, it was truncated (copy and truncate), and
//!   is read again from its beginning.
//! - **FOLLOW-5** Files are polled only if inotify is unavailable, or on network and FUSE file systems, which can
//!   change without the kernel's knowledge. For other files, a timeout is set only after data has arrived.
//! - **FOLLOW-6** A watch fires only once, because a notification for each write would halve the speed of writes. After
//!   the notification, the file is read in every round until some rounds ([`QUIET_ROUNDS`]) bring no new data. The file
//!   is then watched again, and read once more for bytes that were written before the new watch was set.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use elasticrs_sys::clock::Stamp;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::statfs::fstatfs;
use nix::sys::statvfs::fstatvfs;
use nix::sys::uio::pread;
use nix::unistd::geteuid;

use super::console::Output;
use super::lines::{LineSplitter, Unit};
use super::matching::LineFilter;
use super::{Notice, Notify, StreamId, StreamInfo, To};

/// Maximum number of bytes to read from one file before the next file gets its turn.
const BLOCK: usize = 64 * 1024;

/// Numbers of consecutive empty reads after which a file is watched with inotify again. The first number is for busy
/// files (see [`BUSY`]), the second for all other files.
const QUIET_ROUNDS: (u8, u8) = (4, 1);

/// A file is busy if less than this time passed between its last two reads that returned data.
const BUSY: Duration = Duration::from_millis(2);

/// Interval between checks for a full file system. After data stops arriving, one last check is made.
const SPACE_INTERVAL: Duration = Duration::from_secs(5);

/// Minimum and maximum polling interval. The interval is reset to the minimum when data arrives, and doubles up
/// to the maximum while all files are idle.
const POLL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// `statfs` magic numbers of file systems on which inotify may miss changes: NFS, SMB, SMB2, CIFS, FUSE, AFS,
/// Coda, Ceph, 9P, Lustre, GPFS, `BeeGFS`.
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

/// A log file that is open and ready to be followed.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) info: Arc<StreamInfo>,
    pub(super) file: File,
    /// Offset at which following starts. The bytes before it were in the file when it was opened, and are not shown.
    pub(super) offset: u64,
    /// File that the matching lines are copied to. `None` if the lines go to another destination.
    pub(super) copy: Option<File>,
}

#[derive(Debug)]
struct Followed {
    info: Arc<StreamInfo>,
    file: File,
    output: Option<usize>,
    watch: Option<WatchDescriptor>,
    splitter: LineSplitter,
    filter: Option<LineFilter>,
    offset: u64,
    /// Number of unread bytes after `offset`, as of the last count.
    unread: u64,
    /// Position in the output after the last bytes of this file, as returned by [`Output::accepted`].
    put_until: u64,
    is_queued: bool,
    is_polled: bool,
    /// Number of consecutive reads without new data. `None` while inotify or polling is used to notice new data.
    quiet_rounds: Option<u8>,
    /// Value of `quiet_rounds` at which the file is watched by inotify again.
    patience: u8,
    last_data: Option<Instant>,
    /// Value of [`StreamInfo::is_stalled`] at the last [`Follower::settle`].
    is_stalled: bool,
    phase: Phase,
    reported: ReportedProblems,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// All writers of the file are gone, so the stream is complete once the file has been read to its end.
    Finishing,
    /// All bytes of the file have been passed to the output, or writing to the output has failed.
    Finished,
}

/// Problems with a file that were already reported.
#[derive(Debug, Default)]
struct ReportedProblems {
    unreadable: bool,
    full: bool,
}

/// Reads the followed files, and keeps the state of each file.
pub(super) struct Follower {
    files: BTreeMap<StreamId, Followed>,
    queue: VecDeque<StreamId>,
    inotify: Option<Inotify>,
    watches: HashMap<WatchDescriptor, Vec<StreamId>>,
    block: Box<[u8]>,
    space_check: Option<Instant>,
    poll_at: Option<Instant>,
    poll_interval: Duration,
    polling_reported: bool,
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
            polling_reported: false,
            notify,
        };
        match Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK) {
            Ok(inotify) => follower.inotify = Some(inotify),
            Err(errno) => follower.report_polling(errno),
        }
        follower
    }

    /// Reports that files are polled because inotify failed with this error. Only the first call reports it.
    fn report_polling(&mut self, errno: Errno) {
        if !std::mem::replace(&mut self.polling_reported, true) {
            (self.notify)(Notice::Polling { errno });
        }
    }

    pub(super) fn inotify_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn add(
        &mut self,
        info: Arc<StreamInfo>,
        (file, offset): (File, u64),
        output: Option<usize>,
        now: Instant,
    ) {
        let id = info.id;
        let is_polled = output.is_some() && changes_unseen(&file);
        let filter = match &info.stream.to {
            To::File(lines) => Some(LineFilter::new(lines)),
            To::Nowhere | To::Console(_) => None,
        };
        let followed = Followed {
            info,
            file,
            output,
            watch: None,
            splitter: LineSplitter::default(),
            filter,
            offset,
            unread: 0,
            put_until: 0,
            is_queued: false,
            is_polled,
            quiet_rounds: None,
            patience: QUIET_ROUNDS.1,
            last_data: None,
            is_stalled: false,
            phase: Phase::Open,
            reported: ReportedProblems::default(),
        };
        self.files.insert(id, followed);
        if output.is_some() {
            self.watch(id);
        }
        if self.files.values().any(|file| file.is_polled) {
            self.poll_at.get_or_insert(now + self.poll_interval);
        }
        // Read the file now, because data may have been written before the watch was set.
        self.enqueue(id);
    }

    /// Sets a watch on a file. If that fails, the file is polled instead.
    fn watch(&mut self, id: StreamId) {
        let Some(file) = self.files.get_mut(&id) else { return };
        // Watch the open descriptor rather than the path, because after a rename the path may refer to another file.
        let path = format!("/proc/self/fd/{}", file.file.as_raw_fd());
        let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ONESHOT;
        match self.inotify.as_ref().map(|inotify| inotify.add_watch(path.as_str(), flags)) {
            Some(Ok(watch)) => {
                file.watch = Some(watch);
                self.watches.entry(watch).or_default().push(id);
            }
            Some(Err(errno)) => {
                (file.watch, file.is_polled) = (None, true);
                self.report_polling(errno);
            }
            None => file.is_polled = true,
        }
    }

    /// Records that the writers of a stream are gone, so the stream is complete once its file has been read to the
    /// end.
    pub(super) fn finish(&mut self, id: StreamId) {
        let Some(file) = self.files.get_mut(&id) else { return };
        if file.phase == Phase::Open {
            file.phase = Phase::Finishing;
        }
        file.quiet_rounds = None;
        file.check_space(&self.notify);
        file.count_unread();
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

    /// Adds every file for which `is_wanted` returns true to the read queue. Returns the number of these files.
    fn enqueue_all(&mut self, is_wanted: impl Fn(&Followed) -> bool) -> usize {
        let wanted: Vec<StreamId> = self.files.iter().filter(|(_, f)| is_wanted(f)).map(|(id, _)| *id).collect();
        for id in &wanted {
            self.enqueue(*id);
        }
        wanted.len()
    }

    /// Handles pending inotify events. Reads only once, so events that do not fit into the read buffer stay pending.
    pub(super) fn take_events(&mut self) {
        let Some(Ok(events)) = self.inotify.as_ref().map(Inotify::read_events) else { return };
        for event in events {
            if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                let all: Vec<StreamId> = self.files.keys().copied().collect();
                for id in all {
                    self.activate(id, true);
                }
                self.watches.clear();
                continue;
            }
            // Remove the watch only on IN_IGNORED, which follows shortly after IN_MODIFY. If the watch were removed
            // earlier, a new watch could get the same number, and IN_IGNORED would then remove the new watch.
            let is_over = event.mask.contains(AddWatchFlags::IN_IGNORED);
            let streams = if is_over { self.watches.remove(&event.wd) } else { self.watches.get(&event.wd).cloned() };
            for id in streams.unwrap_or_default() {
                self.activate(id, is_over);
            }
        }
    }

    fn activate(&mut self, id: StreamId, is_watch_over: bool) {
        let Some(file) = self.files.get_mut(&id) else { return };
        file.quiet_rounds.get_or_insert(0);
        if is_watch_over {
            file.watch = None;
        }
        self.enqueue(id);
    }

    /// Adds every file to the read queue, except files that are waiting for inotify or for the next poll.
    pub(super) fn begin_round(&mut self) {
        self.enqueue_all(|file| file.quiet_rounds.is_some());
    }

    /// True if at least one file can be read now, without waiting for inotify, the next poll, or space in an output
    /// buffer.
    pub(super) fn has_active(&self, outputs: &mut [Output]) -> bool {
        self.files.values().any(|file| file.quiet_rounds.is_some() && file.ready_output(outputs).is_some())
    }

    /// Stops reading the files whose lines went to this output, because writing to the output has failed. Each file
    /// stays registered until [`Self::finish`] is called for it.
    pub(super) fn drop_output(&mut self, lost: usize) {
        let streams: Vec<StreamId> =
            self.files.iter().filter(|(_, file)| file.output == Some(lost)).map(|(id, _)| *id).collect();
        for id in streams {
            self.unwatch(id);
            if let Some(file) = self.files.get_mut(&id) {
                (file.output, file.is_polled, file.quiet_rounds) = (None, false, None);
            }
        }
    }

    /// Reads one block from each queued file whose destination has room.
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
            let (has_taken, more) = file.take_turn(output, &mut self.block, now, &self.notify);
            self.on_taken(id, has_taken, now);
            if has_taken {
                self.space_check.get_or_insert(now + SPACE_INTERVAL);
                self.poll_interval = POLL.0;
            }
            if more {
                self.enqueue(id);
            }
        }
    }

    /// Decides after a read how to notice the next data: with a watch, or by reading the file in every round.
    fn on_taken(&mut self, id: StreamId, has_taken: bool, now: Instant) {
        let Some(file) = self.files.get_mut(&id).filter(|file| file.phase == Phase::Open) else { return };
        if has_taken {
            let is_busy = file.last_data.is_some_and(|last| now.saturating_duration_since(last) < BUSY);
            file.patience = if is_busy { QUIET_ROUNDS.0 } else { QUIET_ROUNDS.1 };
            file.last_data = Some(now);
            if file.quiet_rounds.is_some() || file.watch.is_none() {
                file.quiet_rounds = Some(0);
            }
            return;
        }
        let Some(rounds) = &mut file.quiet_rounds else { return };
        *rounds = rounds.saturating_add(1);
        if *rounds >= file.patience && file.watch.is_none() {
            file.quiet_rounds = None;
            self.watch(id);
            self.enqueue(id);
        }
    }

    /// True if [`Self::read`] would read from at least one file.
    pub(super) fn can_read(&self, outputs: &[Output]) -> bool {
        let outputs_of = self.queue.iter().filter_map(|id| self.files.get(id)).map(|file| file.output);
        outputs_of.into_iter().any(|output| output.is_none_or(|index| outputs[index].has_room()))
    }

    /// Performs the actions that are due: shows text that was held back, checks for full file systems, and polls
    /// files.
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

    /// Returns the next time at which [`Self::tick`] must be called.
    pub(super) fn deadline(&self, outputs: &mut [Output]) -> Option<Instant> {
        let lines = self.files.values().filter(|file| file.ready_output(outputs).is_some());
        lines.filter_map(|file| file.splitter.deadline()).chain(self.space_check).chain(self.poll_at).min()
    }

    /// Updates the counters of the streams after writes. Removes and returns the streams that are complete.
    pub(super) fn settle(&mut self, outputs: &mut [Output]) -> Vec<StreamId> {
        let mut through = Vec::new();
        for (id, file) in &mut self.files {
            file.publish_stall(outputs);
            if file.phase != Phase::Open && file.is_through(outputs) {
                through.push(*id);
            }
        }
        for id in &through {
            self.unwatch(*id);
            if let Some(output) = self.files.remove(id).and_then(|file| file.output) {
                outputs[output].close_own();
            }
        }
        through
    }

    fn unwatch(&mut self, id: StreamId) {
        let Some(watch) = self.files.get_mut(&id).and_then(|file| file.watch.take()) else { return };
        let Some(streams) = self.watches.get_mut(&watch) else { return };
        streams.retain(|other| *other != id);
        if streams.is_empty() {
            self.watches.remove(&watch);
            if let Some(inotify) = &self.inotify {
                // Ignore an error, because it only means that the kernel has already removed the watch.
                let _gone_already = inotify.rm_watch(watch);
            }
        }
    }
}

impl Followed {
    /// Returns the output for the lines of this file. `None` if the output cannot accept more lines now.
    fn ready_output<'a>(&self, outputs: &'a mut [Output]) -> Option<&'a mut Output> {
        let output = &mut outputs[self.output?];
        (self.phase != Phase::Finished && output.has_room()).then_some(output)
    }

    /// Reads one block. Returns whether any data was read, and whether there may be more.
    fn take_turn(
        &mut self,
        output: Option<&mut Output>,
        block: &mut [u8],
        now: Instant,
        notify: &Notify,
    ) -> (bool, bool) {
        let Some(output) = output else {
            if self.phase == Phase::Finishing {
                self.phase = Phase::Finished;
            }
            return (false, false);
        };
        match pread(&self.file, block, self.offset.cast_signed()) {
            Ok(0) if self.was_truncated() => {
                self.offset = 0;
                self.end_line(output);
                (false, true)
            }
            Ok(0) => {
                self.end(output);
                (false, false)
            }
            Ok(n) => {
                output.compact();
                let show = show(&self.info, self.filter.as_mut(), output);
                self.splitter.push(&block[..n], now, show);
                if let Some(counts) = &self.info.counts {
                    counts.add(&block[..n]);
                }
                self.offset += n as u64;
                self.info.read_at.store(Stamp::now().0, Ordering::Relaxed);
                self.info.is_stalled.store(true, Ordering::Release);
                self.put_until = output.accepted();
                let is_full_block = n == block.len();
                if is_full_block {
                    self.count_unread();
                } else {
                    self.unread = 0;
                }
                // A short read means that the end of the file was reached.
                (true, is_full_block || self.phase == Phase::Finishing)
            }
            Err(Errno::EINTR) => (false, true),
            Err(errno) => {
                if !std::mem::replace(&mut self.reported.unreadable, true) {
                    notify(self.info.trouble(errno));
                }
                self.end(output);
                (false, false)
            }
        }
    }

    fn tick(&mut self, output: &mut Output, now: Instant) {
        if self.splitter.deadline().is_some_and(|at| at <= now) {
            self.splitter.tick(now, show(&self.info, self.filter.as_mut(), output));
            self.put_until = output.accepted();
            self.info.is_stalled.store(true, Ordering::Release);
        }
    }

    fn end(&mut self, output: &mut Output) {
        if self.phase == Phase::Finishing {
            self.end_line(output);
            self.phase = Phase::Finished;
        }
    }

    fn end_line(&mut self, output: &mut Output) {
        self.splitter.finish(show(&self.info, self.filter.as_mut(), output));
        self.put_until = output.accepted();
    }

    fn check_space(&mut self, notify: &Notify) {
        if !self.reported.full && is_full(&self.file) {
            self.reported.full = true;
            notify(self.info.trouble(Errno::ENOSPC));
        }
    }

    fn was_truncated(&self) -> bool {
        self.file.metadata().is_ok_and(|stat| stat.len() < self.offset)
    }

    fn is_through(&self, outputs: &[Output]) -> bool {
        let Some(output) = self.output.map(|index| &outputs[index]) else { return true };
        self.phase == Phase::Finished && output.written() >= self.put_until
    }

    /// Sets the shared flag `is_stalled` if the file has unread data, or if its output is full or missing. Otherwise,
    /// clears the flag. Flush the outputs before this call, because a flush may make room in a full output.
    fn publish_stall(&mut self, outputs: &[Output]) {
        let is_stalled = self.unread > 0 || self.output.is_none_or(|index| !outputs[index].has_room());
        if self.is_stalled && !is_stalled && self.info.read_at.load(Ordering::Relaxed) > 0 {
            // Treat the current time as the time of the last write to the file, because the actual time is unknown.
            self.info.read_at.store(Stamp::now().0, Ordering::Relaxed);
        }
        self.is_stalled = is_stalled;
        self.info.is_stalled.store(is_stalled, Ordering::Release);
    }

    fn count_unread(&mut self) {
        self.unread = self.file.metadata().map_or(0, |stat| stat.len().saturating_sub(self.offset));
    }
}

/// Returns a function that passes pieces of text to an output. With a filter, the function passes only matching lines.
fn show<'a>(
    info: &'a StreamInfo,
    mut filter: Option<&'a mut LineFilter>,
    output: &'a mut Output,
) -> impl FnMut(Unit<'_>) + 'a {
    let (id, prefix) = (info.id, &info.stream.prefix);
    move |unit| match &mut filter {
        Some(filter) => filter.pass(unit, |unit| output.put(id, prefix, unit)),
        None => output.put(id, prefix, unit),
    }
}

fn changes_unseen(file: &File) -> bool {
    // Poll the file if the type of its file system is unknown, because polling is cheap: one wake-up per second.
    let Ok(fs) = fstatfs(file) else { return true };
    // Cast to 32 bits, because the magic numbers have 32 bits and the type is wider on some platforms.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the magic number has 32 bits")]
    let magic = fs.filesystem_type().0 as u32;
    CHANGES_UNSEEN.contains(&magic)
}

/// True if no free block is available to this user. False for file systems that report no size (0 blocks).
fn is_full(file: &File) -> bool {
    fstatvfs(file).is_ok_and(|fs| {
        let left = if geteuid().is_root() { fs.blocks_free() } else { fs.blocks_available() };
        fs.blocks() > 0 && left == 0
    })
}
