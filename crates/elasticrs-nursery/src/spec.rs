//! Description of a process to start, as plain data. Python passes it to the agent's runtime, and the runtime
//! passes it to the nursery.

use std::ffi::CString;

use serde::{Deserialize, Serialize};

/// A file descriptor that is passed to a worker under a given number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedFd {
    /// Index into the list of descriptors that are sent with the specs.
    pub source: u32,
    pub target: i32,
}

/// Description of a worker process to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSpec {
    pub local_rank: u32,
    /// Program and its arguments. A program name without a slash is looked up in the `PATH` of `env`.
    pub argv: Vec<CString>,
    /// The complete environment, as `NAME=value` entries.
    pub env: Vec<CString>,
    /// Working directory. `None` for the agent's working directory.
    pub cwd: Option<CString>,
    /// Files of the standard streams. Standard input is opened for reading. An output file is opened for appending, and
    /// created with mode 0644 if it does not exist. `None` for the agent's descriptor with the same number, so that a
    /// terminal stays a terminal.
    pub stdio: [Option<CString>; 3],
    /// Additional file descriptors to pass to the worker. All other descriptors are closed.
    pub pass_fds: Vec<PassedFd>,
    /// CPUs that the worker may run on. `None` for all CPUs that the nursery may use.
    pub cpus: Option<CpuSet>,
    /// True to fork the worker from a [warm](crate::launch::Warm) nursery instead of executing its program.
    pub warm: bool,
    /// True to make the worker a child subreaper. While the worker is running, its orphaned descendants then stay below
    /// it in the process tree. Set for groups that replace failed workers.
    pub keeps_orphans: bool,
}

impl ProcessSpec {
    /// Creates a spec for local rank 0 that uses the agent's standard streams and working directory, and all CPUs.
    pub fn new(argv: Vec<CString>, env: Vec<CString>) -> Self {
        Self {
            local_rank: 0,
            argv,
            env,
            cwd: None,
            stdio: [None, None, None],
            pass_fds: Vec::new(),
            cpus: None,
            warm: false,
            keeps_orphans: false,
        }
    }
}

/// Set of CPU numbers, in the kernel's mask format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSet {
    mask: Vec<u8>,
}

impl CpuSet {
    /// Exclusive upper bound on CPU numbers, far above what any kernel supports.
    const LIMIT: usize = 1 << 16;
    /// Size of a word in bytes. The kernel requires masks to consist of whole words.
    const WORD: usize = size_of::<u64>();

    /// Creates a set of these CPUs. `None` if `cpus` is empty or contains a number that no kernel supports.
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

    /// Returns the mask, in the format of `sched_setaffinity`.
    pub fn mask(&self) -> &[u8] {
        &self.mask
    }
}

#[cfg(test)]
mod tests {
    use super::CpuSet;

    #[test]
    fn a_cpu_mask_consists_of_whole_words() {
        assert_eq!(CpuSet::new(&[63]).unwrap().mask().len(), 8);
        assert_eq!(CpuSet::new(&[0, 64]).unwrap().mask().len(), 16);
    }

    #[test]
    fn a_cpu_set_without_cpus_or_with_an_impossible_cpu_is_refused() {
        assert_eq!(CpuSet::new(&[]), None);
        assert_eq!(CpuSet::new(&[usize::MAX]), None);
    }
}
