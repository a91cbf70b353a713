//! Table of the active timers, ordered by deadline, so that the next deadline is found without a scan.
//!
//! Uses an ordered map instead of a binary heap, because a released timer must be removed at once. Otherwise,
//! released timers with distant deadlines would accumulate in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use elasticrs_sys::clock::Stamp;
use elasticrs_sys::signal::Signal;

/// Maximum number of active timers in all processes together.
pub(crate) const MAX_TIMERS: usize = 16_384;

/// A timer that has expired.
#[derive(Debug, Clone, PartialEq)]
pub struct Due {
    pub pid: i32,
    pub scope: Arc<str>,
    pub terms: Terms,
    /// Number of other active timers of the same process.
    pub others: usize,
}

/// Properties of a timer other than its deadline.
#[derive(Debug, Clone, PartialEq)]
pub struct Terms {
    /// Expiration time on the worker's wall clock, in seconds since 1970. Used only in messages.
    pub expires: f64,
    pub signal: Option<Signal>,
    pub at: Option<Box<str>>,
}

/// Key of a timer in the queue: its deadline in nanoseconds on the table's clock, and a unique number. The number
/// is needed because several timers can have the same deadline.
type Position = (u64, u64);

#[derive(Debug)]
struct Timer {
    position: Position,
    terms: Terms,
}

/// All active timers.
#[derive(Debug, Default)]
pub struct Timers {
    by_process: HashMap<i32, HashMap<Arc<str>, Timer>>,
    queue: BTreeMap<Position, (i32, Arc<str>)>,
    last: u64,
    frozen_at: Option<u64>,
    /// Total time for which the table's clock has been paused, in nanoseconds.
    paused: u64,
}

impl Timers {
    /// Returns the number of active timers.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if no timer is active.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns true if this process has an active timer.
    pub fn has(&self, pid: i32) -> bool {
        self.by_process.contains_key(&pid)
    }

    /// Starts a timer that expires at `deadline`. If the process already has a timer with the same scope, replaces that
    /// timer. Returns false if there are too many timers.
    pub fn acquire(&mut self, pid: i32, scope: &str, deadline: Stamp, terms: Terms) -> bool {
        let earlier = self.take(pid, scope);
        if self.queue.len() >= MAX_TIMERS {
            return false;
        }
        self.last += 1;
        let position = (deadline.0.saturating_sub(self.paused), self.last);
        let scope = earlier.unwrap_or_else(|| Arc::from(scope));
        self.queue.insert(position, (pid, Arc::clone(&scope)));
        self.by_process.entry(pid).or_default().insert(scope, Timer { position, terms });
        true
    }

    /// Removes a timer. Returns false if there is no such timer.
    pub fn release(&mut self, pid: i32, scope: &str) -> bool {
        self.take(pid, scope).is_some()
    }

    fn take(&mut self, pid: i32, scope: &str) -> Option<Arc<str>> {
        let of_process = self.by_process.get_mut(&pid)?;
        let (scope, timer) = of_process.remove_entry(scope)?;
        if of_process.is_empty() {
            self.by_process.remove(&pid);
        }
        self.queue.remove(&timer.position);
        Some(scope)
    }

    /// Removes all timers of a process.
    pub(crate) fn remove_process(&mut self, pid: i32) {
        for timer in self.by_process.remove(&pid).into_iter().flat_map(HashMap::into_values) {
            self.queue.remove(&timer.position);
        }
    }

    /// Removes all timers and resumes the clock.
    pub fn clear(&mut self) {
        *self = Self { last: self.last, ..Self::default() };
    }

    /// Returns the next deadline. `None` if the clock is paused or no timer is active.
    pub fn next(&self) -> Option<Stamp> {
        let (&(due, _), _) = self.queue.first_key_value()?;
        self.frozen_at.is_none().then_some(Stamp(due.saturating_add(self.paused)))
    }

    /// Removes and returns the earliest timer that has expired.
    pub fn expired(&mut self, now: Stamp) -> Option<Due> {
        if self.next()? > now {
            return None;
        }
        let (_, (pid, scope)) = self.queue.pop_first()?;
        // `by_process` must contain the timer, because it is always updated together with the queue.
        let of_process = self.by_process.get_mut(&pid)?;
        let Timer { terms, .. } = of_process.remove(&scope)?;
        let others = of_process.len();
        if others == 0 {
            self.by_process.remove(&pid);
        }
        Some(Due { pid, scope, terms, others })
    }

    /// Pauses the clock at `now`.
    pub fn freeze(&mut self, now: Stamp) {
        self.frozen_at.get_or_insert(now.0);
    }

    /// Resumes the clock. Postpones the deadlines of active timers by the length of the pause.
    pub(crate) fn thaw(&mut self, now: Stamp) {
        if let Some(since) = self.frozen_at.take() {
            self.paused += now.0.saturating_sub(since);
        }
    }
}

/// Converts a wall-clock time to the monotonic clock, using the current offset between the two clocks. Later
/// changes to the wall clock do not affect the result.
pub fn on_monotonic(expires: f64, wall_now: f64, now: Stamp) -> Stamp {
    let span = (expires - wall_now) * 1e9;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts of floats saturate")]
    let (later, earlier) = (span.max(0.0) as u64, (-span).max(0.0) as u64);
    Stamp(now.0.saturating_add(later).saturating_sub(earlier))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn terms() -> Terms {
        Terms { expires: 0.0, signal: Some(Signal::KILL), at: None }
    }

    fn due(timers: &mut Timers, now: u64) -> Option<(i32, String)> {
        timers.expired(Stamp(now)).map(|due| (due.pid, due.scope.to_string()))
    }

    #[test]
    fn acquire_replaces_a_timer_of_the_same_scope_and_release_removes_it() {
        let mut timers = Timers::default();
        assert!(timers.acquire(1, "a", Stamp(10), terms()));
        assert!(timers.acquire(1, "a", Stamp(30), terms()));
        assert!(timers.acquire(1, "b", Stamp(20), terms()));
        assert!(timers.acquire(2, "a", Stamp(25), terms()));
        assert_eq!(timers.len(), 3);
        assert!(timers.release(1, "b"));
        assert!(!timers.release(1, "b"));
        assert_eq!(due(&mut timers, 24), None);
        assert_eq!(due(&mut timers, 40), Some((2, "a".into())));
        assert_eq!(due(&mut timers, 40), Some((1, "a".into())));
        assert!(timers.is_empty());
    }

    #[test]
    fn other_timers_of_a_process_are_counted_and_removed_with_the_process() {
        let mut timers = Timers::default();
        for (scope, deadline) in [("a", 1), ("b", 2), ("c", 3)] {
            timers.acquire(1, scope, Stamp(deadline), terms());
        }
        timers.acquire(2, "a", Stamp(9), terms());
        assert_eq!(timers.expired(Stamp(1)).unwrap().others, 2);
        timers.remove_process(1);
        assert_eq!((timers.len(), timers.has(1), timers.next()), (1, false, Some(Stamp(9))), "TIM-5");
    }

    #[test]
    fn timers_do_not_expire_while_the_group_is_suspended() {
        let mut timers = Timers::default();
        timers.acquire(1, "a", Stamp(100), terms());
        timers.freeze(Stamp(40));
        assert_eq!((timers.next(), due(&mut timers, 1000)), (None, None));
        timers.thaw(Stamp(240));
        assert_eq!(timers.next(), Some(Stamp(300)), "TIM-1");
        timers.acquire(1, "b", Stamp(250), terms());
        assert_eq!(due(&mut timers, 250), Some((1, "b".into())));
        assert_eq!(due(&mut timers, 299), None);
    }

    #[test]
    fn the_number_of_timers_is_limited() {
        let mut timers = Timers::default();
        for number in 0..MAX_TIMERS {
            assert!(timers.acquire(1, &number.to_string(), Stamp(7), terms()));
        }
        assert!(!timers.acquire(2, "one more", Stamp(7), terms()), "TIM-4");
        assert!(timers.acquire(1, "7", Stamp(8), terms()), "one that is replaced is no more");
    }

    #[test]
    fn any_wall_clock_time_converts_to_a_monotonic_time() {
        let now = Stamp(5_000_000_000);
        assert_eq!(on_monotonic(101.5, 100.0, now), Stamp(6_500_000_000));
        assert_eq!(on_monotonic(98.0, 100.0, now), Stamp(3_000_000_000));
        assert_eq!(on_monotonic(0.0, 1.7e9, now), Stamp(0));
        assert_eq!(on_monotonic(f64::MAX, 1.7e9, now), Stamp(u64::MAX));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Acquire(i32, u8, u64),
        Release(i32, u8),
        Exit(i32),
        Advance(u64),
        Freeze,
        Thaw,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..4_i32, 0..4_u8, 0..50_u64).prop_map(|(pid, scope, span)| Step::Acquire(pid, scope, span)),
            3 => (0..4_i32, 0..4_u8).prop_map(|(pid, scope)| Step::Release(pid, scope)),
            1 => (0..4_i32).prop_map(Step::Exit),
            3 => (0..30_u64).prop_map(Step::Advance),
            1 => Just(Step::Freeze),
            1 => Just(Step::Thaw),
        ]
    }

    proptest! {
        /// Compares the table with a simple model: a map from each timer to its remaining time.
        #[test]
        fn the_timer_table_behaves_like_a_simple_model(steps in proptest::collection::vec(step(), 0..200)) {
            let (mut timers, mut now, mut frozen) = (Timers::default(), 1000_u64, false);
            let mut model: BTreeMap<(i32, String), u64> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Acquire(pid, scope, span) => {
                        let scope = scope.to_string();
                        // Do not start timers while the clock is paused, because the workers are paused too.
                        if !frozen {
                            timers.acquire(pid, &scope, Stamp(now + span), terms());
                            model.insert((pid, scope), span);
                        }
                    }
                    Step::Release(pid, scope) => {
                        let scope = scope.to_string();
                        prop_assert_eq!(timers.release(pid, &scope), model.remove(&(pid, scope)).is_some());
                    }
                    Step::Exit(pid) => {
                        timers.remove_process(pid);
                        model.retain(|(owner, _), _| *owner != pid);
                    }
                    Step::Advance(span) => {
                        now += span;
                        if !frozen {
                            for left in model.values_mut() { *left = left.saturating_sub(span); }
                        }
                    }
                    Step::Freeze => { timers.freeze(Stamp(now)); frozen = true; }
                    Step::Thaw => { timers.thaw(Stamp(now)); frozen = false; }
                }
                let mut seen = Vec::new();
                while let Some(found) = due(&mut timers, now) {
                    seen.push(found);
                }
                let mut expected: Vec<_> =
                    model.iter().filter(|(_, left)| !frozen && **left == 0).map(|(key, _)| key.clone()).collect();
                model.retain(|key, _| !expected.contains(key));
                seen.sort();
                expected.sort();
                prop_assert_eq!(seen, expected);
                prop_assert_eq!(timers.len(), model.len());
                let soonest = model.values().min().map(|left| Stamp(now + left));
                prop_assert_eq!(timers.next(), soonest.filter(|_| !frozen));
            }
        }
    }
}
