//! `/proc`, as far as it shows the processes that this one sees.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Message for the user if [`is_own`] is false.
pub const MISSING: &str = "/proc is missing, or is that of another pid namespace: what workers leave behind is ended all \
    the same, but told without its name; helpers that remove shared memory are killed with the rest; what a hung worker \
    waits for is not known";

/// True if `/proc` shows the pid namespace of this process. Otherwise none is mounted (a bare `chroot`), or that of an outer
/// namespace (`unshare --pid` without `--mount-proc`), where our pids are those of other processes.
pub fn is_own() -> bool {
    static IS_OWN: OnceLock<bool> = OnceLock::new();
    *IS_OWN
        .get_or_init(|| fs::read_to_string("/proc/self/status").is_ok_and(|status| is_of(&status, std::process::id())))
}

/// The folder of a process; `None` where [`is_own`] is false.
pub fn folder(pid: i32) -> Option<PathBuf> {
    is_own().then(|| PathBuf::from(format!("/proc/{pid}")))
}

/// A file of a process; `None` where there is none, or where [`is_own`] is false.
pub fn read(pid: i32, name: &str) -> Option<String> {
    fs::read_to_string(folder(pid)?.join(name)).ok()
}

/// True if this is the status of a process that sees itself under this pid, and as nothing else on the way to it.
fn is_of(status: &str, pid: u32) -> bool {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    // Its pids from the namespace of this /proc inwards.
    field("NSpid:").or_else(|| field("Pid:")) == Some(&pid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_our_own_where_we_have_one_pid_in_it() {
        for (status, expected) in [
            ("Pid:\t7\nPPid:\t1\nNSpid:\t7\n", true),
            ("Pid:\t7\n", true),
            ("Pid:\t123\nNSpid:\t123\t7\n", false),
            ("Pid:\t7\nNSpid:\t7\t7\n", false),
            ("", false),
        ] {
            assert_eq!(is_of(status, 7), expected, "{status}");
        }
        assert!(is_own());
    }
}
