//! Leases of sessions: when a session without keep-alives expires, and how often clients have to send keep-alives.
//! Pure: the time is an argument.
//!
//! - **LEASE-1** a session does not expire before its time to live has passed since the store read the session's last
//!   keep-alive;
//! - **LEASE-2** time during which the store itself did not run is not counted.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::protocol::Pace;
use super::state::SessionId;

/// Maximum number of keep-alives per second that the store answers. If there are too many sessions for this rate, the
/// store lengthens the keep-alive intervals of the clients.
pub(super) const MAX_PER_SECOND: u64 = 5_000;

/// Keep-alive intervals that a client may request.
const INTERVALS_MS: std::ops::RangeInclusive<u32> = 10..=3_600_000;
const ATTEMPTS: std::ops::RangeInclusive<u16> = 3..=1_000;

#[derive(Debug)]
struct Lease {
    interval_ms: u32,
    attempts: u16,
    deadline: u64,
}

/// Deadlines of all sessions, on a clock that is paused while the store does not run. Times are in nanoseconds.
#[derive(Debug, Default)]
pub struct Leases {
    held: HashMap<SessionId, Lease>,
    deadlines: BTreeSet<(u64, SessionId)>,
    /// Number of sessions that requested each interval.
    wishes: BTreeMap<u32, usize>,
    /// Total time during which the store did not run.
    late: u64,
    next_look: Option<u64>,
    looked: u64,
}

const MS: u64 = 1_000_000;

impl Leases {
    /// Returns true if a client may request these settings.
    pub fn is_allowed(interval_ms: u32, attempts: u16) -> bool {
        INTERVALS_MS.contains(&interval_ms) && ATTEMPTS.contains(&attempts)
    }

    pub(super) fn begin(&mut self, session: SessionId, interval_ms: u32, attempts: u16, now: u64) -> Pace {
        self.end(session);
        let mut lease = Lease { interval_ms, attempts, deadline: 0 };
        *self.wishes.entry(interval_ms).or_default() += 1;
        let pace = self.extend(session, &mut lease, now);
        self.held.insert(session, lease);
        pace
    }

    /// Adds a session that was restored from a previous store, and restarts its time to live. The time to live is at
    /// least `ttl_ms`, the longest time to live that the previous store granted to this session.
    pub(super) fn restore(&mut self, session: SessionId, interval_ms: u32, attempts: u16, ttl_ms: u32, now: u64) {
        let pace = self.begin(session, interval_ms, attempts, now);
        if let Some(lease) = self.held.get_mut(&session) {
            self.deadlines.remove(&(lease.deadline, session));
            lease.deadline += u64::from(ttl_ms.saturating_sub(pace.ttl_ms)) * MS;
            self.deadlines.insert((lease.deadline, session));
        }
    }

    /// Handles a keep-alive. Returns the keep-alive settings that apply to the session from now on.
    pub(super) fn renew(&mut self, session: SessionId, now: u64) -> Option<Pace> {
        let mut lease = self.held.remove(&session)?;
        let pace = self.extend(session, &mut lease, now);
        self.held.insert(session, lease);
        Some(pace)
    }

    fn extend(&mut self, session: SessionId, lease: &mut Lease, now: u64) -> Pace {
        let bearable = u32::try_from((self.held.len() as u64 + 1) * 1000 / MAX_PER_SECOND).unwrap_or(u32::MAX);
        let interval_ms = lease.interval_ms.max(bearable);
        let ttl_ms = interval_ms.saturating_mul(u32::from(lease.attempts));
        self.deadlines.remove(&(lease.deadline, session));
        lease.deadline = now.saturating_sub(self.late) + u64::from(ttl_ms) * MS;
        self.deadlines.insert((lease.deadline, session));
        Pace { interval_ms, ttl_ms }
    }

    pub(super) fn end(&mut self, session: SessionId) {
        if let Some(lease) = self.held.remove(&session) {
            self.deadlines.remove(&(lease.deadline, session));
            if let Some(count) = self.wishes.get_mut(&lease.interval_ms) {
                *count -= 1;
                if *count == 0 {
                    self.wishes.remove(&lease.interval_ms);
                }
            }
        }
    }

    /// Returns the time at which [`Self::look`] has to be called next: at the first deadline, or one interval from now
    /// if that is earlier. The interval is the shortest of all sessions. The more often `look` is called, the more
    /// precisely it measures how long the store did not run. Remembers the returned time, so that the next call of
    /// `look` can measure its delay.
    ///
    /// Call this right after [`Self::look`]. If more than one interval has passed since that call, all of this time
    /// counts as time during which the store did not run.
    pub(super) fn plan(&mut self, now: u64) -> Option<u64> {
        let (deadline, _) = self.deadlines.first()?;
        let (&shortest, _) = self.wishes.first_key_value()?;
        let interval = u64::from(shortest) * MS;
        let since = now.saturating_sub(self.looked);
        if since > interval {
            self.late += since;
        }
        let look = (deadline + self.late).min(now + interval).max(now);
        self.next_look = Some(look);
        Some(look)
    }

    /// Records the current time. If this call is later than planned, postpones all deadlines by the delay.
    pub(super) fn look(&mut self, now: u64) {
        if let Some(planned) = self.next_look.take() {
            self.late += now.saturating_sub(planned);
        }
        self.looked = now;
    }

    /// Returns the sessions that had expired as of the last call to [`Self::look`].
    pub(super) fn expired(&self) -> Vec<SessionId> {
        let now = self.looked.saturating_sub(self.late);
        self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now).map(|(_, session)| *session).collect()
    }
}

#[cfg(test)]
mod tests;
