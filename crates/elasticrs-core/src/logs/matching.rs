//! Copies lines that contain a given text to another file.
//!
//! - **MATCHING-1** Lines are matched and copied whole, even if they arrive slowly and in parts. A line longer
//!   than [`LONGEST`] is split into pieces of about that length, and each piece is treated as a line.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use memchr::memmem::Finder;

use super::lines::Unit;

/// Maximum length, in bytes, of an unfinished line that is held back.
pub(super) const LONGEST: usize = 1024 * 1024;

/// Selects which lines of a stream to copy, and to which file. Several streams can share a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchingLines {
    /// File to append the lines to. It is created with mode 0644 if it does not exist.
    pub path: PathBuf,
    /// Texts to search for. Lines that contain at least one of these texts are copied.
    pub contains: Vec<Vec<u8>>,
}

impl MatchingLines {
    pub(super) fn open(&self) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).mode(0o644).open(&self.path)
    }
}

/// Filter that passes only matching lines. If a line arrives in parts, the filter joins the parts before it checks the
/// line.
#[derive(Debug)]
pub(super) struct LineFilter {
    contains: Vec<Finder<'static>>,
    /// Text received so far of an unfinished line.
    line: Vec<u8>,
}

impl LineFilter {
    pub(super) fn new(lines: &MatchingLines) -> Self {
        let contains = lines.contains.iter().map(|text| Finder::new(text).into_owned()).collect();
        Self { contains, line: Vec::new() }
    }

    /// Adds a piece of text. A complete line is emitted as [`Unit::Whole`] if the line matches the filter.
    pub(super) fn pass(&mut self, unit: Unit<'_>, emit: impl FnOnce(Unit<'_>)) {
        match unit {
            Unit::Whole(line) => {
                if self.matches(line) {
                    emit(unit);
                }
                return;
            }
            Unit::Part(bytes) => {
                self.line.extend_from_slice(bytes);
                if self.line.len() < LONGEST {
                    return;
                }
            }
            Unit::Rest(bytes) => self.line.extend_from_slice(bytes),
        }
        if self.matches(&self.line) {
            emit(Unit::Whole(&self.line));
        }
        self.line.clear();
    }

    fn matches(&self, line: &[u8]) -> bool {
        self.contains.iter().any(|text| text.find(line).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(contains: &[&str], units: &[Unit<'_>]) -> Vec<Vec<u8>> {
        let contains = contains.iter().map(|text| text.as_bytes().to_vec()).collect();
        let mut filter = LineFilter::new(&MatchingLines { path: PathBuf::new(), contains });
        let mut lines = Vec::new();
        for &unit in units {
            filter.pass(unit, |unit| match unit {
                Unit::Whole(line) => lines.push(line.to_vec()),
                Unit::Part(_) | Unit::Rest(_) => panic!("only whole lines are copied"),
            });
        }
        lines
    }

    #[test]
    fn a_line_passes_when_it_contains_one_of_the_texts() {
        let units = [Unit::Whole(b"an apple"), Unit::Whole(b"a pear"), Unit::Whole(b"oranges")];
        assert_eq!(passed(&["apple", "orange"], &units), [b"an apple".to_vec(), b"oranges".to_vec()]);
        assert!(passed(&[], &units).is_empty());
    }

    #[test]
    fn a_line_received_in_parts_is_matched_as_a_whole() {
        let units = [Unit::Part(b"an ap"), Unit::Part(b"p"), Unit::Rest(b"le"), Unit::Part(b"ap"), Unit::Rest(b"")];
        assert_eq!(passed(&["apple"], &units), [b"an apple".to_vec()]);
    }

    #[test]
    fn a_line_without_an_end_is_passed_on_once_it_is_too_long() {
        let part = vec![b'a'; LONGEST / 2];
        let units = [Unit::Part(&part), Unit::Part(&part), Unit::Part(&part)];
        assert_eq!(passed(&["a"], &units).len(), 1);
    }
}
