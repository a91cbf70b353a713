//! From the bytes of one log file to what the console shows of them. Pure: no I/O, no clock.
//!
//! [`LineSplitter`] turns the bytes of one stream into [`Unit`]s; [`Screen`] puts the units of all streams that share
//! a destination one after the other. What they hold to:
//!
//! - **LINES-1** a line ends at `\n` (or `\r\n`) and nowhere else; all its bytes are passed on unchanged, in order.
//! - **LINES-2** how the bytes were cut into writes and reads makes no difference, unless [`LineSplitter::tick`] came
//!   in between because nothing was written for a while.
//! - **LINES-3** every line of the console begins with the prefix of its stream and holds bytes of this stream alone.
//!   A line that was begun (idle, or longer than [`MAX_LINE`]) is continued in place as long as no other stream wrote
//!   in between; otherwise it is ended there, and its rest becomes a line of its own, prefixed like any other.
//! - **LINES-4** of text that a lone `\r` overwrites only the last state is shown, as a line of its own, at most once
//!   per [`PROGRESS_INTERVAL`] and when the line ends. Blank states (a bar being wiped) never replace a visible one.
//! - **LINES-5** at most 2 × [`MAX_LINE`] bytes are held.

use std::time::{Duration, Instant};

/// More than this of one line is not held back to wait for its end.
pub const MAX_LINE: usize = 64 * 1024;

/// Nothing was written for this long: the line that was begun is shown. Long enough that the parts of a line that a
/// program writes in one go stay together on a busy machine, short enough that a prompt seems to appear at once.
pub const IDLE: Duration = Duration::from_millis(250);

/// A line that grows all the time without ending (dots) is shown this long after its first byte.
pub const GROWING: Duration = Duration::from_secs(1);

/// The least time between two shown states of a progress bar.
pub const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// A piece of the console's text, without prefix and newline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit<'a> {
    /// A line, from its beginning to its end.
    Whole(&'a [u8]),
    /// The beginning of a line, or more of it; never empty.
    Part(&'a [u8]),
    /// What was left of a line of which parts were shown; empty when only the newline was.
    End(&'a [u8]),
}

/// What is known of the line that has begun.
#[derive(Debug, Default)]
pub struct LineSplitter {
    /// Since the last `\n` or `\r`, as far as not passed on.
    text: Vec<u8>,
    /// The last complete state of a progress bar, when it is still to be shown.
    state: Vec<u8>,
    /// The state that was shown last.
    shown: Vec<u8>,
    /// A `\r` was the last byte: half a line end, or the beginning of the next state.
    carriage_return: bool,
    /// Some text of this line was overwritten.
    progress: bool,
    /// Parts of this line were passed on.
    open: bool,
    /// When the oldest byte that is still to be shown came, and the newest.
    waiting: Option<(Instant, Instant)>,
    /// When a state was last shown.
    shown_at: Option<Instant>,
}

impl LineSplitter {
    /// Takes the next bytes of the stream.
    pub fn push(&mut self, bytes: &[u8], now: Instant, mut emit: impl FnMut(Unit<'_>)) {
        let mut rest = bytes;
        while let Some(at) = memchr::memchr2(b'\n', b'\r', rest) {
            let segment = &rest[..at];
            if rest[at] == b'\r' {
                self.extend(segment, &mut emit);
                self.carriage_return = true;
            } else if self.is_at_line_start() && segment.len() <= MAX_LINE {
                emit(Unit::Whole(segment));
            } else {
                self.extend(segment, &mut emit);
                self.end_line(&mut emit, true);
            }
            rest = &rest[at + 1..];
        }
        self.extend(rest, &mut emit);
        self.waiting = match self.waiting {
            _ if !self.has_unshown() => None,
            // The oldest byte may have been passed on meanwhile, but then a new line has begun just now.
            Some((oldest, _)) if rest.len() == bytes.len() || self.progress => Some((oldest, now)),
            _ => Some((now, now)),
        };
    }

    /// When [`Self::tick`] has something to do, provided that no byte comes before.
    pub fn deadline(&self) -> Option<Instant> {
        let (oldest, newest) = self.waiting?;
        let idle = newest + IDLE;
        if !self.is_progress() {
            return Some(idle.min(oldest + GROWING));
        }
        let due = self.shown_at.map_or(oldest + IDLE, |at| (at + PROGRESS_INTERVAL).max(oldest + IDLE));
        // The state that is being written may be incomplete: it counts when it has come to rest.
        Some(if self.state.is_empty() { due.max(idle) } else { due })
    }

    /// Shows what has waited long enough; does nothing before [`Self::deadline`].
    pub fn tick(&mut self, now: Instant, mut emit: impl FnMut(Unit<'_>)) {
        let (Some((_, newest)), Some(deadline)) = (self.waiting, self.deadline()) else { return };
        if now < deadline {
            return;
        }
        if self.carriage_return {
            self.overwrite(&mut emit);
        }
        if !self.is_progress() {
            if !self.text.is_empty() {
                emit(Unit::Part(&self.text));
                self.text.clear();
                self.open = true;
            }
            self.waiting = None;
            return;
        }
        if now >= newest + IDLE && !is_blank(&self.text) {
            self.state.clone_from(&self.text);
        }
        self.show_state(&mut emit);
        self.shown_at = Some(now);
        self.waiting = self.has_unshown().then_some((now, newest));
    }

    /// The stream is at its end: what it left is passed on, with a newline where it lacks one.
    pub fn finish(&mut self, mut emit: impl FnMut(Unit<'_>)) {
        if !self.is_at_line_start() {
            self.end_line(&mut emit, false);
        }
        self.waiting = None;
    }

    /// Bytes that were taken and are still to be shown.
    pub fn held(&self) -> usize {
        self.text.len() + self.state.len()
    }

    fn is_at_line_start(&self) -> bool {
        self.text.is_empty() && !self.open && !self.progress && !self.carriage_return
    }

    /// The over-long state of a bar is passed on in parts like any other line.
    fn is_progress(&self) -> bool {
        (self.progress || self.carriage_return) && !self.open
    }

    fn has_unshown(&self) -> bool {
        if self.is_progress() {
            !self.state.is_empty() || (self.text != self.shown && !is_blank(&self.text))
        } else {
            !self.text.is_empty()
        }
    }

    /// Adds bytes without line ends to the current line.
    fn extend(&mut self, mut bytes: &[u8], emit: &mut impl FnMut(Unit<'_>)) {
        if bytes.is_empty() {
            return;
        }
        if self.carriage_return {
            self.overwrite(emit);
        }
        while self.text.len() + bytes.len() > MAX_LINE {
            let (fits, rest) = bytes.split_at(MAX_LINE - self.text.len());
            self.text.extend_from_slice(fits);
            emit(Unit::Part(&self.text));
            self.text.clear();
            self.open = true;
            bytes = rest;
        }
        self.text.extend_from_slice(bytes);
    }

    /// Something follows a lone `\r`: what was before it is a state that is over.
    fn overwrite(&mut self, emit: &mut impl FnMut(Unit<'_>)) {
        self.carriage_return = false;
        self.progress = true;
        if self.open {
            emit(Unit::End(&self.text));
            self.open = false;
        } else if !is_blank(&self.text) {
            std::mem::swap(&mut self.state, &mut self.text);
        }
        self.text.clear();
    }

    fn end_line(&mut self, emit: &mut impl FnMut(Unit<'_>), newline: bool) {
        if self.open {
            emit(Unit::End(&self.text));
        } else if self.progress {
            if !is_blank(&self.text) {
                std::mem::swap(&mut self.state, &mut self.text);
            }
            if self.state.is_empty() && self.shown.is_empty() && newline {
                emit(Unit::Whole(b""));
            }
            self.show_state(emit);
        } else {
            emit(Unit::Whole(&self.text));
        }
        self.text.clear();
        self.shown.clear();
        (self.open, self.progress, self.carriage_return) = (false, false, false);
    }

    fn show_state(&mut self, emit: &mut impl FnMut(Unit<'_>)) {
        if !self.state.is_empty() && self.state != self.shown {
            emit(Unit::Whole(&self.state));
            std::mem::swap(&mut self.shown, &mut self.state);
        }
        self.state.clear();
    }
}

/// Nothing to see: blanks and terminal control sequences only.
pub(super) fn is_blank(text: &[u8]) -> bool {
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        rest = match (first, after.first()) {
            (b' ' | b'\t', _) => after,
            (0x1b, Some(b'[')) => match after[1..].iter().position(|b| (0x40..=0x7e).contains(b)) {
                Some(last) => &after[last + 2..],
                None => return true,
            },
            _ => return false,
        };
    }
    true
}

/// The text of one destination: who has begun the line that the cursor stands in.
#[derive(Debug, Default)]
pub struct Screen<Stream> {
    open: Option<Stream>,
}

impl<Stream: Copy + Eq> Screen<Stream> {
    /// Appends a unit of `stream` to the destination's text.
    pub fn put(&mut self, stream: Stream, prefix: &[u8], unit: Unit<'_>, out: &mut Vec<u8>) {
        let goes_on = self.open == Some(stream);
        let (bytes, ends) = match unit {
            // Cut by another stream, and then only its newline came: the cut was the newline.
            Unit::End(b"") if !goes_on => return,
            Unit::End(bytes) => (bytes, true),
            Unit::Part(bytes) => (bytes, false),
            Unit::Whole(bytes) => {
                self.begin_line(prefix, out);
                out.extend_from_slice(bytes);
                out.push(b'\n');
                return;
            }
        };
        if !goes_on {
            self.begin_line(prefix, out);
        }
        out.extend_from_slice(bytes);
        if ends {
            out.push(b'\n');
        }
        self.open = (!ends).then_some(stream);
    }

    fn begin_line(&mut self, prefix: &[u8], out: &mut Vec<u8>) {
        if self.open.take().is_some() {
            out.push(b'\n');
        }
        out.extend_from_slice(prefix);
    }
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
