//! Turns the bytes of log files into the text that the console shows. This module is pure: it uses no I/O and no clock.
//!
//! [`LineSplitter`] turns the bytes of one stream into [`Unit`]s. [`Screen`] joins the units of all streams that share
//! a destination. Invariants:
//!
//! - **LINES-1** A line ends only at `\n` (or `\r\n`). All bytes of a line are passed on unchanged and in order.
//! - **LINES-2** The output does not depend on how the bytes were split into writes and reads, unless
//!   [`LineSplitter::tick`] was called during a pause of the writer.
//! - **LINES-3** Every line on the console starts with the prefix of its stream and contains bytes of this stream only.
//!   If the start of a line was shown before the line was complete (because no bytes arrived for a while, or because
//!   the line is longer than [`MAX_LINE`]), its rest continues on the same console line unless another stream has
//!   written since. In that case, the rest becomes a new line with a prefix.
//! - **LINES-4** If text is overwritten after a lone `\r`, only its last state is shown, as a separate line. While the
//!   line is unfinished, a state is shown at most once per [`PROGRESS_INTERVAL`]. The last state is shown when the line
//!   ends. A blank state (a bar being wiped) never replaces a visible one.
//! - **LINES-5** At most 2 × [`MAX_LINE`] bytes of a stream are held back.

use std::time::{Duration, Instant};

/// Maximum number of bytes of an unfinished line that are held back.
pub(crate) const MAX_LINE: usize = 64 * 1024;

/// Time without new bytes after which an unfinished line is shown. It is long enough to receive all parts of a line on
/// a busy machine, and short enough that a prompt seems to appear immediately.
pub(crate) const IDLE: Duration = Duration::from_millis(250);

/// Maximum time for which bytes of an unfinished line are held back while more bytes keep arriving. For example, a
/// program may slowly print a row of dots.
pub(crate) const GROWING: Duration = Duration::from_secs(1);

/// Minimum time between two displayed states of the same progress bar.
pub(crate) const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// A piece of text for the console, without prefix and newline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit<'a> {
    /// A complete line.
    Whole(&'a [u8]),
    /// A part of an unfinished line. Never empty.
    Part(&'a [u8]),
    /// The rest of a line whose earlier parts have already been shown. Empty if only the newline was missing.
    Rest(&'a [u8]),
}

/// State of the current line of one stream.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    /// Bytes since the last `\n` or `\r` that have not been passed on yet.
    text: Vec<u8>,
    /// The last complete state of a progress bar, if it has not been shown yet.
    state: Vec<u8>,
    /// The last state of the progress bar that was shown.
    shown: Vec<u8>,
    /// True if the last byte was `\r`. The next byte shows whether it belongs to `\r\n` or starts a new state of a
    /// progress bar.
    carriage_return: bool,
    /// True if a lone `\r` has overwritten text on this line, as in a progress bar.
    progress: bool,
    /// True if part of this line has already been emitted.
    open: bool,
    /// Arrival times of the oldest and the newest byte that have not been shown.
    waiting: Option<(Instant, Instant)>,
    /// Time at which a state of the progress bar was last shown.
    shown_at: Option<Instant>,
}

impl LineSplitter {
    /// Adds the next bytes of the stream, and emits the text that is ready to be shown.
    pub(crate) fn push(&mut self, bytes: &[u8], now: Instant, mut emit: impl FnMut(Unit<'_>)) {
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
            // After a line end, set the arrival time of the oldest unshown byte to `now`, because a new line has
            // started. Otherwise, keep the old arrival time.
            Some((oldest, _)) if rest.len() == bytes.len() || self.progress => Some((oldest, now)),
            _ => Some((now, now)),
        };
    }

    /// Returns the time at which [`Self::tick`] must be called unless more bytes arrive first.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let (oldest, newest) = self.waiting?;
        let idle = newest + IDLE;
        if !self.is_progress() {
            return Some(idle.min(oldest + GROWING));
        }
        let due = self.shown_at.map_or(oldest + IDLE, |at| (at + PROGRESS_INTERVAL).max(oldest + IDLE));
        // If the progress bar's only unshown text does not end with `\r` yet, wait until no more bytes arrive, because
        // the text may be incomplete.
        Some(if self.state.is_empty() { due.max(idle) } else { due })
    }

    /// Emits text that is being held back if [`Self::deadline`] has passed. Otherwise, does nothing.
    pub(crate) fn tick(&mut self, now: Instant, mut emit: impl FnMut(Unit<'_>)) {
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

    /// Emits the remaining bytes of a finished stream. If the last line is unterminated, adds a newline.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(Unit<'_>)) {
        if !self.is_at_line_start() {
            self.end_line(&mut emit, false);
        }
        self.waiting = None;
    }

    fn is_at_line_start(&self) -> bool {
        self.text.is_empty() && !self.open && !self.progress && !self.carriage_return
    }

    /// True if the current line is a progress bar that is short enough to be held back. A longer bar is passed on in
    /// parts, like any other line.
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

    /// Handles a lone `\r`, after which a progress bar overwrites its text. Emits or stores the text before the `\r`.
    fn overwrite(&mut self, emit: &mut impl FnMut(Unit<'_>)) {
        self.carriage_return = false;
        self.progress = true;
        if self.open {
            emit(Unit::Rest(&self.text));
            self.open = false;
        } else if !is_blank(&self.text) {
            std::mem::swap(&mut self.state, &mut self.text);
        }
        self.text.clear();
    }

    fn end_line(&mut self, emit: &mut impl FnMut(Unit<'_>), newline: bool) {
        if self.open {
            emit(Unit::Rest(&self.text));
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

/// True if the text is invisible, because it consists of blanks and terminal control sequences only.
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

/// Merges the text of all streams that share a destination. Remembers which stream wrote the current unfinished line.
#[derive(Debug, Default)]
pub(crate) struct Screen<Stream> {
    open: Option<Stream>,
}

impl<Stream: Copy + Eq> Screen<Stream> {
    /// Appends the bytes of `unit`, a line or part of a line from `stream`, to `out`.
    pub(crate) fn put(&mut self, stream: Stream, prefix: &[u8], unit: Unit<'_>, out: &mut Vec<u8>) {
        let goes_on = self.open == Some(stream);
        let (bytes, ends) = match unit {
            // Do not write the newline, because it was already written when another stream interrupted this line.
            Unit::Rest(b"") if !goes_on => return,
            Unit::Rest(bytes) => (bytes, true),
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
