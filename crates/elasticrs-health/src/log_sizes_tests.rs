use std::fs::{self, File, OpenOptions};
use std::io::Write;

use elasticrs_runtime::readings::Dest;
use proptest::prelude::*;

use super::*;

const OUT: Stream = (0, Dest::Stdout);
const ERR: Stream = (0, Dest::Stderr);

fn file(stream: Stream, path: &str, is_new: bool) -> LogFile {
    LogFile { stream, path: path.into(), is_new }
}

fn begun(is_new: bool) -> Tally {
    let mut tally = Tally::default();
    tally.begin(vec![file(OUT, "out", is_new)]);
    tally
}

fn update(tally: &mut Tally, now: FileState) -> Option<u64> {
    tally.update(Path::new("out"), now).map(|(_, count)| count)
}

fn sized(number: u64, size: u64) -> FileState {
    FileState::File((1, number), size)
}

#[test]
fn content_from_before_the_job_is_not_counted() {
    let mut tally = begun(false);
    let counts = [sized(2, 500), sized(2, 510)].map(|now| update(&mut tally, now));
    assert_eq!(counts, [Some(0), Some(10)]);
}

#[test]
fn all_bytes_of_a_new_file_are_counted() {
    let mut tally = begun(true);
    assert_eq!(update(&mut tally, sized(2, 500)), Some(500));
    let mut tally = begun(false);
    let counts = [FileState::Absent, sized(2, 500)].map(|now| update(&mut tally, now));
    assert_eq!(counts, [Some(0), Some(500)]);
}

#[test]
fn a_truncated_file_is_counted_again_from_its_start() {
    let mut tally = begun(true);
    let counts = [sized(2, 500), sized(2, 20), sized(2, 30)].map(|now| update(&mut tally, now));
    assert_eq!(counts, [Some(500), Some(520), Some(530)]);
}

#[test]
fn a_file_that_replaced_a_log_file_is_not_counted() {
    let mut tally = begun(true);
    let counts = [sized(2, 500), FileState::Absent, sized(3, 9), FileState::Unknown, sized(2, 501)];
    assert_eq!(counts.map(|now| update(&mut tally, now)), [Some(500), None, None, None, Some(501)]);
}

#[test]
fn counts_continue_over_attempts_with_the_same_or_a_new_file() {
    let mut tally = begun(false);
    let counts = [FileState::Absent, sized(2, 500)].map(|now| update(&mut tally, now));
    assert_eq!(counts, [Some(0), Some(500)]);
    tally.begin(vec![file(OUT, "out", false)]);
    assert_eq!(update(&mut tally, sized(2, 510)), Some(510));
    // Remove the file `out` before the next attempt, which creates it again.
    tally.begin(vec![file(OUT, "out", false)]);
    assert_eq!([FileState::Absent, sized(3, 5)].map(|now| update(&mut tally, now)), [Some(510), Some(515)]);
    tally.begin(vec![file(OUT, "out", false)]);
    assert_eq!([sized(4, 700), sized(4, 701)].map(|now| update(&mut tally, now)), [Some(515), Some(516)]);
}

proptest! {
    /// Checks that the byte counts never decrease (SIZES-1), and that they are exact if no file is truncated.
    #[test]
    fn byte_counts_never_decrease_and_are_exact_without_truncation(steps in prop::collection::vec((0u8..6, 0u64..1000), 1..80)) {
        let mut tally = begun(true);
        let (mut number, mut size, mut told) = (1, 0, 0);
        let (mut written, mut is_exact, mut last) = (0, true, 0);
        for (what, count) in steps {
            match what {
                0 | 1 => (size, written) = (size + count, written + count),
                2 if count < 200 => (size, is_exact) = (0, false),
                3 if count < 200 => {
                    // Check the current attempt's file one last time. Then start the next attempt with a new file.
                    told = update(&mut tally, sized(number, size)).unwrap();
                    tally.begin(vec![file(OUT, "out", true)]);
                    (number, size) = (number + 1, 0);
                }
                4 if count < 200 => {
                    let _ = update(&mut tally, if count < 100 { FileState::Unknown } else { FileState::Absent });
                }
                _ => told = update(&mut tally, sized(number, size)).unwrap(),
            }
            prop_assert!(told >= last && told <= written);
            last = told;
        }
        let told = update(&mut tally, sized(number, size)).unwrap();
        prop_assert!(told >= last && told <= written);
        if is_exact {
            prop_assert_eq!(told, written);
        }
    }
}

fn asked(sizes: &LogSizes) -> StreamCounts {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(sizes.ask());
    sizes.known(Instant::now())
}

/// Scrapes repeatedly until the counts are equal to `counts`.
fn until(sizes: &LogSizes, counts: &[(Stream, u64)]) -> StreamCounts {
    loop {
        let known = asked(sizes);
        if known.counts.iter().map(|(stream, count)| (*stream, *count)).eq(counts.iter().copied()) {
            return known;
        }
    }
}

#[test]
fn file_sizes_are_read_on_request_and_at_the_end_of_an_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let sizes = LogSizes::default();
    assert!(asked(&sizes).age.is_none());
    let files = |first: &str| {
        [(OUT, first), (ERR, "link")].map(|(stream, name)| LogFile { stream, path: path(name), is_new: true }).into()
    };
    sizes.begin(files("out")).unwrap();
    assert_eq!(until(&sizes, &[(OUT, 0), (ERR, 0)]).counts.len(), 2);
    fs::write(path("out"), "12345").unwrap();
    // The size of `link` is unknown, because it points to a device instead of a regular file.
    std::os::unix::fs::symlink("/dev/null", path("link")).unwrap();
    assert!(until(&sizes, &[(OUT, 5), (ERR, 0)]).age.is_some());
    OpenOptions::new().append(true).open(path("out")).unwrap().write_all(b"6").unwrap();
    sizes.end();
    // Wait for the last check of the file sizes. Afterwards, the counts are final and their age is `None`.
    while asked(&sizes).age.is_some() {}
    assert_eq!(asked(&sizes).counts[&OUT], 6);
    File::create(path("again")).unwrap().write_all(b"789").unwrap();
    sizes.begin(files("again")).unwrap();
    until(&sizes, &[(OUT, 9), (ERR, 0)]);
    sizes.close();
    sizes.close();
    assert_eq!(asked(&sizes).counts[&OUT], 9);
}

/// Creates a `LogSizes` whose checks block until the test sends a result.
fn gated() -> (LogSizes, mpsc::Sender<FileState>, mpsc::Receiver<()>) {
    let (answer, answers) = mpsc::channel();
    let (looks, looking) = mpsc::channel();
    let sizes = LogSizes::default();
    let stat = move |_: &Path| {
        // Ignore an error, because the test may already be over.
        let _ = looks.send(());
        answers.recv().unwrap_or(FileState::Unknown)
    };
    sizes.begin_with(vec![file(OUT, "out", true)], stat).unwrap();
    (sizes, answer, looking)
}

#[test]
fn a_scrape_is_answered_while_a_file_check_hangs() {
    let (sizes, answer, looking) = gated();
    looking.recv().unwrap();
    answer.send(sized(1, 7)).unwrap();
    // Send the result of the next check in advance, because `until` requests a check and waits for it.
    answer.send(sized(1, 8)).unwrap();
    until(&sizes, &[(OUT, 8)]);
    for _ in 0..2 {
        // The first scrape waits until the time limit has passed. The second scrape does not wait, because the limit
        // has already passed.
        let known = asked(&sizes);
        assert_eq!(known.counts[&OUT], 8);
        assert!(known.age.is_some());
    }
    let before = Instant::now();
    for _ in 0..1000 {
        asked(&sizes);
    }
    let state = lock(&sizes.shared.state);
    assert!(state.waiting_since.unwrap() + PATIENCE <= before);
    assert!(state.wanted <= state.begun + 1, "questions pile up");
    drop(state);
    // End the attempt and start another one while a file check is blocked. Neither `end` nor `begin` may wait for the
    // blocked check.
    sizes.end();
    sizes.begin(vec![file(OUT, "again", true)]).unwrap();
    assert_eq!(asked(&sizes).counts[&OUT], 8);
    // Provide results for three file checks: the blocked check, the final check of the old file, and the check of the
    // new file.
    for size in [sized(1, 9), sized(1, 10), sized(2, 5)] {
        answer.send(size).unwrap();
    }
    until(&sizes, &[(OUT, 15)]);
    drop(answer);
    sizes.close();
}

#[test]
fn close_does_not_wait_for_a_file_check_that_hangs() {
    let (sizes, answer, looking) = gated();
    looking.recv().unwrap();
    sizes.close();
    let shared = Arc::clone(&sizes.shared);
    drop(sizes);
    assert_eq!(*shared.done.borrow(), 0);
    answer.send(sized(1, 7)).unwrap();
    // The thread has exited and dropped its end of the channel.
    assert!(looking.recv().is_err());
    assert_eq!(lock(&shared.state).counts[&OUT], 7);
}
