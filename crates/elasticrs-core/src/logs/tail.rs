//! Reads the last lines of a log file, for the failure report.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::lines::is_blank;

/// Returns the last `count` lines in the last `max_bytes` bytes of a file, without their line ends.
///
/// If parts of a line were overwritten with `\r`, only the last visible state is returned. A line that starts before
/// the last `max_bytes` bytes is cut off. It is returned only if no other line follows it. Returns no lines for a file
/// without a size, such as `/dev/null`.
pub fn last_lines(path: &Path, count: usize, max_bytes: u64) -> io::Result<Vec<Vec<u8>>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    // Also read the byte before the window, which shows whether the window starts in the middle of a line.
    let start = size.saturating_sub(max_bytes.saturating_add(1));
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(start))?;
    // Limit the read, because the file may grow in the meantime.
    file.take(size - start).read_to_end(&mut bytes)?;
    Ok(match bytes.split_first() {
        Some((before, window)) if size > max_bytes => last_of(window, count, *before != b'\n'),
        _ => last_of(&bytes, count, false),
    })
}

fn last_of(bytes: &[u8], count: usize, is_cut: bool) -> Vec<Vec<u8>> {
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    let mut lines: Vec<&[u8]> = body.split(|b| *b == b'\n').collect();
    if is_cut && lines.len() > 1 {
        lines.remove(0);
    }
    let first = lines.len().saturating_sub(count);
    lines[first..].iter().map(|line| last_state(line).to_vec()).collect()
}

/// Returns the text that a terminal would show for the line, by the same rules as for the agent's console.
fn last_state(line: &[u8]) -> &[u8] {
    let end = line.iter().rposition(|b| *b != b'\r').map_or(0, |last| last + 1);
    let line = &line[..end];
    let mut states = line.rsplit(|b| *b == b'\r');
    if line.contains(&b'\r') { states.find(|state| !is_blank(state)).unwrap_or_default() } else { line }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

    use std::io::Write;

    use super::*;

    fn lines_of(text: &[u8], count: usize, max_bytes: u64) -> Vec<String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        let lines = last_lines(file.path(), count, max_bytes).unwrap();
        lines.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    }

    #[test]
    fn the_last_lines_are_returned_in_order() {
        assert_eq!(lines_of(b"a\nb\nc\n", 2, 100), ["b", "c"]);
        assert_eq!(lines_of(b"a\nb\nc", 2, 100), ["b", "c"]);
        assert_eq!(lines_of(b"a\n\n", 5, 100), ["a", ""]);
        assert_eq!(lines_of(b"", 5, 100), [""; 0]);
        assert_eq!(lines_of(b"a\n", 0, 100), [""; 0]);
    }

    #[test]
    fn a_line_cut_by_the_byte_limit_is_omitted_unless_it_is_the_only_line() {
        assert_eq!(lines_of(b"abcdef\nxyz\n", 5, 6), ["xyz"]);
        assert_eq!(lines_of(b"abcdef\n", 5, 4), ["def"]);
        assert_eq!(lines_of(b"ab\nc\nxyz\n", 5, 6), ["c", "xyz"]);
    }

    #[test]
    fn progress_bars_collapse_to_their_last_state() {
        assert_eq!(lines_of(b"\r 10%\r 99%\rend\nx\r\n\r 50%\r    \r", 9, 100), ["end", "x", " 50%"]);
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let error = last_lines(Path::new("/nonexistent/log"), 1, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
