//! The session's lease: sends keep-alives and computes the time until which the lease lasts for certain.

use std::collections::VecDeque;
use std::time::Duration;

use elasticrs_sys::clock::{boot_now, nanoseconds};

use super::grpc::{CallError, Duplex};
use super::mapping::unsigned;
use super::messages as pb;
use super::open::Opened;
use super::options::Options;
use crate::coordination::away::Away;
use crate::coordination::connect::{Lost, endpoint};
use crate::coordination::events::{Events, SILENT};
use crate::coordination::guard::Guard;
use crate::coordination::types::LostKind;

/// Number of keep-alive intervals in the lease's time to live. The client gives up the session one interval before the
/// lease ends.
const BEATS: u32 = 5;
/// Maximum interval between keep-alives. It also applies to long leases, because a missing answer is the only sign that
/// etcd no longer responds.
const MAX_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum time limit for answering a keep-alive.
const MAX_PATIENCE: Duration = Duration::from_secs(3);
/// Minimum time limit for opening a new connection.
const MIN_DIAL: Duration = Duration::from_secs(1);
/// Maximum interval between keep-alives of the job's lease.
const MAX_JOB_INTERVAL: Duration = Duration::from_secs(600);

impl Opened {
    /// Returns the interval between two keep-alives.
    pub(super) fn interval(&self) -> Duration {
        self.ttl / BEATS
    }
}

pub(super) struct Lease<'a> {
    options: &'a Options,
    events: &'a Events,
    guard: &'a dyn Guard,
    id: i64,
    cluster: u64,
    ttl: Duration,
    /// Time at which this side gives up the session, in nanoseconds of the boot clock.
    deadline: u64,
    next_beat: u64,
    /// Time of the next keep-alive for the job's lease, in nanoseconds of the boot clock.
    next_job: u64,
    /// Unanswered keep-alives of this connection, each with its lease ID and send time.
    unanswered: VecDeque<(i64, u64)>,
    is_stalled: bool,
}

impl<'a> Lease<'a> {
    pub(super) fn new(options: &'a Options, opened: &Opened, events: &'a Events, guard: &'a dyn Guard) -> Self {
        let mut lease = Self {
            options,
            events,
            guard,
            id: opened.keys.lease,
            cluster: opened.cluster,
            ttl: opened.ttl,
            deadline: 0,
            next_beat: 0,
            next_job: 0,
            unanswered: VecDeque::new(),
            is_stalled: false,
        };
        lease.renew(opened.sent);
        lease
    }

    fn interval(&self) -> Duration {
        self.ttl / BEATS
    }

    /// Returns the time limit for answering a keep-alive. If it is exceeded, the client reconnects.
    pub(super) fn patience(&self) -> Duration {
        self.interval().min(MAX_PATIENCE)
    }

    /// Returns the time limit for opening a new connection. It has a lower bound for short leases, because checking a
    /// password takes time.
    pub(super) fn dial_patience(&self) -> Duration {
        self.patience().max(MIN_DIAL)
    }

    pub(super) fn deadline(&self) -> u64 {
        self.deadline
    }

    /// Starts an outage. `told` is the time of the last notice about an earlier outage.
    pub(super) fn away(&self, told: Option<u64>) -> Away {
        let endpoints = &self.options.endpoints;
        let members: Vec<_> = endpoints.iter().map(|(host, port)| endpoint(host, *port)).collect();
        let unanswered = self.unanswered.front().map(|(_, sent)| *sent);
        let what = format!("etcd at {}", members.join(", "));
        Away::new(what, boot_now(), unanswered, self.deadline, told)
    }

    pub(super) fn is_over(&self, now: u64) -> bool {
        now >= self.deadline
    }

    /// Returns the reason why the session was lost.
    pub(super) fn lost(&self) -> Lost {
        if self.is_stalled {
            let seconds = self.options.stall_timeout.unwrap_or_default().as_secs_f64();
            let why = format!("this program has not asked for events for {seconds} s, so its keep-alives were stopped");
            return Lost::new(LostKind::Silent, why);
        }
        let (kind, message) = self.events.trouble().unwrap_or_else(|| (LostKind::Silent, SILENT.into()));
        Lost::new(kind, message)
    }

    /// Sets the reason why etcd does not answer. The thread that first notices the end of the lease reports it.
    pub(super) fn set_trouble(&self, trouble: &str) {
        self.events.set_trouble(Some((LostKind::Silent, format!("{SILENT} ({trouble})"))));
    }

    /// Returns the next time at which the lease needs attention.
    pub(super) fn wake(&self) -> u64 {
        self.next_beat.min(self.deadline).min(self.overdue())
    }

    fn overdue(&self) -> u64 {
        self.unanswered.front().map_or(u64::MAX, |(_, sent)| sent + nanoseconds(self.patience()))
    }

    /// Prepares for a new connection. A keep-alive is due immediately, because only an answer shows that etcd responds.
    pub(super) fn begin_connection(&mut self) {
        self.unanswered.clear();
        self.next_beat = 0;
        self.next_job = 0;
    }

    /// Fails if a keep-alive on this connection was not answered in time.
    pub(super) fn check_answers(&self, now: u64, at: &str) -> Result<(), Lost> {
        if now < self.overdue() {
            return Ok(());
        }
        let seconds = self.patience().as_secs_f64();
        Err(Lost::new(LostKind::Timeout, format!("etcd at {at} did not answer a keep-alive within {seconds} s")))
    }

    /// Sends the keep-alives that are due.
    pub(super) fn beat(
        &mut self,
        now: u64,
        beats: &mut Duplex<pb::KeepAliveRequest, pb::KeepAliveResponse>,
    ) -> Result<(), CallError> {
        if now < self.next_beat {
            return Ok(());
        }
        self.next_beat = now + nanoseconds(self.interval().min(MAX_INTERVAL));
        self.is_stalled = self.events.is_stalled(self.options.stall_timeout);
        if self.is_stalled {
            return Ok(());
        }
        beats.send(&pb::KeepAliveRequest { id: self.id })?;
        self.unanswered.push_back((self.id, now));
        if let Some((id, ttl)) = self.options.job_lease
            && now >= self.next_job
        {
            self.next_job = now + nanoseconds((ttl / 3).min(MAX_JOB_INTERVAL));
            beats.send(&pb::KeepAliveRequest { id })?;
            self.unanswered.push_back((id, now));
        }
        Ok(())
    }

    /// Handles the answer to a keep-alive. Returns true if it renews the lease of the session.
    pub(super) fn take(&mut self, answer: &pb::KeepAliveResponse, at: &str) -> Result<bool, Lost> {
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        if cluster != self.cluster {
            let why = format!("etcd at {at} belongs to another cluster than the endpoint used before");
            return Err(Lost::new(LostKind::NotOurs, why));
        }
        let Some(at) = self.unanswered.iter().position(|(id, _)| *id == answer.id) else {
            return Err(Lost::new(LostKind::Protocol, "etcd answered a keep-alive that was never sent"));
        };
        // Remove the oldest entry for this lease, because answers for the same lease arrive in order.
        let sent = self.unanswered.remove(at).map_or(0, |(_, sent)| sent);
        if answer.id != self.id {
            // Ignore it if the job's lease has expired. The next write that needs the lease creates it again.
            return Ok(false);
        }
        if answer.ttl <= 0 {
            let why =
                "the lease of this session has ended: etcd did not hear of it in time, or another client revoked it";
            return Err(Lost::new(LostKind::Silent, why));
        }
        self.ttl = Duration::from_secs(unsigned(answer.ttl));
        self.events.set_trouble(None);
        self.renew(sent);
        Ok(true)
    }

    fn renew(&mut self, sent: u64) {
        self.deadline = sent + nanoseconds(self.ttl.saturating_sub(self.interval()));
        self.guard.deadline(self.deadline);
        self.events.renewed(self.deadline, sent, boot_now(), None);
    }
}
