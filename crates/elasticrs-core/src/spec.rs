//! What to start: plain data, handed from Python to the agent's runtime and from there to the nursery.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::signal::Signal;

/// Where one of the three standard descriptors of a worker goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stdio {
    /// The agent's own descriptor of that number: a terminal stays a terminal.
    Inherit,
    /// `/dev/null`.
    Null,
    /// A file, opened in the child for appending, created with mode 0644 when it is not there.
    File(#[serde(with = "os_path")] PathBuf),
}

/// One descriptor that a worker gets under a given number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedFd {
    /// Its index among the descriptors that come with the spec ([`GroupSpec::descriptors`]).
    pub source: u32,
    pub target: i32,
}

/// One worker process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSpec {
    pub local_rank: u32,
    /// Program and arguments; a program without a slash is searched for in `PATH` of `env`.
    #[serde(with = "os_strings")]
    pub argv: Vec<OsString>,
    /// The whole environment, `NAME=value` each.
    #[serde(with = "os_strings")]
    pub env: Vec<OsString>,
    /// Working directory; the agent's when `None`.
    #[serde(with = "optional_os_path")]
    pub cwd: Option<PathBuf>,
    pub stdio: [Stdio; 3],
    /// Further descriptors; all others are closed.
    pub pass_fds: Vec<PassedFd>,
    /// The CPUs that it may run on; all that the nursery may use when `None`.
    pub cpus: Option<CpuSet>,
    /// It is a fork of the nursery where that is [warm](crate::nursery::launch::Warm), which has its command line.
    pub warm: bool,
    /// It is a child subreaper: what its descendants leave stays below it as long as it lives. Set for groups that
    /// [replace](GroupSpec::replaces).
    pub keeps_orphans: bool,
}

impl ProcessSpec {
    /// Local rank 0, with the agent's streams and folder, on all CPUs.
    pub fn new(argv: Vec<OsString>, env: Vec<OsString>) -> Self {
        Self {
            local_rank: 0,
            argv,
            env,
            cwd: None,
            stdio: [Stdio::Inherit, Stdio::Inherit, Stdio::Inherit],
            pass_fds: Vec::new(),
            cpus: None,
            warm: false,
            keeps_orphans: false,
        }
    }
}

/// CPUs by their numbers in Linux, in the form that the kernel takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSet {
    mask: Vec<u8>,
}

impl CpuSet {
    /// More than any kernel can be built for.
    const LIMIT: usize = 1 << 16;
    /// The kernel counts masks in words.
    const WORD: usize = size_of::<u64>();

    /// A set of these; `None` when it would be empty or a number is beyond what any kernel knows.
    pub fn new(cpus: &[usize]) -> Option<Self> {
        let last = cpus.iter().copied().max().filter(|&last| last < Self::LIMIT)?;
        let mut mask = vec![0; (last / 8 + 1).next_multiple_of(Self::WORD)];
        for cpu in cpus {
            // On a big-endian machine the lowest bits of a word are in its last byte.
            let byte = if cfg!(target_endian = "big") { (cpu / 8) ^ (Self::WORD - 1) } else { cpu / 8 };
            mask[byte] |= 1 << (cpu % 8);
        }
        Some(Self { mask })
    }

    /// For `sched_setaffinity`.
    pub fn mask(&self) -> &[u8] {
        &self.mask
    }
}

/// How a group is stopped: signal, grace, then SIGKILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopPolicy {
    /// The first signal. SIGKILL skips the grace.
    pub signal: Signal,
    /// Time between the signal and SIGKILL, one deadline for all ranks.
    pub grace: Duration,
}

impl StopPolicy {
    /// True if it leaves no time.
    pub fn is_hard(self) -> bool {
        self.signal == Signal::KILL || self.grace.is_zero()
    }
}

/// Whom the signals of a stop reach before SIGKILL, which reaches every process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopScope {
    /// The worker alone, and the rest of its process group when it has ended: its helpers serve it while it saves.
    Worker,
    /// Its process group at once: for a program that passes nothing on.
    Group,
}

/// What happens to descendants that are still there when every worker has exited 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descendants {
    /// They get this long to end by themselves, then SIGTERM, one second, SIGKILL.
    Linger(Duration),
    /// They are left alone.
    Keep,
}

/// All workers of one attempt on this node.
#[derive(Debug)]
pub struct GroupSpec {
    /// The workers; local ranks are `0..n` in order.
    pub processes: Vec<ProcessSpec>,
    /// What [`ProcessSpec::pass_fds`] of the workers point into.
    pub descriptors: Vec<OwnedFd>,
    /// Executed in Rust when the first worker fails.
    pub on_failure: StopPolicy,
    /// Of that stop and of every other.
    pub stop_scope: StopScope,
    /// Applied when all have exited 0; failed and stopped groups are swept at once.
    pub on_success: Descendants,
    /// Starting all of them must not take longer: exec on a dead network file system blocks for ever.
    pub start_deadline: Duration,
    /// Signals that stay ignored in the workers because they were ignored when the agent was started (`nohup`).
    pub keep_ignored: Vec<Signal>,
    /// A worker that fails stops nobody: what it leaves is swept, and another process may be started in its place.
    pub replaces: bool,
}

/// `OsString` as bytes: postcard's own form carries an enum tag and a platform's encoding.
mod os_strings {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(strings: &[OsString], serializer: S) -> Result<S::Ok, S::Error> {
        strings.iter().map(|s| s.as_bytes()).collect::<Vec<_>>().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<OsString>, D::Error> {
        Ok(Vec::<Vec<u8>>::deserialize(deserializer)?.into_iter().map(OsString::from_vec).collect())
    }
}

/// A path as bytes: serde's own form is UTF-8, and fails for other paths.
mod os_path {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        Ok(OsString::from_vec(Vec::deserialize(deserializer)?).into())
    }
}

mod optional_os_path {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::PathBuf;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| path.as_os_str().as_bytes()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        let bytes = Option::<Vec<u8>>::deserialize(deserializer)?;
        Ok(bytes.map(|bytes| OsString::from_vec(bytes).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::CpuSet;

    #[test]
    fn a_mask_is_made_of_whole_words() {
        assert_eq!(CpuSet::new(&[63]).unwrap().mask().len(), 8);
        assert_eq!(CpuSet::new(&[0, 64]).unwrap().mask().len(), 16);
    }

    #[test]
    fn nothing_and_the_impossible_are_no_sets() {
        assert_eq!(CpuSet::new(&[]), None);
        assert_eq!(CpuSet::new(&[usize::MAX]), None);
    }
}
