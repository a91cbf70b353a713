//! Checks whether the machine's limits allow the requested number of processes, before the first worker starts.

use std::fs;
use std::path::{Path, PathBuf};

use elasticrs_nursery::start::given_descriptor_limit;
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;

/// File descriptors that the agent needs for itself, not counting those for workers, log files, timers and
/// heartbeats.
const OWN_DESCRIPTORS: u64 = 64;

/// Error: the requested number of processes exceeds a limit of the machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TooMany {
    #[error("{wanted} processes are more than {limit} allows ({allowed})")]
    Processes {
        wanted: u64,
        /// Name of the exceeded limit, such as `RLIMIT_NPROC`, or the path of the control group file that sets it.
        limit: String,
        allowed: u64,
    },
    #[error("an agent with {of} needs {needed} descriptors, RLIMIT_NOFILE allows {allowed}: raise it (ulimit -n)")]
    Descriptors {
        /// Part of the error message that names what needs the descriptors, such as `2 workers and 1 log file`.
        of: String,
        /// Number of required file descriptors, including the agent's own.
        needed: u64,
        allowed: u64,
    },
}

fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// Returns the soft limit on open file descriptors that applies to the workers.
pub(crate) fn descriptors_of_workers() -> u64 {
    given_descriptor_limit().or_else(|| Some(getrlimit(Resource::RLIMIT_NOFILE).ok()?.0)).unwrap_or(u64::MAX)
}

/// Checks the requested numbers against `pid_max`, `RLIMIT_NPROC`, `RLIMIT_NOFILE`, and the `pids.max` of every control
/// group that contains this process. `files` is the number of log files that the agent follows, and each file needs one
/// file descriptor. `others` is the number of file descriptors for timers and heartbeats.
///
/// Ignores a limit that cannot be read. If the workers exceed that limit, starting them fails later.
pub fn check(processes: u64, files: u64, others: u64) -> Result<(), TooMany> {
    let soft = |resource| getrlimit(resource).ok().map(|(soft, _)| soft);
    // `RLIMIT_NPROC` does not apply to root.
    let nproc = soft(Resource::RLIMIT_NPROC).filter(|_| !geteuid().is_root());
    let known = [("kernel.pid_max", read_number(Path::new("/proc/sys/kernel/pid_max"))), ("RLIMIT_NPROC", nproc)];
    let known = known.into_iter().filter_map(|(name, allowed)| Some((name.to_owned(), allowed?)));
    let groups = pids_files().into_iter().filter_map(|path| Some((path.display().to_string(), read_number(&path)?)));
    known.chain(groups).try_for_each(|(limit, allowed)| {
        if processes > allowed { Err(TooMany::Processes { wanted: processes, limit, allowed }) } else { Ok(()) }
    })?;
    let needed = OWN_DESCRIPTORS.saturating_add(processes).saturating_add(files).saturating_add(others);
    match soft(Resource::RLIMIT_NOFILE) {
        Some(allowed) if needed > allowed => {
            let mut of = vec![counted(processes, "worker", "workers")];
            of.extend((files > 0).then(|| counted(files, "log file", "log files")));
            of.extend((others > 0).then(|| "timers or heartbeats".to_owned()));
            Err(TooMany::Descriptors { of: of.join(" and "), needed, allowed })
        }
        _ => Ok(()),
    }
}

/// Reads a number from a file. `None` if the content is not a number, such as `max` for no limit.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn pids_files() -> Vec<PathBuf> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    pids_files_of(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

/// Returns the `pids.max` files of the process's control group and its ancestors. The arguments are the contents
/// of `/proc/self/cgroup` and `/proc/self/mountinfo`. Omits control groups that no mount makes visible.
fn pids_files_of(cgroup: &str, mountinfo: &str) -> Vec<PathBuf> {
    // A line of `/proc/self/cgroup` looks like `8:pids:/path` in cgroup v1, and like `0::/path` in cgroup v2.
    let path_of = |controller: &str| {
        cgroup.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let names = fields.next()?;
            (names.split(',').any(|name| name == controller)).then(|| fields.next())?
        })
    };
    let (path, kind) = match path_of("pids") {
        Some(path) => (path, "cgroup"),
        None => match path_of("") {
            Some(path) => (path, "cgroup2"),
            None => return Vec::new(),
        },
    };
    mountinfo.lines().find_map(|line| below_mount(line, path, kind)).unwrap_or_default()
}

/// Parses one line of `/proc/self/mountinfo`. If the mount contains the control group `path`, returns the `pids.max`
/// files of the control group and its ancestors.
///
/// Format of a line: `36 25 0:31 ROOT POINT OPTIONS … - TYPE SOURCE SUPER`.
fn below_mount(line: &str, path: &str, kind: &str) -> Option<Vec<PathBuf>> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let (mount_kind, options) = (after.next()?, after.nth(1)?);
    if mount_kind != kind || (kind == "cgroup" && !options.split(',').any(|o| o == "pids")) {
        return None;
    }
    let mut before = before.split(' ').skip(3);
    let (root, point) = (before.next()?, before.next()?);
    let inside = Path::new(path).strip_prefix(root).ok()?;
    Some(inside.ancestors().map(|dir| Path::new(point).join(dir).join("pids.max")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
32 30 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
33 30 0:29 /box /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    #[test]
    fn pids_max_files_of_a_v1_cgroup_include_those_of_its_parents() {
        let files = pids_files_of("8:pids:/a/b\n0::/box/c\n", MOUNTS);
        let expected = ["a/b/", "a/", ""].map(|dir| PathBuf::from(format!("/sys/fs/cgroup/pids/{dir}pids.max")));
        assert_eq!(files, expected);
    }

    #[test]
    fn pids_max_paths_of_a_v2_cgroup_start_at_the_root_of_its_mount() {
        let files = pids_files_of("0::/box/c\n", MOUNTS);
        let expected = ["c/", ""].map(|dir| PathBuf::from(format!("/sys/fs/cgroup/unified/{dir}pids.max")));
        assert_eq!(files, expected);
    }

    #[test]
    fn a_cgroup_outside_of_every_mount_has_no_pids_max_file() {
        assert_eq!(pids_files_of("0::/elsewhere\n", MOUNTS), Vec::<PathBuf>::new());
        assert_eq!(pids_files_of("", ""), Vec::<PathBuf>::new());
    }

    #[test]
    fn five_million_processes_exceed_the_limits_of_every_machine() {
        // Five million processes exceed the limits of every machine, because `pid_max` is at most 4,194,304.
        let error = check(5_000_000, 0, 0).unwrap_err();
        assert!(error.to_string().starts_with("5000000 processes are more than "), "{error}");
        assert_eq!(check(1, 0, 2), Ok(()));
    }

    #[test]
    fn log_files_timers_and_heartbeats_count_toward_the_descriptor_limit() {
        let error = check(1, u64::MAX, 0).unwrap_err();
        let expected =
            format!("an agent with 1 worker and {0} log files needs {0} descriptors, RLIMIT_NOFILE allows ", u64::MAX);
        assert!(error.to_string().starts_with(&expected), "{error}");
        let error = check(2, 0, u64::MAX).unwrap_err();
        assert!(error.to_string().starts_with("an agent with 2 workers and timers or heartbeats needs "), "{error}");
    }
}
