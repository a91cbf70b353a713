//! Training steps of the workers, read at a scrape from the files in memory that the agent shares with them.
//!
//! The layout of these files is in `python/elasticrs/_engine/inside/keep/layout.py`.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

const WORD: usize = 8;
/// Number of 8-byte words that are read from the start of each file.
const WORDS: usize = 80;
/// Pid of the process that uses `elasticrs.Keep`.
const KEEP_PID: usize = 2;
/// The last step that `elasticrs.Keep` has counted, plus 1. 0 if there is none.
const KEPT: usize = 5;
/// The step from which `elasticrs.Keep` went on in this attempt, plus 1. 0 if there is none.
const RESTORED: usize = 22;
/// Pid of the process whose optimizer steps are counted.
const OWNER: usize = 72;
/// Number of optimizer steps since the start of the worker.
const STEPS: usize = 73;
/// Higher numbers are ignored, because they are no steps: workers can write anything into their files.
const MAX_STEP: u64 = 1 << 62;

/// Last training step of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastStep {
    pub step: u64,
    /// True if `elasticrs.Keep` counts the worker's steps, across restarts. False if the step is a number of optimizer
    /// steps.
    pub is_kept: bool,
}

/// Returns the last training step of a worker. `None` if the worker's file has none, or cannot be read.
pub(crate) fn last_step(file: &File) -> Option<LastStep> {
    let mut bytes = [0; WORD * WORDS];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let word = |index: usize| {
        let (words, _) = bytes.as_chunks();
        u64::from_le_bytes(words[index])
    };
    let is_step = |word: &u64| (1..=MAX_STEP).contains(word);
    if word(KEEP_PID) != 0 {
        let step = [KEPT, RESTORED].map(word).into_iter().find(is_step)?;
        return Some(LastStep { step: step - 1, is_kept: true });
    }
    let step = Some(word(STEPS)).filter(|step| word(OWNER) != 0 && is_step(step))?;
    Some(LastStep { step, is_kept: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_with(words: &[(usize, u64)]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(65536).unwrap();
        for (index, word) in words {
            file.write_all_at(&word.to_le_bytes(), (WORD * index) as u64).unwrap();
        }
        file
    }

    #[test]
    fn steps_of_keep_come_before_optimizer_steps() {
        let counted = [(OWNER, 7), (STEPS, 30)];
        let found = |words: &[(usize, u64)]| last_step(&file_with(words)).map(|each| (each.step, each.is_kept));
        assert_eq!(found(&counted), Some((30, false)));
        assert_eq!(found(&[counted.as_slice(), &[(KEEP_PID, 7), (RESTORED, 5)]].concat()), Some((4, true)));
        assert_eq!(found(&[(KEEP_PID, 7), (RESTORED, 5), (KEPT, 9)]), Some((8, true)));
    }

    #[test]
    fn what_is_no_step_is_ignored() {
        for words in [&[][..], &[(OWNER, 7)], &[(STEPS, 3)], &[(OWNER, 7), (STEPS, u64::MAX)], &[(KEEP_PID, 7)]] {
            assert_eq!(last_step(&file_with(words)), None);
        }
        assert_eq!(last_step(&tempfile::tempfile().unwrap()), None);
    }
}
