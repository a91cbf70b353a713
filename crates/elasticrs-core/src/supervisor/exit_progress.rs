//! Measures the CPU use and the I/O of a worker. The measurement shows whether the exit after an uncaught exception
//! makes progress, and whether a worker that missed its heartbeat deadline is busy. Such a worker may be flushing
//! files, uploading data, or waiting for a CPU.
//!
//! [`sample`] adds up the CPU time and the transferred bytes of the worker and its descendants. It runs on its own
//! thread, because it reads `/proc` and may block. The pure functions [`progressed`] and [`is_busy`] compare two samples
//! and make all decisions.

use std::iter;
use std::time::{Duration, Instant};

use elasticrs_nursery::tree::{descendants, threads};
use elasticrs_sys::clock::nanoseconds;
use elasticrs_sys::procfs::{self, Stat};

/// Time limit for one sample. Reading `/proc/PID/io` blocks while the process is inside `exec`, which may hang if the
/// program is on a dead network file system.
pub(super) const LIMIT: Duration = Duration::from_secs(2);
const MAX_PROCESSES: usize = 64;
const MAX_THREADS: usize = 256;
/// A worker is busy if it spends at least 1/`BUSY_SHARE` of the time on a CPU or waiting for a CPU. Threads that only
/// poll spend less.
const BUSY_SHARE: u32 = 20;
/// Number of bytes that must be read between two samples to count as progress. Threads that poll `/proc` for monitoring
/// read fewer bytes, so they do not count.
const MANY_BYTES: u64 = 64 * 1024;
/// Fields of `/proc/PID/stat` that hold CPU time in clock ticks: the user and system time of the process, followed by
/// the user and system time of its reaped children.
const CPU_TICKS: std::ops::RangeInclusive<usize> = 14..=17;

/// Total resource usage of a worker and its descendants at one point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sample {
    at: Instant,
    /// CPU time in clock ticks.
    cpu: u64,
    /// Total time that threads were ready to run but waited for a CPU, in nanoseconds.
    delayed: u64,
    read: u64,
    written: u64,
    /// True if a thread is in uninterruptible sleep (state D), usually waiting for a disk or a network file system.
    waits_for_disk: bool,
}

/// Samples a worker and its descendants. May block while one of these processes is inside `exec`; the caller applies
/// [`LIMIT`].
pub(super) fn sample(worker: i32) -> Sample {
    let mut sample = Sample { at: Instant::now(), cpu: 0, delayed: 0, read: 0, written: 0, waits_for_disk: false };
    let below = descendants(worker, &[]).map(|listed| listed.pid).take(MAX_PROCESSES);
    for pid in iter::once(worker).chain(below) {
        sample.add(pid);
    }
    sample
}

impl Sample {
    /// Returns the time between an earlier sample and this one.
    pub(super) fn since(&self, before: &Self) -> Duration {
        self.at.saturating_duration_since(before.at)
    }

    fn add(&mut self, pid: i32) {
        if let Some(stat) = Stat::of(pid) {
            self.cpu += CPU_TICKS.filter_map(|field| stat.field::<u64>(field)).sum::<u64>();
        }
        let io = procfs::read(pid, "io").unwrap_or_default();
        let count = |name: &str| {
            let value = io.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        self.read += count("rchar:");
        self.written += count("wchar:");
        for thread in threads(pid).into_iter().flatten().take(MAX_THREADS) {
            self.waits_for_disk |= Stat::in_folder(&thread).and_then(|stat| stat.field(3)) == Some('D');
            // The fields of `schedstat` are the nanoseconds spent on a CPU, the nanoseconds spent waiting for a CPU,
            // and the number of time slices.
            let schedule = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
            self.delayed += schedule.split_whitespace().nth(1).and_then(|value| value.parse().ok()).unwrap_or(0);
        }
    }
}

/// Returns true if the worker made progress between two samples.
pub(super) fn progressed(before: &Sample, after: &Sample, ticks_per_second: u64) -> bool {
    after.waits_for_disk
        || uses_cpu(before, after, ticks_per_second, BUSY_SHARE)
        || after.written > before.written
        || after.read.saturating_sub(before.read) >= MANY_BYTES
}

/// Returns true if the worker was busy between two samples. A worker is busy if it used or waited for a CPU for at
/// least half of the time, or if it read and wrote at least [`MANY_BYTES`] in total. This check is stricter than
/// [`progressed`], because background threads of a hung worker may still poll and write small amounts to a file.
pub(super) fn is_busy(before: &Sample, after: &Sample, ticks_per_second: u64) -> bool {
    let bytes = after.read.saturating_sub(before.read).saturating_add(after.written.saturating_sub(before.written));
    uses_cpu(before, after, ticks_per_second, 2) || bytes >= MANY_BYTES
}

/// Returns true if the worker spent at least 1/`share` of the time between two samples on a CPU or waiting for a CPU.
fn uses_cpu(before: &Sample, after: &Sample, ticks_per_second: u64, share: u32) -> bool {
    let span = nanoseconds(after.since(before));
    let cpu = after.cpu.saturating_sub(before.cpu).saturating_mul(1_000_000_000 / ticks_per_second.max(1));
    // Use saturating subtraction, because the totals shrink when a descendant exits between the samples.
    let busy = cpu.saturating_add(after.delayed.saturating_sub(before.delayed));
    busy > 0 && busy >= span / u64::from(share)
}

/// Returns the number of clock ticks per second. `/proc` reports CPU times in clock ticks.
pub(super) fn ticks_per_second() -> u64 {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    ticks.and_then(|ticks| u64::try_from(ticks).ok()).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Child, Command, Stdio};

    use super::*;

    const HANG: Duration = Duration::from_secs(20);

    fn quiet() -> Sample {
        Sample { at: Instant::now(), cpu: 0, delayed: 0, read: 0, written: 0, waits_for_disk: false }
    }

    #[test]
    fn cpu_time_scheduling_delay_and_disk_io_count_as_progress() {
        let before = quiet();
        let after = Sample { at: before.at + Duration::from_secs(5), ..before };
        let is_progress = |change: fn(&mut Sample)| {
            let mut after = after;
            change(&mut after);
            progressed(&before, &after, 100)
        };
        assert!(!is_progress(|_| {}));
        assert!(!is_progress(|after| after.cpu = 24), "threads that poll");
        assert!(is_progress(|after| after.cpu = 25));
        assert!(is_progress(|after| after.delayed = 250_000_000), "the machine is busy");
        assert!(!is_progress(|after| after.read = MANY_BYTES - 1));
        assert!(is_progress(|after| after.read = MANY_BYTES));
        assert!(is_progress(|after| after.written = 1));
        assert!(is_progress(|after| after.waits_for_disk = true));
        assert!(
            !progressed(&Sample { cpu: 7, delayed: 9, read: 1, written: 2, ..before }, &after, 100),
            "one has ended"
        );
    }

    #[test]
    fn only_much_cpu_time_or_many_bytes_count_as_work() {
        let before = quiet();
        let after = Sample { at: before.at + Duration::from_secs(1), ..before };
        let is_work = |change: fn(&mut Sample)| {
            let mut after = after;
            change(&mut after);
            is_busy(&before, &after, 100)
        };
        assert!(!is_work(|after| after.cpu = 49) && is_work(|after| after.cpu = 50));
        assert!(is_work(|after| after.delayed = 500_000_000), "the machine is busy");
        assert!(!is_work(|after| after.written = MANY_BYTES - 1), "a log of a monitoring thread");
        assert!(is_work(|after| (after.read, after.written) = (MANY_BYTES / 2, MANY_BYTES / 2)));
        assert!(!is_work(|after| after.waits_for_disk = true), "a dead network file system");
    }

    fn shell(program: &str) -> Child {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn bytes_written_by_a_child_process_count_as_progress() {
        // `cat` copies its input to its output. It is a child of the shell, so all bytes are written by a descendant of
        // the sampled process.
        let mut child = shell("cat; true");
        let pid = child.id().cast_signed();
        let mut output = child.stdout.take().unwrap();
        let mut input = child.stdin.take().unwrap();
        let mut byte = [0];
        let mut copies = |count| {
            input.write_all(b"a").unwrap();
            std::io::Read::read_exact(&mut output, &mut byte).unwrap();
            // Repeat the sample until it includes the new byte, because the kernel may count a written byte with a
            // delay.
            let deadline = Instant::now() + HANG;
            loop {
                let sample = sample(pid);
                if sample.written == count {
                    return sample;
                }
                assert!(Instant::now() < deadline, "{sample:?}");
                std::thread::yield_now();
            }
        };
        let (before, after) = (copies(1), copies(2));
        drop(input);
        child.wait().unwrap();
        assert!(progressed(&before, &after, ticks_per_second()));
        assert_eq!((sample(pid).written, sample(pid).cpu), (0, 0), "it is gone");
    }
}
