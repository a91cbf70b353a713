//! Estimates the offset between the store's wall clock and the local boot clock. All functions are pure.
//! These are the rules for the use of clocks:
//!
//! - **CLOCK-1** Deadlines use the boot clock, because it keeps running during suspend and cannot be set.
//! - **CLOCK-2** Wall-clock times, including the estimate, are used only in reports.

use std::collections::VecDeque;

/// One measurement of the offset between the store's wall clock and the local boot clock, made with a keep-alive and
/// its answer.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// The store's wall clock minus the local boot clock, in nanoseconds.
    offset: i128,
    /// Maximum error of `offset`: half of the round-trip time, in nanoseconds.
    error: u64,
    /// Time at which the answer arrived, in nanoseconds of the local boot clock.
    taken: u64,
}

/// Assumed maximum drift between two working clocks, in nanoseconds per second.
const DRIFT_PER_SECOND: u64 = 100_000;
/// Maximum number of samples to keep.
const SAMPLES: usize = 16;

/// Estimates the store's wall clock.
#[derive(Debug, Default)]
pub(super) struct Offset {
    samples: VecDeque<Sample>,
}

impl Offset {
    /// Adds a sample. `sent` and `received` are times on the local boot clock. `wall` is the store's wall-clock time
    /// at some moment between them.
    pub(super) fn add(&mut self, sent: u64, received: u64, wall: u64) {
        let error = received.saturating_sub(sent) / 2;
        let offset = i128::from(wall) - i128::from(received) + i128::from(error);
        let sample = Sample { offset, error, taken: received };
        // Drop older samples that contradict the new one, because the store's clock must have been set in the meantime.
        self.samples
            .retain(|old| old.offset.abs_diff(offset) <= u128::from(error_at(old, received)) + u128::from(error));
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the store's wall clock minus the local one, and the maximum error of this difference, in nanoseconds.
    pub(super) fn estimate(&self, boot: u64, wall: u64) -> Option<(i64, u64)> {
        let best = self.samples.iter().min_by_key(|sample| error_at(sample, boot))?;
        let theirs = best.offset + i128::from(boot);
        Some((i64::try_from(theirs - i128::from(wall)).ok()?, error_at(best, boot)))
    }
}

fn error_at(sample: &Sample, now: u64) -> u64 {
    let age = now.saturating_sub(sample.taken);
    sample.error + age / 1_000_000_000 * DRIFT_PER_SECOND + age % 1_000_000_000 * DRIFT_PER_SECOND / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn there_is_no_clock_offset_estimate_without_an_answer() {
        assert_eq!(Offset::default().estimate(5, 5), None);
    }

    #[test]
    fn the_clock_offset_comes_from_the_fastest_recent_answer() {
        let mut offset = Offset::default();
        offset.add(10 * S, 10 * S + 1_000, 1000 * S);
        offset.add(11 * S, 11 * S + 100_000_000, 1001 * S + 10_000_000);
        let (_, error) = offset.estimate(11 * S, 11 * S).unwrap();
        assert!(error < 200_000, "{error}");
        offset.add(5000 * S, 5000 * S + 1_000_000, 5990 * S);
        assert_eq!(offset.estimate(5000 * S + 1_000_000, 0).unwrap().1, 500_000);
    }

    #[test]
    fn the_clock_offset_follows_a_step_of_the_clock() {
        let mut offset = Offset::default();
        offset.add(10 * S, 10 * S, 1000 * S);
        offset.add(11 * S, 11 * S + 2_000, 2001 * S);
        assert_eq!(offset.estimate(11 * S + 2_000, 0), Some((2001 * 1_000_000_000 + 1_000, 1_000)));
    }

    proptest! {
        #[test]
        fn the_true_clock_offset_is_within_the_estimated_error(
            delays in prop::collection::vec((0..50_000_000_u64, 0..50_000_000_u64), 1..40),
            apart in -1_000_000_000_000_i64..1_000_000_000_000,
        ) {
            let mut offset = Offset::default();
            let mut now = 1_000 * S;
            let base = 2_000_000 * S;
            for (there, back) in delays {
                let wall = (base + now + there).checked_add_signed(apart).unwrap();
                offset.add(now, now + there + back, wall);
                now += S;
            }
            let (found, error) = offset.estimate(now, base + now).unwrap();
            prop_assert!(found.abs_diff(apart) <= error, "{found} {apart} {error}");
        }
    }
}
