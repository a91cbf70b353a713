//! Processes that have ended and that their parent cannot collect: a tracer (a debugger at its prompt, a profiler that was
//! stopped) sees the end first, and does not look.

use std::fs;
use std::time::Duration;

use super::tree::{Status, has_died};
use crate::exit::WorkerExit;
use crate::procfs;
use crate::stat::Stat;

/// A tracer that lives collects within milliseconds; what it leaves for so long is told, and waited for no more.
pub const LIMIT: Duration = Duration::from_secs(1);

/// The field of the exit status; 0 for who may not read it.
const EXIT_CODE: usize = 52;

/// A process that has exited but cannot be reaped yet, because a tracer holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub exit: WorkerExit,
    /// Pid of the tracer.
    pub tracer: i32,
    /// One-line description for the user.
    pub told: String,
}

/// Describes a process that a tracer holds. `None` if the process is running, is gone, or has no visible tracer.
pub fn by_tracer(pid: i32) -> Option<Held> {
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
    (tracer != 0).then(|| Held { exit, tracer, told: tell(pid, &stat.name, tracer) })
}

/// The line for a process that a sweep did not wait for; its tracer may be of another pid namespace.
pub fn told(pid: i32) -> String {
    by_tracer(pid)
        .map_or_else(|| tell(pid, &Stat::of(pid).map(|stat| stat.name).unwrap_or_default(), 0), |held| held.told)
}

fn tell(pid: i32, name: &str, tracer: i32) -> String {
    let tracer = match Stat::of(tracer) {
        Some(stat) => format!("{} (pid {tracer})", stat.name),
        None => "a process that cannot be seen from here".to_owned(),
    };
    format!("{name} (pid {pid}) has ended, but {tracer} traces it and does not wait for it: it stays until then")
}

/// The same permission as for the exit status. A process that has ended has no directory any more, which is asked later.
fn may_read(pid: i32) -> bool {
    let link = procfs::folder(pid).map(|folder| fs::read_link(folder.join("cwd")));
    link.is_some_and(|link| link.is_err_and(|error| error.raw_os_error() == Some(libc::ENOENT)))
}
