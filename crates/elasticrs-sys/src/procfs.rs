//! Reads `/proc`, but only if it shows the pid namespace of this process. Parses `/proc/PID/stat`, in which the kernel
//! describes a process or a thread in numbered fields.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
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

/// Number of the field that contains the start time, in clock ticks since boot. The start time distinguishes a process
/// from a later process with the same pid.
pub const START_TIME: usize = 22;

/// Number of the field that contains the process flags. The flag [`PF_EXITING`] means that the process is
/// exiting.
const FLAGS: usize = 9;
const PF_EXITING: u32 = 4;

/// Parsed content of a `stat` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The kernel's short name of the process, at most 15 bytes.
    pub name: String,
    /// The fields that follow the name in the file, separated by spaces.
    fields: String,
}

impl Stat {
    /// Reads the `stat` file of a process. Returns `None` if the process no longer exists, or if `/proc` does not show
    /// this process's pid namespace ([`is_own`]).
    pub fn of(pid: i32) -> Option<Self> {
        Self::in_folder(&folder(pid)?)
    }

    /// Reads the `stat` file in the `/proc` directory of a process or thread. Returns `None` if the process or thread
    /// no longer exists.
    pub fn in_folder(folder: &Path) -> Option<Self> {
        Self::parse(&fs::read(folder.join("stat")).ok()?)
    }

    /// Parses the content of a `stat` file. Returns `None` if the format is unexpected.
    pub fn parse(stat: &[u8]) -> Option<Self> {
        // The name is enclosed in parentheses and may contain any byte, including parentheses.
        let name = stat.iter().position(|&byte| byte == b'(')? + 1;
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let name = String::from_utf8_lossy(stat.get(name..end)?).into_owned();
        Some(Self { name, fields: str::from_utf8(stat.get(end + 2..)?).ok()?.to_owned() })
    }

    /// Returns true if the process has exited or is exiting, so that its program no longer runs.
    pub fn is_ending(&self) -> bool {
        self.field::<u32>(FLAGS).is_none_or(|flags| flags & PF_EXITING != 0)
    }

    /// Returns a field by its number in proc(5). The first available field is number 3, the state.
    pub fn field<T: FromStr>(&self, number: usize) -> Option<T> {
        self.fields.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
    }
}

/// Returns the kernel function in which a process waits. Empty if the process is running, has exited, or cannot be
/// inspected.
pub fn wait_channel(pid: i32) -> String {
    read(pid, "wchan").filter(|name| name != "0").unwrap_or_default()
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

    #[test]
    fn process_names_with_parentheses_and_spaces_are_parsed() {
        let stat = Stat::parse(b"42 (a) R 7 (b) S 41 40 39 0 -1\n").unwrap();
        assert_eq!((stat.field(3), stat.field(4), stat.field(8)), (Some('S'), Some(41), Some(-1)));
        assert_eq!(stat.name, "a) R 7 (b");
        assert_eq!((stat.field::<u32>(8), stat.field::<i32>(9), stat.field::<i32>(2)), (None, None, None));
        assert_eq!([&b"42 (a"[..], b"42 (a)", b"", b"42 (a) \xff"].map(Stat::parse), [None, None, None, None]);
    }

    #[test]
    fn the_stat_file_of_a_thread_can_be_read() {
        let pid = std::process::id().cast_signed();
        let thread = Stat::in_folder(Path::new("/proc/thread-self")).unwrap();
        assert_eq!(thread.field::<i32>(4), Stat::of(pid).unwrap().field(4));
        assert_eq!(Stat::of(-1), None);
    }
}
