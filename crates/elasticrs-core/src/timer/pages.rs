//! The memory page in which a worker stores its heartbeats.
//!
//! The page consists of 64-bit words in native byte order. `python/elasticrs/_engine/inside/heartbeats.py` writes it. The writer
//! and the reader never wait for each other. A worker can write anything to its page, so this module ignores values
//! that cannot be the time of a heartbeat of this worker. Otherwise, an invalid word could hide a hang, or distort a
//! learned limit.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;

use elasticrs_sys::page::Page;
use nix::sys::stat::fstat;

use super::hang::{Beat, RankState, Section};

/// Layout of the shared memory page for heartbeats. All constants are indices or sizes in units of 64-bit words.
const COUNT: usize = 1;
const STEP: usize = 2;
const LIMIT: usize = 3;
const EXIT: usize = 4;
const NAME: usize = 8;
const NAME_WORDS: usize = 8;
const TIMES: usize = 64;
const TIMES_KEPT: usize = 128;
/// Bit of the word `STEP` that is set if the worker counts its steps across restarts.
const GLOBAL: u64 = 1 << 63;
/// Bit of the word `STEP` that is set if the steps are optimizer steps that this library has counted.
const AUTOMATIC: u64 = 1 << 62;
/// Value of the word `LIMIT` while the worker is in a program section without a time limit.
const UNLIMITED: u64 = u64::MAX;
/// Tolerance, in nanoseconds, for heartbeat times in the future. The reader reads the clock before it reads the shared
/// memory, and the worker may store a heartbeat in between.
const SLACK: u64 = 1_000_000_000;

/// Heartbeat page of one worker.
#[derive(Debug)]
pub struct HeartbeatPage {
    page: Page,
    made: u64,
}

impl HeartbeatPage {
    /// Creates an empty shared memory page for the heartbeats of a worker that will start after the time `made`.
    ///
    /// Fails if sealed memory is not supported. Unsealed memory is not used instead, because the worker could truncate
    /// it.
    pub fn new(made: u64) -> io::Result<Self> {
        Page::sealed(c"elasticrs-heartbeats").map(|page| Self { page, made })
    }

    /// Returns a descriptor of the page for the worker, and the value of `ELASTICRS_HEARTBEAT`. The value contains a
    /// descriptor number, the device and the inode, so that the worker does not mistake another file for the page.
    /// `number` is the descriptor's number in the worker, or `None` if it is the same number as in this process.
    pub fn share(&self, number: Option<RawFd>) -> io::Result<(OwnedFd, String)> {
        let descriptor = self.page.as_fd().try_clone_to_owned()?;
        let facts = fstat(&descriptor)?;
        let number = number.unwrap_or(descriptor.as_raw_fd());
        Ok((descriptor, format!("{number}:{}:{}", facts.st_dev, facts.st_ino)))
    }

    /// Maps a worker's heartbeat page from a descriptor that [`Self::share`] returned. Fails with `EINVAL` if the
    /// descriptor refers to another file.
    ///
    /// Heartbeats before the time `made` are ignored.
    pub fn of(descriptor: OwnedFd, made: u64) -> io::Result<Self> {
        Page::map(descriptor).map(|page| Self { page, made })
    }

    /// Reads the last heartbeat from the page.
    pub fn read(&self, now: u64) -> RankState {
        let words = self.page.words();
        self.read_by(|index| words[index].load(Ordering::Acquire), now)
    }

    /// Reads the worker's shared memory. `load` returns the 64-bit word at an index.
    ///
    /// Loads the time limit before the heartbeat times, because the worker writes them in the opposite order. A new
    /// limit is therefore never combined with an outdated heartbeat time.
    fn read_by(&self, mut load: impl FnMut(usize) -> u64, now: u64) -> RankState {
        let (limit, exit) = (load(LIMIT), load(EXIT));
        let name: [u64; NAME_WORDS] = std::array::from_fn(|word| load(NAME + word));
        let step = load(STEP);
        // Read all heartbeat times and use the latest. The heartbeat count cannot be used to find it, because the
        // worker's writes can become visible out of order.
        let can_be = |time: &u64| *time != 0 && (self.made..=now.saturating_add(SLACK)).contains(time);
        let mut times: Vec<u64> = (TIMES..TIMES + TIMES_KEPT).map(&mut load).filter(can_be).collect();
        times.sort_unstable();
        let Some(last) = times.last().copied().filter(|_| load(COUNT) > 0) else { return RankState::NoHeartbeat };
        // The lowest bit of a heartbeat's time is set only if the heartbeat ends a step.
        let steps = times.windows(2).filter(|pair| pair[1] & 1 == 1).map(|pair| pair[1] - pair[0]).collect();
        let section =
            (limit != 0).then(|| Section { name: name_of(&name), limit: (limit != UNLIMITED).then_some(limit) });
        // When its main program returns, a worker sends a heartbeat and stores the heartbeat's time in `EXIT`. A later
        // heartbeat means that a background thread is still training.
        let is_exiting = exit == last;
        let before_exit = times.iter().rev().nth(1).copied().filter(|_| is_exiting);
        RankState::Heartbeat(Beat {
            last: last.min(now),
            step: (step & !GLOBAL & !AUTOMATIC).checked_sub(1),
            is_global: step & GLOBAL != 0,
            is_automatic: step & AUTOMATIC != 0,
            section,
            is_exiting,
            before_exit,
            steps,
        })
    }
}

fn name_of(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(page: &HeartbeatPage, index: usize, value: u64) {
        page.page.words()[index].store(value, Ordering::Relaxed);
    }

    #[test]
    fn a_shared_heartbeat_page_can_be_opened_from_its_descriptor() {
        let (descriptor, name) = HeartbeatPage::new(0).unwrap().share(None).unwrap();
        assert!(name.starts_with(&format!("{}:", descriptor.as_raw_fd())));
        let theirs = HeartbeatPage::of(descriptor.try_clone().unwrap(), 0).unwrap();
        put(&theirs, TIMES, 51);
        put(&theirs, COUNT, 1);
        let ours = HeartbeatPage::of(descriptor, 0).unwrap();
        assert_eq!(ours.read(99), RankState::Heartbeat(Beat { last: 51, ..Beat::default() }));
        assert!(HeartbeatPage::of(nix::unistd::pipe().unwrap().0, 0).is_err());
    }

    #[test]
    fn an_empty_page_has_no_heartbeat() {
        assert_eq!(HeartbeatPage::new(0).unwrap().read(7), RankState::NoHeartbeat);
    }

    #[test]
    fn bits_of_the_step_say_who_counts_it_and_whether_across_restarts() {
        let page = HeartbeatPage::new(0).unwrap();
        put(&page, TIMES, 51);
        put(&page, COUNT, 1);
        for (word, step, is_global, is_automatic) in [
            (8, Some(7), false, false),
            (GLOBAL | 8, Some(7), true, false),
            (AUTOMATIC | 8, Some(7), false, true),
            (GLOBAL, None, true, false),
        ] {
            put(&page, STEP, word);
            let expected = Beat { last: 51, step, is_global, is_automatic, ..Beat::default() };
            assert_eq!(page.read(99), RankState::Heartbeat(expected));
        }
    }

    #[test]
    fn step_durations_are_the_intervals_that_end_with_a_heartbeat() {
        let page = HeartbeatPage::new(0).unwrap();
        for (place, time) in [(0, 101), (1, 111), (2, 140), (3, 160), (4, 171)] {
            put(&page, TIMES + place, time);
        }
        put(&page, COUNT, 5);
        put(&page, STEP, 4);
        let expected = Beat { last: 171, step: Some(3), steps: vec![10, 11], ..Beat::default() };
        assert_eq!(page.read(1000), RankState::Heartbeat(expected));
    }

    #[test]
    fn implausible_heartbeat_times_are_ignored() {
        let page = HeartbeatPage::new(1000).unwrap();
        put(&page, COUNT, 9);
        for (place, time) in [(0, 7), (1, u64::MAX), (2, 2001 + SLACK)] {
            put(&page, TIMES + place, time);
        }
        assert_eq!(page.read(2000), RankState::NoHeartbeat);
        put(&page, TIMES + 3, 1001);
        put(&page, TIMES + 4, 1501);
        assert_eq!(page.read(2000), RankState::Heartbeat(Beat { last: 1501, steps: vec![500], ..Beat::default() }));
        // The last heartbeat (1501) is later than the time of the read (1400), so the time of the read is returned.
        assert_eq!(page.read(1400), RankState::Heartbeat(Beat { last: 1400, steps: vec![500], ..Beat::default() }));
    }

    /// Simulates a worker (`heartbeats.py`) that writes to the shared memory while it is being read. Repeats the test
    /// for every moment at which the writes can start.
    #[test]
    fn a_section_limit_is_never_read_without_the_heartbeat_that_started_it() {
        const STARTED: u64 = 1001;
        const LEAVE: u64 = 90_001;
        let enter = [(TIMES + 1, 50_001), (COUNT, 2), (NAME, u64::from_ne_bytes(*b"evaluati")), (LIMIT, 7)];
        let leave = [(TIMES + 2, LEAVE), (COUNT, 3), (LIMIT, 0), (NAME, 0)];
        let stores = [&enter[..], &leave[..]].concat();
        let page = HeartbeatPage::new(0).unwrap();
        let reads = 1 + NAME_WORDS + 1 + TIMES_KEPT + 1;
        for (before, first) in (0..=stores.len()).flat_map(|before| (0..reads).map(move |first| (before, first))) {
            let mut words = vec![0; TIMES + TIMES_KEPT];
            for (index, value) in [(TIMES, STARTED), (COUNT, 1)].iter().chain(&stores[..before]) {
                words[*index] = *value;
            }
            let mut left = stores[before..].iter();
            let mut number = 0;
            let load = |index: usize| {
                // Simulate a concurrent writer: once `first` words have been read, do one write before each read.
                if number >= first {
                    left.by_ref().take(1).for_each(|(index, value)| words[*index] = *value);
                }
                number += 1;
                words[index]
            };
            let RankState::Heartbeat(beat) = page.read_by(load, 100_000) else { panic!("it has a heartbeat") };
            let is_short = beat.section.is_some_and(|section| section.limit == Some(7));
            assert!(!is_short || beat.last > STARTED, "{before} stores before, the others from load {first} on");
        }
    }

    #[test]
    fn a_worker_counts_as_exiting_until_it_sends_another_heartbeat() {
        let page = HeartbeatPage::new(0).unwrap();
        for (word, value) in [(TIMES, 51), (TIMES + 1, 60), (COUNT, 2)] {
            put(&page, word, value);
        }
        let is_exiting = || matches!(page.read(99), RankState::Heartbeat(Beat { is_exiting: true, .. }));
        assert!(!is_exiting());
        put(&page, EXIT, 60);
        assert!(is_exiting());
        assert!(matches!(page.read(99), RankState::Heartbeat(Beat { before_exit: Some(51), .. })));
        put(&page, TIMES + 2, 71);
        assert!(!is_exiting(), "a background thread still trains, or another program has taken the page");
    }

    #[test]
    fn the_name_and_limit_of_a_section_are_read_from_the_page() {
        let page = HeartbeatPage::new(0).unwrap();
        put(&page, COUNT, 1);
        put(&page, TIMES, 50);
        put(&page, LIMIT, 9);
        put(&page, NAME, u64::from_ne_bytes(*b"evaluati"));
        put(&page, NAME + 1, u64::from_ne_bytes(*b"on\0\0\0\0\0\0"));
        let section = |limit| Some(Section { name: "evaluation".into(), limit });
        assert_eq!(
            page.read(99),
            RankState::Heartbeat(Beat { last: 50, section: section(Some(9)), ..Beat::default() })
        );
        put(&page, LIMIT, UNLIMITED);
        assert_eq!(page.read(40), RankState::Heartbeat(Beat { last: 40, section: section(None), ..Beat::default() }));
    }
}
