//! The smallest agent: starts workers under a nursery, prints their pids, and waits until it is killed.
//!
//! `small-agent NURSERY COUNT PROGRAM [ARGUMENT …]`. Each worker uses the agent's standard output. When all
//! workers run, the agent prints the line `nursery PID workers PID …`.

use std::error::Error;
use std::ffi::CString;
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;

use elasticrs_nursery::launch::{Interrupt, Launched, NurseryImage, launch};
use elasticrs_nursery::protocol::{Reply, Request};
use elasticrs_nursery::spec::ProcessSpec;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsFd;

fn next(nursery: &mut Launched) -> Result<Reply, Box<dyn Error>> {
    loop {
        if let Some((reply, _)) = nursery.link.receive()? {
            return Ok(reply);
        }
        poll(&mut [PollFd::new(nursery.link.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let mut argument = || arguments.next().ok_or("an argument is missing");
    let program = CString::new(argument()?.into_vec())?;
    let count: u32 = argument()?.to_str().ok_or("no number")?.parse()?;
    let argv = arguments.map(|argument| CString::new(argument.into_vec())).collect::<Result<Vec<_>, _>>()?;

    let mut nursery = launch(
        &[NurseryImage::Program { path: program, args: vec![c"worker-nursery".into()] }],
        None,
        &Interrupt::default(),
    )?;
    next(&mut nursery)?;
    let mut pids = Vec::new();
    for local_rank in 0..count {
        let stdio = [Some(c"/dev/null".into()), None, None];
        let (argv, env) = (argv.clone(), vec![c"PATH=/usr/bin:/bin".into()]);
        let process = ProcessSpec { local_rank, stdio, ..ProcessSpec::new(argv, env) };
        nursery.link.send(&Request::Spawn { process, keep_ignored: Vec::new() }, Vec::new())?;
        // Skip other replies, because some workers may stop or exit before all have been started.
        let pid = loop {
            match next(&mut nursery)? {
                Reply::Spawned { pid, .. } => break pid,
                failed @ Reply::SpawnFailed { .. } => return Err(format!("{failed:?}").into()),
                _ => {}
            }
        };
        pids.push(pid.to_string());
    }
    writeln!(io::stdout(), "nursery {} workers {}", nursery.pid, pids.join(" "))?;
    loop {
        next(&mut nursery)?;
    }
}
