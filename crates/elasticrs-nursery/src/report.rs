//! Reads the import report of a warm nursery and appends records to it. Used by the agent. The report has one JSON
//! record per line.
//!
//! Each import starts with the record `{"importing": NAME}`. If the last record of an exited process is of this kind,
//! importing the named module killed the process. A replacement process imports the remaining modules.

use std::os::fd::{AsFd, BorrowedFd};

use elasticrs_sys::process::WorkerExit;
use nix::sys::stat::fstat;
use nix::sys::uio::pread;
use nix::unistd::write;

const IMPORTING: &[u8] = b"{\"importing\":";
const ENDED: &[u8] = b"{\"ended\":";

/// Reason why a process did not finish its imports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportFailure {
    Exited(WorkerExit),
    /// The process executed another program (`exec`).
    ExecutedProgram,
    /// The process closed its connection to the agent.
    ClosedConnection,
}

/// Returns the length of the report in bytes. The records of the next process start at this offset.
pub fn length(report: impl AsFd) -> u64 {
    fstat(report.as_fd()).map_or(0, |found| u64::try_from(found.st_size).unwrap_or(0))
}

fn read(report: BorrowedFd<'_>, since: u64) -> Vec<u8> {
    let mut told = vec![0; usize::try_from(length(report).saturating_sub(since)).unwrap_or(0)];
    let count = i64::try_from(since).ok().and_then(|since| pread(report, &mut told, since).ok());
    told.truncate(count.unwrap_or(0));
    told
}

/// Returns the name of the module that is being imported, according to the last record after the offset `since`.
/// `None` if that record is not the start of an import.
pub fn importing(report: impl AsFd, since: u64) -> Option<String> {
    let told = read(report.as_fd(), since);
    let last = told.strip_suffix(b"}\n")?.rsplit(|&byte| byte == b'\n').next()?;
    let name = String::from_utf8_lossy(last.strip_prefix(IMPORTING)?);
    Some(name.trim().trim_matches('"').to_owned())
}

/// Appends a record of how the process failed while it was importing a module. Returns false and appends nothing
/// if the process was not importing a module, or if this failure was already recorded.
pub fn blame(report: impl AsFd, since: u64, end: ImportFailure) -> bool {
    let report = report.as_fd();
    let told = read(report, since);
    let lines: Vec<&[u8]> = told.split_inclusive(|&byte| byte == b'\n').collect();
    let Some(last) = lines.last().filter(|line| line.starts_with(IMPORTING) && line.ends_with(b"\n")) else {
        return false;
    };
    if lines.windows(2).any(|two| two[0] == *last && two[1].starts_with(ENDED)) {
        return false;
    }
    let end = match end {
        ImportFailure::Exited(WorkerExit::Exited { code }) => code.to_string(),
        ImportFailure::Exited(WorkerExit::Signaled { signal }) => (-signal).to_string(),
        ImportFailure::Exited(WorkerExit::Unknown) => "null".to_owned(),
        ImportFailure::ExecutedProgram => "\"executes\"".to_owned(),
        ImportFailure::ClosedConnection => "\"closes\"".to_owned(),
    };
    let record = format!("{}{end}}}\n", String::from_utf8_lossy(ENDED));
    write(report, record.as_bytes()) == Ok(record.len())
}

/// Appends a record that says why the imports cannot continue.
pub fn fail(report: impl AsFd, why: &str) {
    // Ignore a write error, because the user still sees how the process exited.
    let _ = write(report, format!("{{\"failed\": \"{why}\"}}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn the_module_being_imported_is_found_in_the_report() {
        let mut file = tempfile::tempfile().unwrap();
        for (record, found) in [
            ("", None),
            ("{\"importing\": \"a.b\"}\n", Some("a.b")),
            ("{\"imported\": \"a.b\", \"seconds\": 1}\n", None),
            ("{\"importing\": \"c\"}\n", Some("c")),
            ("{\"importing\": \"torn", None),
        ] {
            file.write_all(record.as_bytes()).unwrap();
            assert_eq!(importing(&file, 0).as_deref(), found, "{record}");
        }
    }

    const IMPORTS_A: &str = "{\"importing\": \"a\"}\n";
    const IMPORTS_B: &str = "{\"importing\": \"b\"}\n";

    fn blamed(file: &mut File, since: u64, end: ImportFailure) -> Option<String> {
        let before = length(&*file);
        let blamed = blame(&*file, since, end);
        let mut added = String::new();
        file.seek(std::io::SeekFrom::Start(before)).unwrap();
        file.read_to_string(&mut added).unwrap();
        assert_eq!(blamed, !added.is_empty());
        blamed.then_some(added)
    }

    fn report(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn the_module_being_imported_is_blamed_once() {
        let mut file = report(&format!("{IMPORTS_A}{{\"imported\": \"a\"}}\n{IMPORTS_B}"));
        let killed = ImportFailure::Exited(WorkerExit::Signaled { signal: 9 });
        assert_eq!(blamed(&mut file, 0, killed).as_deref(), Some("{\"ended\":-9}\n"));
        assert_eq!(blamed(&mut file, 0, killed), None, "nothing is imported");
        file.write_all(IMPORTS_A.as_bytes()).unwrap();
        assert_eq!(blamed(&mut file, 0, ImportFailure::ExecutedProgram).as_deref(), Some("{\"ended\":\"executes\"}\n"));
        let since = length(&file);
        file.write_all(IMPORTS_B.as_bytes()).unwrap();
        assert_eq!(blamed(&mut file, 0, killed), None, "a second time");
        let exited = ImportFailure::Exited(WorkerExit::Exited { code: 3 });
        assert_eq!(blamed(&mut file, since, exited).as_deref(), Some("{\"ended\":3}\n"), "of another import");
    }

    #[test]
    fn no_module_is_blamed_if_none_was_being_imported() {
        for text in ["", "{\"failed\": \"x\"}\n", "{\"importing\": \"a", "{\"imported\": \"a\"}\n"] {
            assert_eq!(blamed(&mut report(text), 0, ImportFailure::ClosedConnection), None, "{text}");
        }
    }
}
