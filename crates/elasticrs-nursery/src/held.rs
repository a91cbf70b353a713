//! Exited processes that their parent cannot reap yet, because a tracer (such as a debugger) holds them. The
//! kernel reports an exit to the tracer first. The parent is notified only after the tracer has handled the exit.
//! A debugger that waits at its prompt, or a stopped profiler, does not handle exits.

use std::fs;
use std::time::Duration;

use elasticrs_sys::process::WorkerExit;
use elasticrs_sys::procfs::{self, Stat};

use super::tree::{Status, has_died};

/// Time limit for a tracer, such as a debugger, to release an exited process. If the limit passes, the process is
/// reported. A working tracer releases the process within milliseconds.
pub const LIMIT: Duration = Duration::from_secs(1);

/// Number of the field in `/proc/PID/stat` that contains the exit status. The kernel shows 0 to readers that have
/// no permission to see the exit status.
const EXIT_CODE: usize = 52;

/// A process that has exited but cannot be reaped yet, because a tracer holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldProcess {
    pub exit: WorkerExit,
    /// Pid of the tracing process, such as a debugger.
    pub tracer: i32,
    /// One-line message for the user about the process.
    pub told: String,
}

/// Describes an exited process that cannot be reaped yet, because a tracer (such as a debugger) has not released it.
/// `None` if the process is running, is gone, or has no visible tracer.
pub fn by_tracer(pid: i32) -> Option<HeldProcess> {
    let stat = Stat::of(pid)?;
    if !has_died(pid, Status::in_stat(&stat)?) {
        return None;
    }
    let status = procfs::read(pid, "status")?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
    let exit = match stat.field(EXIT_CODE) {
        Some(status) if may_read(pid) => WorkerExit::from_wait_status(status).unwrap_or(WorkerExit::Unknown),
        _ => WorkerExit::Unknown,
    };
    (tracer != 0).then(|| HeldProcess { exit, tracer, told: tell(pid, &stat.name, tracer) })
}

/// Returns a one-line message about an exited process that cannot be reaped yet, because a tracer has not released it.
///
/// A tracer in another pid namespace is not named, because `/proc` does not show its name.
pub fn told(pid: i32) -> String {
    by_tracer(pid)
        .map_or_else(|| tell(pid, &Stat::of(pid).map(|stat| stat.name).unwrap_or_default(), 0), |held| held.told)
}

fn tell(pid: i32, name: &str, tracer: i32) -> String {
    let tracer = match Stat::of(tracer) {
        Some(stat) => format!("{} (pid {tracer})", stat.name),
        None => "a process of another pid namespace".to_owned(),
    };
    format!(
        "{name} (pid {pid}) has exited, but {tracer} traces it and has not waited for it, so it stays a zombie until then"
    )
}

/// Returns true if this process may read the exit status of the exited process `pid`.
///
/// Checks this by reading the link `cwd`, which requires the same permission. If the permission is granted, the read
/// fails with ENOENT, because an exited process has no working directory.
fn may_read(pid: i32) -> bool {
    let link = procfs::folder(pid).map(|folder| fs::read_link(folder.join("cwd")));
    link.is_some_and(|link| link.is_err_and(|error| error.raw_os_error() == Some(libc::ENOENT)))
}
