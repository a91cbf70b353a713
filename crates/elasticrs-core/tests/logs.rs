//! Log files of real writer processes, shown on a console that is a pipe.
#![cfg(feature = "agent")]
#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use elasticrs_core::logs::{Console, Dest, LogStream, Logs, NotDrained, Notice, StreamId};

/// A hang guard, never the thing measured.
const GUARD: Duration = Duration::from_secs(30);

struct Fixture {
    dir: tempfile::TempDir,
    logs: Logs,
    stdout: File,
    notices: Receiver<Notice>,
}

impl Fixture {
    /// Standard output is a pipe, standard error nothing.
    fn new() -> Self {
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
        Self::on(Console::new(write, null.into()), read)
    }

    fn on(console: Console, stdout: OwnedFd) -> Self {
        let (send, notices) = channel();
        let logs = Logs::new(console, move |notice| drop(send.send(notice))).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), logs, stdout: stdout.into(), notices }
    }

    fn path(&self, local_rank: u32) -> PathBuf {
        self.dir.path().join(format!("{local_rank}.log"))
    }

    fn follow(&self, local_rank: u32) -> StreamId {
        self.follow_path(local_rank, self.path(local_rank))
    }

    fn follow_path(&self, local_rank: u32, path: PathBuf) -> StreamId {
        let prefix = format!("[{local_rank}]:").into_bytes();
        let stream = LogStream { local_rank, path, to: Some(Dest::Stdout), prefix };
        self.logs.follow(vec![stream]).unwrap()[0]
    }

    /// What comes to the console up to and including this line.
    fn read_until(&self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for line in BufReader::new(&self.stdout).lines() {
            lines.push(line.unwrap());
            if lines.last().unwrap() == last {
                break;
            }
        }
        lines
    }

    fn drained(&self, deadline: Instant) -> Vec<NotDrained> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(self.logs.drained(deadline))
    }

    /// Everything on the console, once nothing more can come.
    fn close(self) -> String {
        let Self { logs, mut stdout, .. } = self;
        drop(logs);
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        text
    }
}

/// A shell whose standard output is appended to the file.
fn writer(path: &Path, script: &str) -> Child {
    let file = OpenOptions::new().append(true).create(true).open(path).unwrap();
    Command::new("/bin/sh").args(["-c", script]).stdin(Stdio::piped()).stdout(file).spawn().unwrap()
}

fn append(path: &Path, text: &[u8]) {
    OpenOptions::new().append(true).open(path).unwrap().write_all(text).unwrap();
}

#[test]
fn a_line_is_shown_while_its_writer_runs() {
    let fixture = Fixture::new();
    fixture.follow(0);
    let mut child = writer(&fixture.path(0), "echo hello; read _; echo bye");
    assert_eq!(fixture.read_until("[0]:hello"), ["[0]:hello"]);
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(fixture.read_until("[0]:bye"), ["[0]:bye"]);
    assert!(child.wait().unwrap().success());
}

#[test]
fn what_was_in_the_file_before_is_not_shown() {
    let fixture = Fixture::new();
    std::fs::write(fixture.path(0), "old\n").unwrap();
    let id = fixture.follow(0);
    append(&fixture.path(0), b"new\n");
    fixture.logs.finish(&[id]);
    assert_eq!(fixture.drained(Instant::now() + GUARD), []);
    assert_eq!(fixture.close(), "[0]:new\n");
}

#[test]
fn nothing_of_many_writers_is_lost() {
    const WRITERS: u32 = 8;
    const LINES: usize = 20_000;
    let mut fixture = Fixture::new();
    let ids: Vec<StreamId> = (0..WRITERS).map(|rank| fixture.follow(rank)).collect();
    // Half of the lines are written in two parts.
    let script = format!(
        "i=0; while [ $i -lt {LINES} ]; do printf 'line '; printf '%s\\n' $i; i=$((i+1)); echo line $i; i=$((i+1)); done"
    );
    let children: Vec<Child> = (0..WRITERS).map(|rank| writer(&fixture.path(rank), &script)).collect();
    let pipe = fixture.stdout.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut next: BTreeMap<String, usize> = BTreeMap::new();
        for line in BufReader::new(pipe).lines() {
            let line = line.unwrap();
            let (rank, text) = line.split_at(4);
            let next = next.entry(rank.to_owned()).or_default();
            assert_eq!(text, format!("line {next}"), "of {rank}");
            *next += 1;
        }
        next
    });
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    fixture.logs.finish(&ids);
    assert_eq!(fixture.drained(Instant::now() + GUARD), []);
    fixture.stdout = File::open("/dev/null").unwrap();
    assert_eq!(fixture.close(), "");
    let seen = reader.join().unwrap();
    assert_eq!(seen.len(), WRITERS as usize);
    assert!(seen.values().all(|lines| *lines == LINES), "{seen:?}");
}

#[test]
fn a_file_that_cannot_be_opened_is_told_once_and_hinders_no_other() {
    let fixture = Fixture::new();
    std::fs::create_dir(fixture.path(3)).unwrap();
    let failed = fixture.follow(3);
    let id = fixture.follow(0);
    append(&fixture.path(0), b"hello\n");
    fixture.logs.finish(&[failed, id]);
    assert_eq!(fixture.drained(Instant::now() + GUARD), []);
    let told: Vec<Notice> = fixture.notices.try_iter().collect();
    assert_eq!(told, [Notice::LogTrouble { local_rank: 3, path: fixture.path(3), errno: nix::errno::Errno::EISDIR }]);
    assert_eq!(fixture.close(), "[0]:hello\n");
}
