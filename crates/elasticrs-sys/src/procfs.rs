//! Accesses `/proc`, but only if it shows the pid namespace of this process.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Message for the user if [`is_own`] returns false.
pub const MISSING: &str = "/proc is missing or shows another pid namespace. Leftover processes are still killed, but \
    reported without their names; helper processes that remove shared memory are killed too; reports about a hung worker \
    do not show what it waits for";

/// Returns true if `/proc` shows the pid namespace of this process. Returns false if `/proc` is not mounted (a
/// bare `chroot`), or if it shows an outer namespace (`unshare --pid` without `--mount-proc`). In an outer
/// namespace, the same pids belong to other processes.
pub fn is_own() -> bool {
    static IS_OWN: OnceLock<bool> = OnceLock::new();
    *IS_OWN
        .get_or_init(|| fs::read_to_string("/proc/self/status").is_ok_and(|status| is_of(&status, std::process::id())))
}

/// Returns the directory of a process in `/proc`. `None` if [`is_own`] is false.
pub fn folder(pid: i32) -> Option<PathBuf> {
    is_own().then(|| PathBuf::from(format!("/proc/{pid}")))
}

/// Reads a file in the `/proc` directory of a process. `None` if the file cannot be read, or if [`is_own`] is false.
pub fn read(pid: i32, name: &str) -> Option<String> {
    fs::read_to_string(folder(pid)?.join(name)).ok()
}

/// Returns true if `status`, the content of `/proc/PID/status`, describes the process `pid`.
///
/// Returns false if `/proc` shows an outer pid namespace, where the same pid can belong to another process.
fn is_of(status: &str, pid: u32) -> bool {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    // `NSpid` lists the pids of the process, from the namespace of this `/proc` to the innermost one.
    field("NSpid:").or_else(|| field("Pid:")) == Some(&pid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_is_of_another_pid_namespace_if_a_status_lists_several_pids() {
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
