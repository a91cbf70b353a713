#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

use proptest::prelude::*;

use super::*;

/// A screen and its streams, with a simulated clock.
struct Console {
    splitters: Vec<LineSplitter>,
    screen: Screen<usize>,
    now: Instant,
    out: Vec<u8>,
}

impl Console {
    fn new(streams: usize) -> Self {
        let splitters = (0..streams).map(|_| LineSplitter::default()).collect();
        Self { splitters, screen: Screen::default(), now: Instant::now(), out: Vec::new() }
    }

    fn push(&mut self, stream: usize, bytes: &[u8]) {
        self.with(stream, |splitter, now, emit| splitter.push(bytes, now, emit));
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        (0..self.splitters.len()).for_each(|stream| self.with(stream, |splitter, now, emit| splitter.tick(now, emit)));
    }

    fn finish(mut self) -> String {
        (0..self.splitters.len()).for_each(|stream| self.with(stream, |splitter, _, emit| splitter.finish(emit)));
        assert!(self.splitters.iter().all(|splitter| splitter.deadline().is_none()));
        self.text()
    }

    fn with(&mut self, stream: usize, act: impl FnOnce(&mut LineSplitter, Instant, &mut dyn FnMut(Unit<'_>))) {
        let Self { splitters, screen, now, out } = self;
        let prefix = format!("[{stream}]:");
        act(&mut splitters[stream], *now, &mut |unit| screen.put(stream, prefix.as_bytes(), unit, out));
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }
}

fn of_one(chunks: &[&[u8]]) -> String {
    let mut console = Console::new(1);
    for chunk in chunks {
        console.push(0, chunk);
    }
    console.finish()
}

#[test]
fn a_line_written_in_parts_is_one_line() {
    assert_eq!(of_one(&[b"abc", b"def\ng", b"h\n"]), "[0]:abcdef\n[0]:gh\n");
}

#[test]
fn blank_lines_are_shown() {
    assert_eq!(of_one(&[b"\n\na\n\r\n"]), "[0]:\n[0]:\n[0]:a\n[0]:\n");
}

#[test]
fn a_missing_newline_is_added_to_the_last_line() {
    assert_eq!(of_one(&[b"a\nb"]), "[0]:a\n[0]:b\n");
    assert_eq!(of_one(&[b""]), "");
}

#[test]
fn a_carriage_return_before_the_newline_is_part_of_the_line_end() {
    assert_eq!(of_one(&[b"a\r\nb\r", b"\nc\r\r\n"]), "[0]:a\n[0]:b\n[0]:c\n");
}

#[test]
fn an_idle_partial_line_is_shown_and_continued_in_place() {
    let mut console = Console::new(1);
    console.push(0, b"epoch 1 ...");
    assert_eq!(console.text(), "");
    console.pass(IDLE);
    assert_eq!(console.text(), "[0]:epoch 1 ...");
    console.push(0, b" done\n");
    assert_eq!(console.text(), "[0]:epoch 1 ... done\n");
}

#[test]
fn a_partial_line_interrupted_by_another_stream_continues_on_a_new_line() {
    let mut console = Console::new(2);
    console.push(0, b"epoch 1 ...");
    console.pass(IDLE);
    console.push(1, b"hello\n");
    console.push(0, b" done\n");
    assert_eq!(console.text(), "[0]:epoch 1 ...\n[1]:hello\n[0]: done\n");
}

#[test]
fn a_newline_after_an_interrupted_partial_line_adds_no_blank_line() {
    let mut console = Console::new(2);
    console.push(0, b"a");
    console.pass(IDLE);
    console.push(1, b"b\n");
    console.push(0, b"\nc\n");
    assert_eq!(console.text(), "[0]:a\n[1]:b\n[0]:c\n");
}

#[test]
fn a_partial_line_that_keeps_growing_is_shown_after_one_second() {
    let mut console = Console::new(1);
    for _ in 0..10 {
        console.push(0, b".");
        console.pass(Duration::from_millis(100));
    }
    assert_eq!(console.text(), "[0]:..........");
}

#[test]
fn no_deadline_is_set_after_an_idle_partial_line_is_shown() {
    let mut console = Console::new(1);
    console.push(0, b"a");
    console.pass(IDLE);
    assert_eq!(console.splitters[0].deadline(), None);
}

#[test]
fn the_idle_deadline_restarts_with_each_new_line() {
    let mut console = Console::new(1);
    console.push(0, b"old");
    console.pass(IDLE / 2);
    console.push(0, b"\nnew");
    assert_eq!(console.splitters[0].deadline(), Some(console.now + IDLE));
}

#[test]
fn a_very_long_line_is_split_only_when_another_stream_writes() {
    let long = vec![b'x'; MAX_LINE * 2 + 7];
    let mut text = long.clone();
    text.push(b'\n');
    assert_eq!(of_one(&[&text]), format!("[0]:{}\n", String::from_utf8_lossy(&long)));
    let mut console = Console::new(2);
    console.push(0, &long);
    console.push(1, b"b\n");
    console.push(0, b"end\n");
    let text = console.finish();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0].len(), 4 + MAX_LINE * 2);
    assert_eq!(lines[1..], ["[1]:b", "[0]:xxxxxxxend"]);
}

#[test]
fn the_last_state_of_a_progress_bar_is_shown() {
    assert_eq!(of_one(&[b"\r  0%|", b"\r 50%|\r100%|\n", b"done\n"]), "[0]:100%|\n[0]:done\n");
    assert_eq!(of_one(&[b"10%\r", b"20%\r"]), "[0]:20%\n");
}

#[test]
fn a_progress_bar_is_shown_once_per_second_and_at_its_end() {
    let mut console = Console::new(1);
    for step in 0..40 {
        console.push(0, format!("\r{step}").as_bytes());
        console.pass(Duration::from_millis(100));
    }
    console.push(0, b"\n");
    assert_eq!(console.text(), "[0]:1\n[0]:11\n[0]:21\n[0]:31\n[0]:39\n");
}

#[test]
fn each_state_of_a_slow_progress_bar_is_shown_exactly_once() {
    let mut console = Console::new(1);
    for step in 0..3 {
        console.push(0, format!("\r{step}").as_bytes());
        for _ in 0..30 {
            console.pass(Duration::from_millis(100));
        }
    }
    assert_eq!(console.splitters[0].deadline(), None, "an idle bar wakes nobody");
    console.push(0, b"\n");
    assert_eq!(console.text(), "[0]:0\n[0]:1\n[0]:2\n");
}

#[test]
fn output_that_only_erases_a_progress_bar_is_not_shown() {
    assert_eq!(of_one(&[b"\r 50%|##", b"\r        \rsaved\n"]), "[0]:saved\n");
    assert_eq!(of_one(&[b"\r 50%|##\x1b[2K\r\x1b[2K\r"]), "[0]: 50%|##\x1b[2K\n");
}

#[test]
fn a_progress_bar_after_a_partial_line_starts_on_a_new_line() {
    let mut console = Console::new(1);
    console.push(0, b"load");
    console.pass(IDLE);
    console.push(0, b"ing\r50%\n");
    assert_eq!(console.text(), "[0]:loading\n[0]:50%\n");
}

#[test]
fn the_buffered_bytes_of_a_stream_are_limited() {
    let mut console = Console::new(1);
    for _ in 0..10 {
        console.push(0, b"\rx");
        console.push(0, &vec![b'y'; MAX_LINE]);
        assert!(console.splitters[0].text.len() + console.splitters[0].state.len() <= 2 * MAX_LINE);
    }
}

/// Generates bytes that contain many line ends.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![4 => Just(b'a'), 1 => Just(b' '), 2 => Just(b'\n'), 1 => Just(b'\r'), 2 => any::<u8>()];
    prop::collection::vec(byte, 0..200)
}

fn chunked(text: &[u8], cuts: &[prop::sample::Index]) -> Vec<Vec<u8>> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|w| text[w[0]..w[1]].to_vec()).collect()
}

proptest! {
    #[test]
    fn chunking_of_the_input_does_not_change_the_output(text in text(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20)) {
        let chunks = chunked(&text, &cuts);
        let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(of_one(&chunks), of_one(&[&text]));
    }

    #[test]
    fn chunking_of_long_lines_does_not_change_the_output(
        lengths in prop::collection::vec(0..3 * MAX_LINE, 1..3),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
    ) {
        let text: Vec<u8> = lengths.iter().flat_map(|n| [vec![b'x'; *n], vec![b'\n']].concat()).collect();
        let mut whole = Vec::new();
        LineSplitter::default().push(&text, Instant::now(), |unit| whole.push(format!("{unit:?}")));
        let mut parts = Vec::new();
        let mut splitter = LineSplitter::default();
        for chunk in chunked(&text, &cuts) {
            splitter.push(&chunk, Instant::now(), |unit| parts.push(format!("{unit:?}")));
        }
        prop_assert!(parts == whole);
    }

    /// Checks that input without `\r` is emitted unchanged, with or without pauses between the chunks. The only
    /// exception is that a missing newline at the end is added.
    #[test]
    fn every_byte_is_shown_once_in_order(
        text in text(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20), idle in any::<u64>(),
    ) {
        let text: Vec<u8> = text.into_iter().filter(|b| *b != b'\r').collect();
        let mut units: Vec<u8> = Vec::new();
        let mut splitter = LineSplitter::default();
        let mut now = Instant::now();
        let mut take = |unit: Unit<'_>| match unit {
            Unit::Whole(b) | Unit::Rest(b) => { units.extend(b); units.push(b'\n'); }
            Unit::Part(b) => units.extend(b),
        };
        for (i, chunk) in chunked(&text, &cuts).iter().enumerate() {
            splitter.push(chunk, now, &mut take);
            if idle >> (i % 64) & 1 == 1 {
                now += IDLE;
                splitter.tick(now, &mut take);
            }
        }
        splitter.finish(&mut take);
        let mut expected = text;
        if expected.last().is_some_and(|b| *b != b'\n') {
            expected.push(b'\n');
        }
        prop_assert_eq!(units, expected);
    }

    /// Every line of a shared console starts with the prefix of a stream and contains only bytes of this stream, in
    /// order.
    #[test]
    fn streams_never_mix_within_a_line(
        steps in prop::collection::vec((0..3_usize, "[abc\n]{0,6}", any::<bool>()), 0..40),
    ) {
        let mut console = Console::new(3);
        let mut written = [const { String::new() }; 3];
        for (stream, text, idle) in &steps {
            let own = text.replace(['a', 'b', 'c'], ["x", "y", "z"][*stream]);
            console.push(*stream, own.as_bytes());
            written[*stream].push_str(&own);
            if *idle {
                console.pass(IDLE);
            }
        }
        let mut seen = [const { String::new() }; 3];
        for line in console.finish().lines() {
            let stream: usize = line[1..2].parse().unwrap();
            prop_assert_eq!(&line[..4], format!("[{}]:", stream));
            prop_assert!(!line[4..].contains('['), "one prefix: {}", line);
            seen[stream].push_str(&line[4..]);
        }
        prop_assert_eq!(seen, written.map(|text| text.replace('\n', "")));
    }

    /// While the splitter holds back bytes, a deadline is set. Calling `tick` at the deadline emits all of the bytes or
    /// sets a later deadline.
    #[test]
    fn a_stream_has_no_deadline_after_four_ticks_at_its_deadlines(steps in prop::collection::vec(("[ab\r\n ]{0,5}", 0..400_u64), 0..40)) {
        let mut console = Console::new(1);
        for (text, pause) in &steps {
            console.push(0, text.as_bytes());
            console.pass(Duration::from_millis(*pause));
        }
        for _ in 0..4 {
            let Some(deadline) = console.splitters[0].deadline() else { break };
            console.now = console.now.max(deadline);
            console.pass(Duration::ZERO);
        }
        prop_assert_eq!(console.splitters[0].deadline(), None);
    }
}
