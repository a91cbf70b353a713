//! Benchmarks of following log files: throughput, CPU time and latency with 8 ranks, and wake-ups with 64 idle
//! ranks.
//!
//! Run them with `cargo bench -p elasticrs-core --bench logs [-- throughput | latency | idle]`. The writers are
//! separate processes of this program, so that only the follower's CPU time is measured.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for measuring")]
#![allow(clippy::unchecked_time_subtraction, reason = "CPU time only grows")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures for people"
)]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elasticrs_core::logs::{Console, LogStream, Logs, To};
use elasticrs_runtime::readings::Dest;
use elasticrs_sys::clock::Stamp;
use nix::sys::resource::{UsageWho, getrusage};

const RANKS: u32 = 8;
const LINES: u32 = 100_000;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["write", path, kind] => write_lines(Path::new(path), kind),
        ["stamp", path, lines, pause] => write_stamps(Path::new(path), lines.parse().unwrap(), pause.parse().unwrap()),
        [] => {
            throughput();
            latency();
            idle();
        }
        ["throughput"] => throughput(),
        ["latency"] => latency(),
        ["idle"] => idle(),
        _ => panic!("unknown arguments: {args:?}"),
    }
}

/// Writes lines of 90 bytes, one at a time or in blocks of 64 KiB.
fn write_lines(path: &Path, kind: &str) {
    let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
    let mut blocks = BufWriter::with_capacity(64 * 1024, file.try_clone().unwrap());
    for number in 0..LINES {
        let line = format!("{number:08} {:80}\n", "a line of a training log");
        if kind == "lines" { file.write_all(line.as_bytes()) } else { blocks.write_all(line.as_bytes()) }.unwrap();
    }
}

/// Writes lines that contain the time of the write.
fn write_stamps(path: &Path, lines: u32, pause_ms: u64) {
    let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
    for _ in 0..lines {
        std::thread::sleep(Duration::from_millis(pause_ms));
        file.write_all(format!("{}\n", Stamp::now().0).as_bytes()).unwrap();
    }
}

fn start(args: &[&str]) -> Child {
    Command::new(std::env::current_exe().unwrap()).args(args).spawn().unwrap()
}

fn null() -> OwnedFd {
    OpenOptions::new().write(true).open("/dev/null").unwrap().into()
}

fn follow(logs: &Logs, dir: &Path, ranks: u32) -> Vec<String> {
    let path = |rank| dir.join(format!("{rank}.log"));
    let stream = |local_rank| LogStream {
        local_rank,
        path: path(local_rank),
        to: To::Console(Dest::Stdout),
        prefix: format!("[default{local_rank}]:").into_bytes(),
    };
    logs.follow((0..ranks).map(stream).collect()).unwrap();
    (0..ranks).map(|rank| path(rank).to_str().unwrap().to_owned()).collect()
}

fn drain(logs: &Logs) {
    logs.finish_all();
    let missing = logs.drain(Duration::from_secs(60));
    assert!(missing.is_empty(), "{missing:?}");
}

fn cpu(of: UsageWho) -> Duration {
    let usage = getrusage(of).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    let micros: i64 = times.iter().map(|time| time.tv_sec() * 1_000_000 + time.tv_usec()).sum();
    Duration::from_micros(micros.unsigned_abs())
}

fn throughput() {
    println!("throughput: {RANKS} ranks x {LINES} lines x 90 B");
    for kind in ["lines", "blocks"] {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<String> = (0..RANKS).map(|rank| format!("{}/{rank}", dir.path().display())).collect();
        let (began, cpu_before) = (Instant::now(), cpu(UsageWho::RUSAGE_CHILDREN));
        for mut child in paths.iter().map(|path| start(&["write", path, kind])).collect::<Vec<_>>() {
            assert!(child.wait().unwrap().success());
        }
        let (all, cpu) = (began.elapsed(), cpu(UsageWho::RUSAGE_CHILDREN) - cpu_before);
        println!("  {kind:6} nobody follows: written {:5} ms, CPU {:4} ms", all.as_millis(), cpu.as_millis());
        for to in ["/dev/null", "a pipe"] {
            follow_flood(kind, to);
        }
    }
}

fn follow_flood(kind: &str, to: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut cat = None;
    let stdout = if to == "a pipe" {
        let child = cat.insert(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        child.stdin.take().unwrap().into()
    } else {
        null()
    };
    let logs = Logs::new(Console::new(stdout, null()), |notice| panic!("{notice:?}")).unwrap();
    let paths = follow(&logs, dir.path(), RANKS);
    let (began, cpu_before) = (Instant::now(), [UsageWho::RUSAGE_CHILDREN, UsageWho::RUSAGE_SELF].map(cpu));
    let children: Vec<Child> = paths.iter().map(|path| start(&["write", path, kind])).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let written = began.elapsed();
    let writers = cpu(UsageWho::RUSAGE_CHILDREN) - cpu_before[0];
    drain(&logs);
    let all = began.elapsed();
    let cpu = cpu(UsageWho::RUSAGE_SELF) - cpu_before[1];
    drop(logs);
    if let Some(mut cat) = cat {
        cat.wait().unwrap();
    }
    println!(
        "  {kind:6} to {to:11}: written {:5} ms, CPU {:4} ms; shown {:5} ms, CPU {:4} ms, {:.0} k lines/s",
        written.as_millis(),
        writers.as_millis(),
        all.as_millis(),
        cpu.as_millis(),
        f64::from(RANKS * LINES) / all.as_secs_f64() / 1e3,
    );
}

fn latency() {
    latency_of(RANKS, 1500, 1);
    latency_of(1, 100, 20);
}

fn latency_of(ranks: u32, lines: u32, pause_ms: u32) {
    let dir = tempfile::tempdir().unwrap();
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let logs = Logs::new(Console::new(write, null()), |notice| panic!("{notice:?}")).unwrap();
    let paths = follow(&logs, dir.path(), ranks);
    let (lines, pause_ms) = (lines.to_string(), pause_ms.to_string());
    let reader = std::thread::spawn(move || {
        let mut micros = Vec::new();
        for line in BufReader::new(File::from(read)).lines() {
            let now = Stamp::now().0;
            let line = line.unwrap();
            let written: u64 = line.split_once(':').unwrap().1.parse().unwrap();
            micros.push((now - written) as f64 / 1e3);
        }
        micros.sort_by(f64::total_cmp);
        micros
    });
    let cpu_before = cpu(UsageWho::RUSAGE_SELF);
    for mut child in paths.iter().map(|path| start(&["stamp", path, &lines, &pause_ms])).collect::<Vec<_>>() {
        assert!(child.wait().unwrap().success());
    }
    drain(&logs);
    let cpu = cpu(UsageWho::RUSAGE_SELF) - cpu_before;
    drop(logs);
    let micros = reader.join().unwrap();
    let at = |share: f64| micros[((micros.len() - 1) as f64 * share) as usize];
    println!(
        "latency: {} lines of {ranks} ranks, one per {pause_ms} ms each: p50 {:.0} us, p99 {:.0} us, max {:.0} us, CPU {} ms",
        micros.len(),
        at(0.5),
        at(0.99),
        at(1.0),
        cpu.as_millis(),
    );
}

fn idle() {
    const FOLLOWED: u32 = 64;
    let dir = tempfile::tempdir().unwrap();
    let logs = Logs::new(Console::new(null(), null()), |notice| panic!("{notice:?}")).unwrap();
    for path in follow(&logs, dir.path(), FOLLOWED) {
        OpenOptions::new().append(true).open(path).unwrap().write_all(b"ready\n").unwrap();
    }
    // Wait until the check for a full file system is over. It runs once, 5 s after the last data.
    std::thread::sleep(Duration::from_secs(6));
    let before = switches_of_others();
    std::thread::sleep(Duration::from_secs(10));
    println!("idle: {FOLLOWED} ranks followed: {} wake-ups in 10 s", switches_of_others() - before);
    println!("idle: {}", status_line("/proc/self/status", "VmRSS"));
}

/// Returns the number of context switches of all threads except the calling thread.
fn switches_of_others() -> u64 {
    let main = std::process::id().to_string();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(Result::unwrap);
    let others = tasks.filter(|task| task.file_name().to_str() != Some(&main));
    let switches = others.map(|task| {
        let line = status_line(task.path().join("status").to_str().unwrap(), "voluntary_ctxt_switches");
        line.split_whitespace().last().unwrap().parse::<u64>().unwrap()
    });
    switches.sum()
}

fn status_line(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().find(|line| line.starts_with(name)).unwrap().to_owned()
}
