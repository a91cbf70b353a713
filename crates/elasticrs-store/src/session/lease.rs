//! The lease of a session: the times of its keep-alives, and the deadline until which it is guaranteed to last. Pure.
//!
//! - **RENEW-1** only the answer to a pending keep-alive, or a new handshake, extends the deadline. The new deadline is
//!   counted from the send time of the keep-alive or handshake;
//! - **RENEW-2** no keep-alive is sent while the user does not fetch events.

use std::collections::VecDeque;
use std::time::Duration;

use elasticrs_sys::clock::nanoseconds;

/// Time limits of a session, derived from the values that the store granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Time between two keep-alives.
    pub(crate) interval: Duration,
    /// Time for which the session is guaranteed to last, counted from the send time of an answered keep-alive. The
    /// store ends the session later, so the client always gives up first.
    pub(crate) lasts: Duration,
    /// Time limit for answering a keep-alive. If the store exceeds it, the client reconnects.
    pub(crate) patience: Duration,
}

/// State of a session's lease. All times are nanoseconds of the boot clock.
#[derive(Debug)]
pub(crate) struct Lease {
    terms: Terms,
    /// Time at which the client considers the session lost.
    deadline: u64,
    next_beat: u64,
    /// Time at which the client sent the last keep-alive or handshake that the store has answered.
    answered: u64,
    /// Send times of the unanswered keep-alives on this connection.
    unanswered: VecDeque<u64>,
    /// True if keep-alives were stopped because the user does not fetch events.
    pub(crate) is_stalled: bool,
}

impl Lease {
    /// Creates the lease of a session. `sent` is the send time of the handshake.
    pub(crate) fn new(sent: u64, terms: Terms) -> Self {
        let deadline = sent + nanoseconds(terms.lasts);
        Self { terms, deadline, next_beat: 0, answered: sent, unanswered: VecDeque::new(), is_stalled: false }
    }

    pub(crate) fn terms(&self) -> Terms {
        self.terms
    }

    pub(crate) fn deadline(&self) -> u64 {
        self.deadline
    }

    pub(crate) fn answered(&self) -> u64 {
        self.answered
    }

    /// Returns the send time of the oldest unanswered keep-alive on this connection.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.unanswered.front().copied()
    }

    /// Returns the deadline for answering the oldest unanswered keep-alive on this connection. `u64::MAX` if there is
    /// none.
    pub(crate) fn overdue(&self) -> u64 {
        self.oldest().map_or(u64::MAX, |sent| sent + nanoseconds(self.terms.patience))
    }

    /// Returns the time of the next keep-alive, or the deadline of the session if that is earlier.
    pub(crate) fn wake(&self) -> u64 {
        self.next_beat.min(self.deadline)
    }

    /// Prepares for a new connection. A keep-alive is due immediately, because only its answer shows that the store
    /// responds.
    pub(crate) fn begin_connection(&mut self) {
        self.unanswered.clear();
        self.next_beat = 0;
    }

    /// Returns true if a keep-alive is due, and records it as sent.
    pub(crate) fn beat(&mut self, now: u64, is_stalled: impl FnOnce() -> bool) -> bool {
        if now < self.next_beat {
            return false;
        }
        self.next_beat = now + nanoseconds(self.terms.interval);
        self.is_stalled = is_stalled();
        if !self.is_stalled {
            self.unanswered.push_back(now);
        }
        !self.is_stalled
    }

    /// Records the answer to the keep-alive that was sent at `sent`, and treats all earlier keep-alives as answered.
    /// Returns false if no unanswered keep-alive has this send time.
    pub(crate) fn answer(&mut self, sent: u64, now: u64, terms: Terms) -> bool {
        let Some(at) = self.unanswered.iter().position(|beat| *beat == sent) else { return false };
        self.unanswered.drain(..=at);
        self.renew(sent, terms);
        self.next_beat = self.next_beat.min(now + nanoseconds(terms.interval));
        true
    }

    /// Extends the deadline after the store has answered a handshake or a keep-alive that was sent at `sent`.
    ///
    /// The new deadline is one time to live after `sent`. The session cannot end earlier in the store, because the
    /// store starts the time to live when it receives the message.
    pub(crate) fn renew(&mut self, sent: u64, terms: Terms) {
        self.answered = sent;
        self.terms = terms;
        self.deadline = sent + nanoseconds(terms.lasts);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const TERMS: Terms = Terms {
        interval: Duration::from_millis(10),
        lasts: Duration::from_millis(40),
        patience: Duration::from_millis(20),
    };

    #[derive(Debug, Clone)]
    enum Step {
        Beat {
            is_stalled: bool,
        },
        Answer(usize),
        /// An answer that contains this send time, for a keep-alive that the client has not sent.
        Forge(u64),
        Connect,
    }

    fn a_step() -> impl Strategy<Value = (u64, Step)> {
        let step = prop_oneof![
            4 => any::<bool>().prop_map(|is_stalled| Step::Beat { is_stalled }),
            3 => (0..3_usize).prop_map(Step::Answer),
            1 => any::<u64>().prop_map(Step::Forge),
            1 => Just(Step::Connect),
        ];
        (0..15 * MS, step)
    }

    proptest! {
        #[test]
        fn an_answered_keep_alive_extends_the_deadline_from_its_send_time(
            steps in prop::collection::vec(a_step(), 1..60),
        ) {
            let mut now = MS;
            let (mut lease, mut sent, mut last) = (Lease::new(now, TERMS), Vec::new(), now);
            for (passed, step) in steps {
                now += passed + 1;
                match step {
                    Step::Beat { is_stalled } => {
                        if lease.beat(now, || is_stalled) {
                            prop_assert!(!is_stalled);
                            sent.push(now);
                        }
                        prop_assert!(lease.wake() > now || lease.deadline() <= now);
                    }
                    Step::Answer(at) if at < sent.len() => {
                        last = sent[at];
                        sent.drain(..=at);
                        prop_assert!(lease.answer(last, now, TERMS));
                    }
                    Step::Answer(_) => {}
                    Step::Forge(time) => {
                        prop_assume!(!sent.contains(&time));
                        prop_assert!(!lease.answer(time, now, TERMS));
                    }
                    Step::Connect => {
                        lease.begin_connection();
                        sent.clear();
                        prop_assert!(lease.wake() <= now);
                    }
                }
                prop_assert_eq!((lease.answered(), lease.deadline()), (last, last + 40 * MS));
                prop_assert_eq!(lease.overdue(), sent.first().map_or(u64::MAX, |first| first + 20 * MS));
            }
        }
    }
}
