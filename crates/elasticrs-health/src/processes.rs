//! Resource usage of a worker, read from `/proc` on request.

use std::fmt::Display;

use elasticrs_sys::procfs::{START_TIME, Stat, is_own};
use nix::unistd::{SysconfVar, sysconf};

/// Resource usage of one process, without its children.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    pub resident: u64,
    /// CPU time in seconds, user and kernel mode together.
    pub cpu: f64,
    /// Start time in clock ticks since boot. Together with the pid, it identifies the process.
    pub started: u64,
}

/// A running worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    pub rank: u32,
    pub local_rank: u32,
    pub pid: i32,
    pub(crate) started: Option<u64>,
}

impl Worker {
    /// Creates the description of a worker. The worker's process must be running, because its start time is recorded to
    /// distinguish it from a later process with the same pid.
    pub fn new(rank: u32, local_rank: u32, pid: i32) -> Self {
        Self { rank, local_rank, pid, started: usage(pid).map(|usage| usage.started) }
    }

    pub(crate) fn labels(&self) -> [(&'static str, &dyn Display); 2] {
        [("rank", &self.rank), ("local_rank", &self.local_rank)]
    }
}

/// Returns the usage of a process. `None` if the process does not exist.
pub fn usage(pid: i32) -> Option<Usage> {
    usage_in(&Stat::of(pid)?, of_system(SysconfVar::PAGE_SIZE, 4096), of_system(SysconfVar::CLK_TCK, 100))
}

/// Returns the kernel's letter for the state of the process that had this pid at the time `at`, in nanoseconds of the
/// boot clock. `None` if that process no longer exists. Returns `R` (running) if `/proc` belongs to another PID
/// namespace.
pub(crate) fn state_of(pid: i32, at: u64) -> Option<char> {
    if !is_own() {
        return Some('R');
    }
    let stat = Stat::of(pid)?;
    let ticks: u64 = of_system(SysconfVar::CLK_TCK, 100);
    // A process that started after `at` is a different one, which has reused the pid.
    let has_run = stat.field::<u64>(START_TIME)?.saturating_mul(1_000_000_000 / ticks.max(1)) <= at;
    has_run.then(|| stat.field(3)).flatten()
}

fn usage_in(stat: &Stat, page_size: u64, ticks: u64) -> Option<Usage> {
    let field = |number| stat.field::<u64>(number);
    #[expect(clippy::cast_precision_loss, reason = "ticks fit for millions of years")]
    let cpu = (field(14)? + field(15)?) as f64 / ticks as f64;
    Some(Usage { resident: field(24)?.saturating_mul(page_size), cpu, started: field(START_TIME)? })
}

fn of_system(variable: SysconfVar, default: u64) -> u64 {
    sysconf(variable)
        .ok()
        .flatten()
        .and_then(|value| u64::try_from(value).ok())
        .filter(|&value| value > 0)
        .unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_cpu_time_are_read_from_proc_stat() {
        let numbers: Vec<String> = (4..=30).map(|number| number.to_string()).collect();
        let of = |text: &str| usage_in(&Stat::parse(text.as_bytes()).unwrap(), 4096, 100);
        let usage = of(&format!("12 (a) b) S {}\n", numbers.join(" "))).unwrap();
        assert_eq!(usage, Usage { resident: 24 * 4096, cpu: 0.29, started: 22 });
        assert_eq!(of("12 (a) S 1 2"), None);
    }

    #[test]
    fn the_state_of_a_process_is_not_that_of_a_later_one_with_its_pid() {
        let own = std::process::id().cast_signed();
        assert!(state_of(own, elasticrs_sys::clock::boot_now()).is_some());
        assert_eq!(state_of(own, 0), None);
        assert_eq!(state_of(-1, u64::MAX), None);
    }

    #[test]
    fn resource_usage_is_known_only_for_a_running_process() {
        assert!(usage(std::process::id().cast_signed()).unwrap().resident > 1 << 16);
        assert_eq!(usage(-1), None);
    }
}
