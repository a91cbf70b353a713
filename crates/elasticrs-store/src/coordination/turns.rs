//! Shares the server's thread fairly among the connections.
//!
//! A connection gets a *short turn* whenever it has complete requests. A short turn is long enough for the usual
//! requests of a client, such as a keep-alive. For more work, the connection needs a *long turn*. Only one connection
//! has a long turn at a time. Other connections that need a long turn wait in a queue.
//!
//! - **TURN-1** between two long turns, every connection that has requests gets a short turn, and the server reads the
//!   bytes that have arrived in the meantime;
//! - **TURN-2** a short turn ends after [`SHORT`] steps. A long turn ends after the duration [`LONG`] or, if a single
//!   request takes longer, after that request.

use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::yield_now;

/// Maximum number of steps in a short turn. This number of steps takes up to half a millisecond.
pub(super) const SHORT: usize = 4096;
/// Duration of a long turn. A request that was started before the end of the turn is completed.
const LONG: Duration = Duration::from_millis(2);

/// Number of steps in a long turn between two readings of the clock. The clock is not read at every step, because
/// reading it takes as long as a step.
const UNWATCHED: usize = 512;

/// Number of steps for a request, in addition to the steps for its operations. A step is the work for one key in a
/// search, which takes about 0.1 microseconds.
pub(super) const REQUEST: usize = 16;
/// Number of steps for an operation on one key.
pub(super) const OPERATION: usize = 8;

/// A connection's current turn.
#[derive(Debug)]
pub(super) enum Turn<'a> {
    /// A short turn, with its number of remaining steps.
    Short(usize),
    /// A long turn, which ends at `until`. The clock is read again after `unwatched` steps.
    Long { until: Instant, unwatched: usize, _permit: SemaphorePermit<'a> },
}

impl<'a> Turn<'a> {
    pub(super) fn new() -> Self {
        Self::Short(SHORT)
    }

    /// Returns true if a request of at most `steps` steps may be executed in this turn. Subtracts these steps from the
    /// turn.
    pub(super) fn takes(&mut self, steps: usize) -> bool {
        match self {
            Self::Short(left) => left.checked_sub(steps).map(|rest| *left = rest).is_some(),
            Self::Long { until, unwatched, .. } => {
                if let Some(rest) = unwatched.checked_sub(steps) {
                    *unwatched = rest;
                    return true;
                }
                *unwatched = UNWATCHED;
                Instant::now() < *until
            }
        }
    }

    /// Ends this turn (a time in which a connection may use the server's thread), and waits until this connection gets
    /// a long turn. The semaphore has one permit, which the connection with the long turn holds.
    pub(super) async fn renew(&mut self, turns: &'a Semaphore) {
        std::mem::replace(self, Self::Short(0)).end().await;
        let permit = turns.acquire().await.expect("the semaphore is never closed");
        *self = Self::Long { until: Instant::now() + LONG, unwatched: UNWATCHED, _permit: permit };
    }

    /// Ends the turn. At the end of a long turn, first yields, so that the other connections get their short turns.
    pub(super) async fn end(self) {
        if let Self::Long { .. } = self {
            // Keep the permit while yielding, because the next long turn would otherwise start before newly arrived
            // bytes are read.
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use tokio::task::LocalSet;

    use super::*;

    #[test]
    fn a_short_turn_has_time_for_small_requests_only() {
        let mut turn = Turn::new();
        assert!(!turn.takes(SHORT + 1));
        assert!(turn.takes(SHORT - 1) && turn.takes(1) && !turn.takes(1));
    }

    /// Checks invariant TURN-1.
    #[tokio::test(flavor = "current_thread")]
    async fn between_two_long_turns_every_other_task_gets_a_turn() {
        let turns = Rc::new(Semaphore::new(1));
        let log = Rc::new(RefCell::new(Vec::new()));
        let tasks = LocalSet::new();
        for name in ["a", "b"] {
            let (turns, log) = (Rc::clone(&turns), Rc::clone(&log));
            tasks.spawn_local(async move {
                let mut turn = Turn::new();
                for _ in 0..2 {
                    turn.renew(&turns).await;
                    log.borrow_mut().push(name);
                }
                turn.end().await;
            });
        }
        let seen = Rc::clone(&log);
        tasks.spawn_local(async move {
            for _ in 0..20 {
                seen.borrow_mut().push("-");
                yield_now().await;
            }
        });
        tasks.await;
        let log = log.take();
        let between: Vec<_> = log.split(|name| *name == "-").collect();
        // The third task runs between any two long turns, and the two connections alternate.
        assert!(between.iter().all(|turns| turns.len() <= 1), "{log:?}");
        assert_eq!(between.concat(), ["a", "b", "a", "b"]);
    }
}
