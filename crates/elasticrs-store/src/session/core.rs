//! Session state that is common to all stores: the lease, the current outage, and the user's request to close the
//! session.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use elasticrs_sys::clock::{boot_now, nanoseconds};

use super::client::Guard;
use super::error::{ConnectionEnd, StoreError};
use super::events::{Event, Events, SILENT};
use super::lease::{Lease, Terms};
use super::outage::{Backoff, Outage, Pauses};
use crate::types::LostKind;

/// Minimum time limit for opening a connection. The limit depends on the lease and could otherwise be too short.
const MIN_DIAL: Duration = Duration::from_secs(1);

/// Settings of a session. Some depend on the kind of store, others are set by the user.
#[derive(Debug)]
pub(crate) struct Policy {
    /// Name of the store in messages, such as "the store at HOST:PORT".
    pub(crate) store: String,
    pub(crate) pauses: Pauses,
    /// Time limit for finishing the pending requests after the user has closed the session.
    pub(crate) close_limit: Duration,
    /// Time after which keep-alives stop if the user does not fetch events. `None` if they never stop.
    pub(crate) stall_timeout: Option<Duration>,
    /// True if a new connection renews the lease. If true, the session does not reconnect while the user fetches no
    /// events, because reconnecting would keep a stalled session alive.
    pub(crate) renews_by_reconnect: bool,
}

/// The user's request to close the session.
struct Closing {
    reply: Option<SyncSender<()>>,
    /// Deadline for closing, in nanoseconds of the boot clock. At this time, the session ends even if requests are
    /// unfinished.
    until: u64,
}

/// An outage that is over. All times are nanoseconds of the boot clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PastOutage {
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    /// Pause before the first reconnect, in nanoseconds.
    pub(crate) pause: u64,
}

pub(crate) struct Core<'a> {
    pub(crate) policy: Policy,
    pub(crate) events: &'a Events,
    pub(crate) guard: &'a dyn Guard,
    pub(crate) lease: Lease,
    pub(crate) backoff: Backoff,
    /// The current outage. It starts when a connection breaks and ends when the store answers.
    outage: Option<Outage>,
    /// Pause before the first reconnect of the current outage, in nanoseconds.
    first_pause: u64,
    /// Time of the last outage notice to the user, in nanoseconds of the boot clock.
    reported: Option<u64>,
    closing: Option<Closing>,
}

impl<'a> Core<'a> {
    /// Creates the state of a session. `sent` is the send time of the handshake.
    pub(crate) fn new(policy: Policy, events: &'a Events, guard: &'a dyn Guard, sent: u64, terms: Terms) -> Self {
        let backoff = Backoff::new(policy.pauses);
        let lease = Lease::new(sent, terms);
        let core =
            Self { policy, events, guard, lease, backoff, outage: None, first_pause: 0, reported: None, closing: None };
        core.publish_deadline(None);
        core
    }

    fn publish_deadline(&self, wall: Option<u64>) {
        self.guard.deadline(self.lease.deadline());
        self.events.renewed(self.lease.deadline(), wall.map(|wall| (self.lease.answered(), boot_now(), wall)));
    }

    /// Extends the lease after a new handshake. `sent` is the send time of the handshake.
    pub(crate) fn renew(&mut self, sent: u64, terms: Terms) {
        self.lease.renew(sent, terms);
        self.publish_deadline(None);
    }

    /// Extends the lease after a keep-alive was answered. `wall` is the time on the store's wall clock, if the store
    /// reports it.
    pub(crate) fn answer(&mut self, sent: u64, terms: Terms, wall: Option<u64>) -> Result<(), StoreError> {
        if !self.lease.answer(sent, boot_now(), terms) {
            let message = format!("{} answered a keep-alive that was never sent", self.policy.store);
            return Err(StoreError::new(LostKind::Protocol, message));
        }
        self.publish_deadline(wall);
        Ok(())
    }

    /// Returns true if a keep-alive is due, and records it as sent.
    pub(crate) fn beat(&mut self, now: u64) -> bool {
        self.lease.beat(now, || self.events.is_stalled(self.policy.stall_timeout))
    }

    /// Returns the time limit for opening a new connection.
    pub(crate) fn dial_patience(&self) -> Duration {
        self.lease.terms().patience.max(MIN_DIAL)
    }

    /// Fails if the deadline of the lease has passed, or if the time limit for closing the session has elapsed.
    pub(super) fn check(&mut self, now: u64) -> Result<(), ConnectionEnd> {
        if now >= self.lease.deadline() || self.events.is_over() {
            return Err(self.error().into());
        }
        match &mut self.closing {
            Some(closing) if now >= closing.until => Err(ConnectionEnd::Closed(closing.reply.take())),
            _ => Ok(()),
        }
    }

    /// Returns the reason why the session was lost.
    fn error(&self) -> StoreError {
        if self.lease.is_stalled {
            let seconds = self.policy.stall_timeout.unwrap_or_default().as_secs_f64();
            let why = format!("this program has not asked for events for {seconds} s, so its keep-alives were stopped");
            return StoreError::new(LostKind::Silent, why);
        }
        if self.outage.is_none() && self.events.is_full() {
            return StoreError::new(LostKind::Slow, "this program does not read its events");
        }
        let silent = || StoreError::new(LostKind::Silent, format!("{SILENT} ({})", self.policy.store));
        self.events.outage_reason().unwrap_or_else(silent)
    }

    pub(super) fn close(&mut self, reply: Option<SyncSender<()>>) {
        self.closing = Some(Closing { reply, until: boot_now() + nanoseconds(self.policy.close_limit) });
    }

    /// Returns the remaining time for closing the session.
    pub(crate) fn time_to_close(&self) -> Duration {
        Duration::from_nanos(self.closing.as_ref().map_or(0, |closing| closing.until.saturating_sub(boot_now())))
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// Fails with [`ConnectionEnd::Closed`] if the user has closed the session. Call this only when there are no
    /// unfinished requests.
    pub(crate) fn check_closed(&mut self) -> Result<(), ConnectionEnd> {
        self.closing.as_mut().map_or(Ok(()), |closing| Err(ConnectionEnd::Closed(closing.reply.take())))
    }

    /// Returns the time of the next keep-alive or deadline, whichever is earlier.
    pub(super) fn wake(&self) -> u64 {
        self.until(self.lease.wake())
    }

    /// Returns the time of the next outage notice or deadline, whichever is earlier. Used while there is no
    /// connection.
    pub(super) fn wake_in_outage(&self) -> u64 {
        let notice = self.outage.as_ref().map_or(u64::MAX, Outage::next_notice);
        self.until(self.lease.deadline()).min(notice)
    }

    fn until(&self, time: u64) -> u64 {
        self.closing.as_ref().map_or(time, |closing| closing.until.min(time))
    }

    /// Records that a connection has failed or could not be opened. Starts an outage if there is none. Returns the
    /// pause before the next attempt. `reason` creates the error to report if the session is lost during the outage.
    pub(super) fn disconnected(&mut self, now: u64, reason: impl FnOnce(&Outage, u64) -> StoreError) -> Duration {
        let pause = self.backoff.pause(now);
        if self.outage.is_none() {
            self.first_pause = nanoseconds(pause);
        }
        let outage = self.outage.get_or_insert_with(|| {
            Outage::new(self.policy.store.clone(), now, self.lease.oldest(), self.lease.deadline(), self.reported)
        });
        self.events.set_outage_reason(Some(reason(outage, self.lease.answered())));
        pause
    }

    /// Notifies the user of the outage, if a notice is due.
    pub(super) fn report_outage(&mut self, now: u64, why: &str) {
        if let Some(message) = self.outage.as_mut().and_then(|outage| outage.notice(now, why)) {
            self.events.push(Event::Notice { message }, 0);
        }
    }

    pub(crate) fn is_away(&self) -> bool {
        self.outage.is_some()
    }

    /// Ends the current outage, because the store has answered. Returns the outage, or `None` if there was none.
    pub(crate) fn is_back(&mut self, now: u64) -> Option<PastOutage> {
        self.events.set_outage_reason(None);
        let outage = self.outage.take()?;
        self.reported = outage.reported();
        if let Some(message) = outage.over(now) {
            self.events.push(Event::Notice { message }, 0);
        }
        Some(PastOutage { begun: outage.silent(), ended: now, pause: self.first_pause })
    }
}
