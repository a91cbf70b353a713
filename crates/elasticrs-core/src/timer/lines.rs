//! Splits the bytes read from the timer FIFO into lines, using bounded memory.

use memchr::memchr;

/// Maximum length of a record in bytes. Equals `PIPE_BUF`, because the kernel may interleave longer writes of
/// several processes to one pipe.
pub const MAX_LINE: usize = 4096;

/// Splits a byte stream into lines. Keeps the start of an incomplete line, and discards a line that is too long.
#[derive(Debug, Default)]
pub struct Lines {
    partial: Vec<u8>,
    skipping: bool,
}

impl Lines {
    /// Adds `bytes`, and calls `line` with each line that is now complete, without its newline. Calls `line` with
    /// `None` for a line that is too long.
    pub fn feed(&mut self, mut bytes: &[u8], mut line: impl FnMut(Option<&[u8]>)) {
        while let Some(end) = memchr(b'\n', bytes) {
            let (head, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.skipping {
                self.skipping = false;
            } else if self.partial.len() + head.len() > MAX_LINE {
                line(None);
            } else if self.partial.is_empty() {
                line(Some(head));
            } else {
                self.partial.extend_from_slice(head);
                line(Some(&self.partial));
            }
            self.partial.clear();
            bytes = rest;
        }
        if self.skipping {
            return;
        }
        if self.partial.len() + bytes.len() > MAX_LINE {
            // Report the overlong line now, because its newline may never arrive.
            line(None);
            self.partial.clear();
            self.skipping = true;
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines_of(chunks: &[&[u8]]) -> Vec<Option<Vec<u8>>> {
        let (mut lines, mut seen) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.feed(chunk, |line| seen.push(line.map(<[u8]>::to_vec)));
            assert!(lines.partial.len() <= MAX_LINE, "TIM-4");
        }
        seen
    }

    #[test]
    fn a_line_that_is_too_long_does_not_affect_other_lines() {
        let long = vec![b'x'; 3 * MAX_LINE];
        let seen = lines_of(&[b"a\n", &long, &long, b"\nb\n"]);
        assert_eq!(seen, [Some(b"a".to_vec()), None, Some(b"b".to_vec())]);
        let exact = [&long[..MAX_LINE], b"\n"].concat();
        assert_eq!(lines_of(&[&exact]), [Some(exact[..MAX_LINE].to_vec())]);
        assert_eq!(lines_of(&[&[&long[..=MAX_LINE], b"\nb\n"].concat()]), [None, Some(b"b".to_vec())]);
    }

    proptest! {
        #[test]
        fn the_lines_do_not_depend_on_how_the_bytes_are_chunked(
            text in proptest::collection::vec(prop_oneof![4 => Just(b'x'), 1 => Just(b'\n')], 0..400),
            cuts in proptest::collection::vec(0_usize..400, 0..20),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(lines_of(&chunks), lines_of(&[&text]));
        }
    }
}
