//! Benchmarks of the nursery: `nursery-bench IMAGE [ROUNDS]`. The results are medians over all rounds. The
//! machine should be idle.

use std::error::Error;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use elasticrs_nursery::fence::Fence;
use elasticrs_nursery::launch::{Interrupt, Launched, NurseryImage, launch};
use elasticrs_nursery::protocol::{Reply, Request, SweepLimits};
use elasticrs_nursery::spec::{PassedFd, ProcessSpec};
use elasticrs_sys::clock::boot_now;
use elasticrs_sys::process;
use elasticrs_testkit::nursery::c_string;
use elasticrs_testkit::{wait_for_end, wait_readable, worker_program};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn next(nursery: &mut Launched) -> Result<(Reply, Vec<OwnedFd>)> {
    loop {
        if let Some(reply) = nursery.link.receive()? {
            return Ok(reply);
        }
        wait_readable(&nursery.link, "a reply");
    }
}

/// Starts a nursery from memory. Returns it, and the time until it was ready.
fn start(image: &'static [u8]) -> Result<(Launched, Duration)> {
    let begin = Instant::now();
    let mut nursery = launch(&[NurseryImage::Embedded(image)], None, &Interrupt::default())?;
    next(&mut nursery)?;
    Ok((nursery, begin.elapsed()))
}

fn end(nursery: Launched) {
    let (pid, pidfd) = (nursery.pid, nursery.pidfd);
    drop(nursery.link);
    wait_readable(pidfd, "the end of the nursery");
    process::reap(pid);
}

/// Starts workers that write READY to a pipe, after the pid of their daemon if they have one. Returns all pids.
fn spawn(nursery: &mut Launched, count: u32, command: &str) -> Result<Vec<i32>> {
    let (reader, writer) = io::pipe()?;
    let mut pids = Vec::new();
    for local_rank in 0..count {
        let argv = vec![c_string(worker_program()), c_string(command)];
        let stdio = [Some(c"/dev/null".into()), Some(c"/dev/null".into()), None];
        let pass_fds = vec![PassedFd { source: 0, target: 1 }];
        let process = ProcessSpec { local_rank, stdio, pass_fds, ..ProcessSpec::new(argv, Vec::new()) };
        let fd = writer.as_fd().try_clone_to_owned()?;
        nursery.link.send(&Request::Spawn { process, keep_ignored: Vec::new() }, vec![fd])?;
        loop {
            if let (Reply::Spawned { pid, .. }, _) = next(nursery)? {
                pids.push(pid);
                break;
            }
        }
    }
    let mut lines = io::BufRead::lines(io::BufReader::new(reader));
    let mut ready = 0;
    while ready < count {
        match lines.next().ok_or("end of output")??.as_str() {
            "READY" => ready += 1,
            pid => pids.push(pid.parse()?),
        }
    }
    Ok(pids)
}

fn sweep(nursery: &mut Launched) -> Result<Duration> {
    let begin = Instant::now();
    let limits = SweepLimits::at_once(Duration::from_secs(10));
    nursery.link.send(&Request::Sweep { number: 1, left_by: None, limits, savers: None }, Vec::new())?;
    while !matches!(next(nursery)?.0, Reply::Swept { .. }) {}
    Ok(begin.elapsed())
}

/// Prints the median and the maximum in microseconds.
fn report(what: &str, mut figures: Vec<Duration>) -> Result<()> {
    figures.sort_unstable();
    let (median, largest) = (figures[figures.len() / 2], figures[figures.len() - 1]);
    writeln!(io::stdout(), "{what:<58} {:>8} {:>8} µs", median.as_micros(), largest.as_micros())?;
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let image: &'static [u8] = std::fs::read(arguments.next().ok_or("no image")?)?.leak();
    let rounds: u32 = arguments.next().as_deref().unwrap_or("30").parse()?;
    nix::sys::prctl::set_child_subreaper(true)?;
    writeln!(
        io::stdout(),
        "{:<58} {:>8} {:>8}",
        format!("{rounds} rounds, image of {} KiB", image.len() / 1024),
        "median",
        "largest"
    )?;

    let mut figures = Vec::new();
    for _ in 0..rounds {
        let (nursery, took) = start(image)?;
        figures.push(took);
        end(nursery);
    }
    report("launch to Ready", figures)?;

    let (mut nursery, _) = start(image)?;
    let mut figures = Vec::new();
    for _ in 0..rounds {
        let stdio = [Some(c"/dev/null".into()), Some(c"/dev/null".into()), None];
        let argv = vec![c"/bin/true".into()];
        let process = ProcessSpec { stdio, ..ProcessSpec::new(argv, Vec::new()) };
        let begin = Instant::now();
        nursery.link.send(&Request::Spawn { process, keep_ignored: Vec::new() }, Vec::new())?;
        while !matches!(next(&mut nursery)?.0, Reply::Spawned { .. }) {}
        figures.push(begin.elapsed());
        while !matches!(next(&mut nursery)?.0, Reply::Exited { .. }) {}
    }
    report("request to Spawned, one worker, /bin/true", figures)?;

    for line in std::fs::read_to_string(format!("/proc/{}/status", nursery.pid))?.lines() {
        if line.starts_with("VmRSS")
            || line.starts_with("RssAnon")
            || line.starts_with("RssFile")
            || line.starts_with("RssShmem")
        {
            writeln!(io::stdout(), "{line}")?;
        }
    }
    for (command, what) in [
        ("daemonise", "sweep, 8 workers with a daemon each"),
        ("chain", "sweep, a chain of fork, setsid, exit"),
        ("fork-bomb", "sweep, a fork bomb of up to 200 processes"),
    ] {
        let mut figures = Vec::new();
        for _ in 0..rounds {
            spawn(&mut nursery, if command == "daemonise" { 8 } else { 1 }, command)?;
            if command == "fork-bomb" {
                // Wait until the fork bomb has its full size, because a smaller one would be swept faster.
                while elasticrs_nursery::tree::descendants(nursery.pid, &[]).count() < 150 {}
            }
            figures.push(sweep(&mut nursery)?);
        }
        report(what, figures)?;
    }
    end(nursery);

    let (mut closed, mut killed) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (mut nursery, _) = start(image)?;
        let pids = spawn(&mut nursery, 8, "daemonise")?;
        let pidfds: Vec<_> = pids.iter().filter_map(|&pid| elasticrs_testkit::pidfd(pid)).collect();
        let begin = Instant::now();
        process::send_signal(&nursery.pidfd, libc::SIGKILL)?;
        for pidfd in &pidfds[..8] {
            wait_readable(pidfd, "a worker");
        }
        killed.push(begin.elapsed());
        process::reap(nursery.pid);
        elasticrs_nursery::sweep::sweep_children_of_self(&[], &pids[..8], Duration::from_secs(10));
        closed.push(begin.elapsed());
    }
    report("SIGKILL of the nursery to 8 workers gone", killed)?;
    report("… to their 8 daemons swept by the agent as well", closed)?;

    let mut figures = Vec::new();
    for _ in 0..rounds {
        let (mut nursery, _) = start(image)?;
        let pids = spawn(&mut nursery, 8, "daemonise")?;
        let begin = Instant::now();
        // Closing the link has the same effect as the agent's death, which only another process could measure.
        let pid = nursery.pid;
        drop(nursery);
        for pid in pids {
            wait_for_end(pid);
        }
        figures.push(begin.elapsed());
        wait_for_end(pid);
        process::reap(pid);
    }
    report("link lost to 8 workers and 8 daemons gone", figures)?;
    fenced(image, rounds)
}

/// Measures the fence (the deadline at which the nursery kills all workers): the cost of a renewal, and the delay
/// of the kill.
fn fenced(image: &'static [u8], rounds: u32) -> Result<()> {
    const RENEWALS: u32 = 1_000_000;
    let fence = Fence::new()?;
    let (mut nursery, _) = start(image)?;
    nursery.link.send(&Request::Fence { holder: fence.holder() }, fence.descriptors()?)?;
    fence.set(Some(boot_now() + 3_600_000_000_000));
    let begin = Instant::now();
    for number in 0..RENEWALS {
        fence.set(Some(boot_now() + 3_600_000_000_000 + u64::from(number)));
    }
    let each = begin.elapsed() / RENEWALS;
    writeln!(io::stdout(), "{:<58} {:>8} ns", "renewal, the reading of the clock included", each.as_nanos())?;

    let mut figures = Vec::new();
    for _ in 0..rounds {
        fence.set(None);
        let pids = spawn(&mut nursery, 8, "daemonise")?;
        let deadline = boot_now() + 20_000_000;
        fence.set(Some(deadline));
        for pid in pids {
            wait_for_end(pid);
        }
        figures.push(Duration::from_nanos(boot_now() - deadline));
        // Read the replies that are still queued, because they belong to this round.
        sweep(&mut nursery)?;
    }
    report("deadline of the fence to 8 workers and 8 daemons gone", figures)?;
    end(nursery);
    Ok(())
}
