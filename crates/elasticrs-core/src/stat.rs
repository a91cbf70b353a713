//! `/proc/PID/stat`: what the kernel says of a process or a thread, in numbered fields.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use crate::procfs;

/// Field with the start time in clock ticks since boot. Distinguishes a process from a later one with the same pid.
pub const START_TIME: usize = 22;

/// Bits of the kernel, of which one means that the process is about to be a zombie.
const FLAGS: usize = 9;
const PF_EXITING: u32 = 4;

/// Content of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The kernel's short name, at most 15 bytes.
    pub name: String,
    /// Behind the name.
    fields: String,
}

impl Stat {
    /// Reads the status of this process. `None` if the process is gone.
    pub fn of(pid: i32) -> Option<Self> {
        Self::in_folder(&procfs::folder(pid)?)
    }

    /// Reads the status of the process or thread with this folder in `/proc`. `None` if it is gone.
    pub fn in_folder(folder: &Path) -> Option<Self> {
        Self::parse(&fs::read(folder.join("stat")).ok()?)
    }

    /// Parses the content. `None` if it has another format.
    pub fn parse(stat: &[u8]) -> Option<Self> {
        // The name stands in parentheses and may hold any byte, parentheses included.
        let name = stat.iter().position(|&byte| byte == b'(')? + 1;
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let name = String::from_utf8_lossy(stat.get(name..end)?).into_owned();
        Some(Self { name, fields: str::from_utf8(stat.get(end + 2..)?).ok()?.to_owned() })
    }

    /// True if the process has exited or is exiting, so that its program no longer runs.
    pub fn is_ending(&self) -> bool {
        self.field::<u32>(FLAGS).is_none_or(|flags| flags & PF_EXITING != 0)
    }

    /// A field by its number in proc(5): 3, the state, is the first.
    pub fn field<T: FromStr>(&self, number: usize) -> Option<T> {
        self.fields.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_and_blanks_do_not_confuse() {
        let stat = Stat::parse(b"42 (a) R 7 (b) S 41 40 39 0 -1\n").unwrap();
        assert_eq!((stat.field(3), stat.field(4), stat.field(8)), (Some('S'), Some(41), Some(-1)));
        assert_eq!(stat.name, "a) R 7 (b");
        assert_eq!((stat.field::<u32>(8), stat.field::<i32>(9), stat.field::<i32>(2)), (None, None, None));
        assert_eq!([&b"42 (a"[..], b"42 (a)", b"", b"42 (a) \xff"].map(Stat::parse), [None, None, None, None]);
    }

    #[test]
    fn a_thread_has_one_too() {
        let pid = std::process::id().cast_signed();
        let thread = Stat::in_folder(Path::new("/proc/thread-self")).unwrap();
        assert_eq!(thread.field::<i32>(4), Stat::of(pid).unwrap().field(4));
        assert_eq!(Stat::of(-1), None);
    }
}
