//! Tests for log files of real writer processes, shown on a console that is a pipe.
#![allow(clippy::unwrap_used, reason = "a failure is a failed test")]

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use elasticrs_core::logs::{Console, LogStream, Logs, MatchingLines, Notice, StreamId, To};
use elasticrs_runtime::readings::Dest;
use elasticrs_sys::clock::Stamp;
use elasticrs_testkit::wait_until;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Time limit that keeps a test from hanging. No test measures it.
const GUARD: Duration = Duration::from_secs(30);

struct Fixture {
    dir: tempfile::TempDir,
    logs: Logs,
    stdout: File,
    notices: Receiver<Notice>,
}

impl Fixture {
    /// Creates a fixture with a pipe as standard output. Standard error is discarded.
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

    fn notices(&self) -> Vec<Notice> {
        self.notices.try_iter().collect()
    }

    fn follow_path(&self, local_rank: u32, path: PathBuf) -> StreamId {
        let prefix = format!("[{local_rank}]:").into_bytes();
        let stream = LogStream { local_rank, path, to: To::Console(Dest::Stdout), prefix };
        self.logs.follow(vec![stream]).unwrap()[0]
    }

    /// Reads the console's lines up to and including `last`.
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

    /// Closes the logs, and returns the remaining output on the console.
    fn close(self) -> String {
        let Self { logs, mut stdout, .. } = self;
        drop(logs);
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        text
    }
}

/// Starts a shell whose standard output is appended to the file.
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
fn existing_content_of_a_log_file_is_not_shown() {
    let fixture = Fixture::new();
    std::fs::write(fixture.path(0), "old\n").unwrap();
    let id = fixture.follow(0);
    append(&fixture.path(0), b"new\n");
    fixture.logs.finish(&[id]);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.close(), "[0]:new\n");
}

#[test]
fn no_output_of_many_concurrent_writers_is_lost() {
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
    // Compare the concatenated text. On a busy machine, a writer may pause between the parts of a line, which is
    // then shown as two lines.
    let reader = std::thread::spawn(move || {
        let mut seen: BTreeMap<String, String> = BTreeMap::new();
        for line in BufReader::new(pipe).lines() {
            let line = line.unwrap();
            let (rank, text) = line.split_at(4);
            seen.entry(rank.to_owned()).or_default().push_str(text);
        }
        seen
    });
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    fixture.logs.finish(&ids);
    assert_eq!(fixture.logs.drain(GUARD), []);
    fixture.stdout = File::open("/dev/null").unwrap();
    assert_eq!(fixture.close(), "");
    let seen = reader.join().unwrap();
    let written = (0..LINES).map(|number| format!("line {number}")).collect::<Vec<_>>().concat();
    let expected: BTreeMap<String, String> = (0..WRITERS).map(|rank| (format!("[{rank}]:"), written.clone())).collect();
    assert!(seen == expected, "{} ranks", seen.len());
}

#[test]
fn a_log_file_that_cannot_be_opened_is_reported_once_and_skipped() {
    let fixture = Fixture::new();
    std::fs::create_dir(fixture.path(3)).unwrap();
    let failed = fixture.follow(3);
    let id = fixture.follow(0);
    append(&fixture.path(0), b"hello\n");
    fixture.logs.finish(&[failed, id]);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.notices(), [Notice::LogTrouble { local_rank: 3, path: fixture.path(3), errno: Errno::EISDIR }]);
    assert_eq!(fixture.close(), "[0]:hello\n");
}

#[test]
fn a_read_error_is_reported_once_and_ends_the_stream() {
    let fixture = Fixture::new();
    // For `stat`, this is a regular file. It cannot be read at offset 0, because that address is not mapped.
    let path = PathBuf::from("/proc/self/mem");
    let failed = fixture.follow_path(1, path.clone());
    let id = fixture.follow(0);
    append(&fixture.path(0), b"hello\n");
    fixture.logs.finish(&[failed, id]);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.notices(), [Notice::LogTrouble { local_rank: 1, path, errno: Errno::EIO }]);
    assert_eq!(fixture.close(), "[0]:hello\n");
}

#[test]
fn a_fifo_is_refused_as_a_log_file_without_blocking() {
    let fixture = Fixture::new();
    nix::unistd::mkfifo(&fixture.path(0), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fixture.follow(0);
    assert_eq!(fixture.notices(), [Notice::LogTrouble { local_rank: 0, path: fixture.path(0), errno: Errno::ESPIPE }]);
}

#[test]
fn a_blocked_console_blocks_no_writer_and_receives_all_output_later() {
    const LINES: usize = 50_000;
    let fixture = Fixture::new();
    let id = fixture.follow(0);
    let mut child = writer(&fixture.path(0), &format!("i=0; while [ $i -lt {LINES} ]; do echo $i; i=$((i+1)); done"));
    assert!(child.wait().unwrap().success(), "nobody reads the pipe, and the writer ends");
    fixture.logs.finish(&[id]);
    let missing = fixture.logs.drain(Duration::ZERO);
    assert_eq!(missing.len(), 1);
    assert_eq!(missing[0].local_rank, 0);
    // Follow the next attempt while output of the last one is still waiting.
    let next = fixture.follow(1);
    let last = format!("[0]:{}", LINES - 1);
    let lines = fixture.read_until(&last);
    let expected: Vec<String> = (0..LINES).map(|number| format!("[0]:{number}")).collect();
    assert!(lines == expected, "{} lines", lines.len());
    append(&fixture.path(1), b"again\n");
    fixture.logs.finish(&[next]);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.close(), "[1]:again\n");
}

#[test]
fn without_free_descriptors_a_file_is_opened_after_finished_files_close() {
    // More lines than fit into a pipe.
    const LINES: usize = 10_000;
    let fixture = Fixture::new();
    let id = fixture.follow(0);
    append(&fixture.path(0), &b"0123456789\n".repeat(LINES));
    fixture.logs.finish(&[id]);
    assert_eq!(fixture.logs.drain(Duration::ZERO).len(), 1, "the console holds the file open");
    // The logs' thread is running, so it has already opened the descriptors that it needs.
    (&fixture.stdout).read_exact(&mut [0]).unwrap();
    let stdout = fixture.stdout.try_clone().unwrap();
    let free = File::open("/dev/null").unwrap().as_raw_fd().cast_unsigned();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, free.into(), hard).unwrap();
    let reader = std::thread::spawn(move || BufReader::new(stdout).lines().take(LINES).count());
    fixture.follow(1);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_eq!(fixture.notices(), []);
    assert_eq!(reader.join().unwrap(), LINES);
}

#[test]
fn a_terminal_paused_with_ctrl_s_shows_the_output_after_it_is_resumed() {
    let pty = nix::pty::openpty(None, None).unwrap();
    let stop = |how| nix::sys::termios::tcflow(&pty.slave, how).unwrap();
    stop(nix::sys::termios::FlowArg::TCOOFF);
    let slave = pty.slave.try_clone().unwrap();
    let fixture = Fixture::on(Console::new(slave.try_clone().unwrap(), slave), pty.master);
    let id = fixture.follow(0);
    append(&fixture.path(0), b"one\ntwo\n");
    fixture.logs.finish(&[id]);
    assert_eq!(fixture.logs.drain(Duration::ZERO).len(), 1);
    stop(nix::sys::termios::FlowArg::TCOON);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.read_until("[0]:two"), ["[0]:one", "[0]:two"]);
}

#[test]
fn a_blocked_standard_output_does_not_delay_standard_error() {
    let (_unread, full) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let (read, stderr) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let fixture = Fixture::on(Console::new(full, stderr), read);
    fixture.follow(0);
    std::fs::write(fixture.path(1), "").unwrap();
    let errors =
        LogStream { local_rank: 0, path: fixture.path(1), to: To::Console(Dest::Stderr), prefix: b"err:".to_vec() };
    fixture.logs.follow(vec![errors]).unwrap();
    append(&fixture.path(0), &b"0123456789\n".repeat(100_000));
    append(&fixture.path(1), b"broken\n");
    assert_eq!(fixture.read_until("err:broken"), ["err:broken"]);
}

#[test]
fn matching_lines_are_copied_to_a_file_even_if_the_console_is_blocked() {
    let fixture = Fixture::new();
    let copy = fixture.dir.path().join("copy.log");
    let matching = |contains: &[&str]| {
        let contains = contains.iter().map(|text| text.as_bytes().to_vec()).collect();
        To::File(MatchingLines { path: copy.clone(), contains })
    };
    let stream = |local_rank, to| LogStream {
        local_rank,
        path: fixture.path(local_rank),
        to,
        prefix: format!("[{local_rank}]:").into_bytes(),
    };
    let console = fixture.follow(0);
    let copies = vec![stream(0, matching(&["loss", "error"])), stream(1, matching(&["loss"]))];
    let copies = fixture.logs.follow(copies).unwrap();
    append(&fixture.path(0), &b"0123456789\n".repeat(100_000));
    append(&fixture.path(0), b"loss 1\nerror: \xff\n");
    append(&fixture.path(1), b"error\nlo");
    append(&fixture.path(1), b"ss 2");
    fixture.logs.finish(&copies);
    assert_eq!(fixture.logs.drain(GUARD), []);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    assert!(!open.into_iter().any(|target| target == copy), "the outputs of streams that are through are closed");
    let mut lines: Vec<Vec<u8>> = BufReader::new(File::open(&copy).unwrap()).split(b'\n').map(Result::unwrap).collect();
    lines.sort();
    assert_eq!(lines, [&b"[0]:error: \xff"[..], b"[0]:loss 1", b"[1]:loss 2"]);
    // The console's own stream has lost nothing, and continues where it stopped.
    fixture.logs.finish(&[console]);
    assert_eq!(fixture.read_until("[0]:loss 1").len(), 100_001);
}

#[test]
fn a_copy_that_cannot_be_written_is_reported_and_the_console_continues() {
    let fixture = Fixture::new();
    let path = fixture.path(0);
    let copy = |path: &str| To::File(MatchingLines { path: path.into(), contains: vec![b"x".to_vec()] });
    fixture.follow(0);
    let streams = ["/dev/full", "/no/such/file"].map(|to| LogStream {
        local_rank: 0,
        path: path.clone(),
        to: copy(to),
        prefix: Vec::new(),
    });
    fixture.logs.follow(streams.to_vec()).unwrap();
    append(&path, b"x\n");
    let mut told = [(); 2].map(|()| match fixture.notices.recv_timeout(GUARD) {
        Ok(Notice::LogTrouble { path, errno, .. }) => (path, errno),
        other => panic!("{other:?}"),
    });
    told.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(told, [("/dev/full".into(), Errno::ENOSPC), ("/no/such/file".into(), Errno::ENOENT)]);
    assert_eq!(fixture.read_until("[0]:x"), ["[0]:x"]);
}

/// Passed as the current time, and therefore returned for streams that are being written to.
const FAR: Stamp = Stamp(u64::MAX);

/// Waits until all data has been read, and returns the time of the last write to a stream.
fn written_last(logs: &Logs) -> Stamp {
    let mut last = None;
    wait_until("streams that do not count as written now", || {
        last = logs.last_written(FAR).filter(|at| *at < FAR);
        last.is_some()
    });
    last.unwrap()
}

#[test]
fn an_unfinished_line_does_not_count_as_activity_forever() {
    // Write a prompt, a progress bar, and a line. A filter also copies them, and waits for the end of a line.
    let texts = [("step 2 ...", "[0]:step 2 ..."), ("\r 20%|###", "[0]: 20%|###\n"), ("step 2\n", "[0]:step 2\n")];
    for (text, shown) in texts {
        let mut fixture = Fixture::new();
        let id = fixture.follow(0);
        let lines = MatchingLines { path: fixture.dir.path().join("copy.log"), contains: vec![b"2".to_vec()] };
        let copy = LogStream { local_rank: 0, path: fixture.path(0), to: To::File(lines), prefix: Vec::new() };
        let copy = fixture.logs.follow(vec![copy]).unwrap()[0];
        assert_eq!(fixture.logs.last_written(FAR), None);
        let before = Stamp::now();
        append(&fixture.path(0), text.as_bytes());
        let mut console = vec![0; shown.len()];
        fixture.stdout.read_exact(&mut console).unwrap();
        assert_eq!(console, shown.as_bytes());
        assert!(written_last(&fixture.logs) >= before, "{text:?}");
        fixture.logs.finish(&[id, copy]);
    }
}

#[test]
fn output_to_a_blocked_console_counts_as_activity() {
    let fixture = Fixture::new();
    let id = fixture.follow(0);
    let text = b"0123456789\n".repeat(100_000);
    append(&fixture.path(0), &text);
    let mut first = [0; 4];
    (&fixture.stdout).read_exact(&mut first).unwrap();
    assert_eq!(fixture.logs.last_written(FAR), Some(FAR));
    // While the console blocked, the logs did not see any later writes. The silence must therefore be counted from
    // now on.
    let before = Stamp::now();
    append(&fixture.path(0), b"last\n");
    assert_eq!(fixture.read_until("[0]:last").len(), 100_001);
    assert!(written_last(&fixture.logs) >= before);
    fixture.logs.finish(&[id]);
}

#[test]
fn a_closed_console_is_reported_once_and_log_files_are_still_read() {
    let fixture = Fixture::new();
    let Fixture { dir, logs, stdout, notices } = fixture;
    drop(stdout);
    let path = dir.path().join("0.log");
    let stream = LogStream { local_rank: 0, path: path.clone(), to: To::Console(Dest::Stdout), prefix: Vec::new() };
    let first = logs.follow(vec![stream.clone()]).unwrap();
    append(&path, b"nobody listens\n");
    assert_eq!(notices.recv_timeout(GUARD), Ok(Notice::ConsoleLost { to: Dest::Stdout, errno: Errno::EPIPE }));
    let second = logs.follow(vec![stream]).unwrap();
    append(&path, b"still nobody\n");
    logs.finish(&[first, second].concat());
    assert_eq!(logs.drain(GUARD), []);
    drop(logs);
    assert_eq!(notices.try_iter().collect::<Vec<_>>(), []);
}

#[test]
fn a_truncated_file_is_read_from_its_beginning() {
    let fixture = Fixture::new();
    let id = fixture.follow(0);
    append(&fixture.path(0), b"before the rotation\nhalf");
    fixture.read_until("[0]:before the rotation");
    OpenOptions::new().write(true).truncate(true).open(fixture.path(0)).unwrap();
    append(&fixture.path(0), b"after\n");
    fixture.logs.finish(&[id]);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.close(), "[0]:half\n[0]:after\n");
}

#[test]
fn a_log_file_is_still_followed_after_it_is_renamed() {
    let fixture = Fixture::new();
    fixture.follow(0);
    let moved = fixture.dir.path().join("moved");
    std::fs::rename(fixture.path(0), &moved).unwrap();
    for _ in 0..3 {
        append(&moved, b"still here\n");
        fixture.read_until("[0]:still here");
    }
}

#[test]
fn a_partial_line_is_shown_when_its_writer_pauses() {
    let fixture = Fixture::new();
    fixture.follow(0);
    append(&fixture.path(0), b"epoch 1 ...");
    let mut shown = [0; 15];
    (&fixture.stdout).read_exact(&mut shown).unwrap();
    assert_eq!(&shown, b"[0]:epoch 1 ...");
    append(&fixture.path(0), b" done\n");
    assert_eq!(fixture.read_until(" done"), [" done"]);
}

#[test]
fn a_panic_of_the_log_thread_is_reported_and_blocks_no_caller() {
    let (send, notices) = channel();
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    drop(read);
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    let logs = Logs::new(Console::new(write, null.into()), move |notice| match notice {
        Notice::ConsoleLost { .. } => panic!("out of order"),
        notice => drop(send.send(notice)),
    });
    let logs = logs.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let stream = LogStream { local_rank: 0, path: path.clone(), to: To::Console(Dest::Stdout), prefix: Vec::new() };
    let ids = logs.follow(vec![stream]).unwrap();
    append(&path, b"x\n");
    assert_eq!(notices.recv_timeout(GUARD), Ok(Notice::Panicked { message: "out of order".to_owned() }));
    logs.finish(&ids);
    assert_eq!(logs.drain(GUARD).len(), 1);
}

/// Runs a test of this file again in new namespaces that `setup` has prepared. If the system does not permit
/// that, prints the reason and skips the test.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn runs_in_namespace(test: &str, dir: &Path, setup: &str) {
    let script = format!("{setup} || exit 77; exec \"$0\" --exact {test} --nocapture");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--", "/bin/sh", "-c", &script]);
    let output = command.arg(std::env::current_exe().unwrap()).env(INSIDE, dir).current_dir(dir).output();
    let reason = match output {
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("running ") => {
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "inside: {output:?}");
            return;
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    eprintln!("skipped, no namespace of our own: {reason}");
}

/// Environment variable that is set inside the namespace, to the folder of the test.
const INSIDE: &str = "ELASTICRS_TEST_INSIDE";

#[test]
fn a_full_file_system_is_reported_once_with_rank_and_file() {
    let Some(dir) = std::env::var_os(INSIDE).map(PathBuf::from) else {
        let dir = tempfile::tempdir().unwrap();
        let setup = "mount -t tmpfs -o size=64k none \"$PWD\"";
        runs_in_namespace("a_full_file_system_is_reported_once_with_rank_and_file", dir.path(), setup);
        return;
    };
    let fixture = Fixture::new();
    let path = dir.join("0.log");
    let id = fixture.follow_path(0, path.clone());
    let mut child = writer(&path, "exec 2>&-; while echo 0123456789; do :; done; exit 3");
    let reader = fixture.stdout.try_clone().unwrap();
    let shown = std::thread::spawn(move || BufReader::new(reader).lines().map(Result::unwrap).collect::<Vec<_>>());
    assert_eq!(child.wait().unwrap().code(), Some(3), "its own write has failed");
    fixture.logs.finish(&[id]);
    assert_eq!(fixture.logs.drain(GUARD), []);
    assert_eq!(fixture.notices(), [Notice::LogTrouble { local_rank: 0, path: path.clone(), errno: Errno::ENOSPC }]);
    fixture.logs.close();
    let lines = shown.join().unwrap();
    let written = std::fs::read_to_string(&path).unwrap();
    assert!(!lines.is_empty());
    assert_eq!(lines.len(), written.lines().count(), "what the kernel accepted is shown");
}

#[test]
fn without_inotify_files_are_polled() {
    if std::env::var_os(INSIDE).is_none() {
        let dir = tempfile::tempdir().unwrap();
        let setup = "echo 0 > /proc/sys/user/max_inotify_instances";
        runs_in_namespace("without_inotify_files_are_polled", dir.path(), setup);
        return;
    }
    let fixture = Fixture::new();
    fixture.follow(0);
    for _ in 0..3 {
        append(&fixture.path(0), b"found\n");
        fixture.read_until("[0]:found");
    }
    assert_eq!(fixture.notices(), [Notice::Polling { errno: Errno::EMFILE }]);
}

#[test]
fn without_inotify_watches_files_are_polled() {
    if std::env::var_os(INSIDE).is_none() {
        let dir = tempfile::tempdir().unwrap();
        let setup = "echo 1 > /proc/sys/user/max_inotify_watches";
        runs_in_namespace("without_inotify_watches_files_are_polled", dir.path(), setup);
        return;
    }
    let fixture = Fixture::new();
    for rank in 0..3 {
        fixture.follow(rank);
    }
    for rank in 0..3 {
        append(&fixture.path(rank), b"found\n");
        fixture.read_until(&format!("[{rank}]:found"));
    }
    assert_eq!(fixture.notices(), [Notice::Polling { errno: Errno::ENOSPC }]);
}
