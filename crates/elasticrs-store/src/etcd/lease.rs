//! The session's lease: keep-alives, and until when it is sure to last.

use std::collections::VecDeque;
use std::time::Duration;

use elasticrs_runtime::clock::{boot_now, nanoseconds};

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

/// Keep-alives in the life of a lease; one interval before its end it is given up.
const BEATS: u32 = 5;
/// Keep-alives are sent at least so often, however long the lease is: nothing else says that etcd has fallen silent.
const MAX_INTERVAL: Duration = Duration::from_secs(15);
/// The most that an unanswered keep-alive lets us wait on one connection.
const MAX_PATIENCE: Duration = Duration::from_secs(3);
/// The least that a new connection may take.
const MIN_DIAL: Duration = Duration::from_secs(1);
/// The job's lease is kept alive at least so often.
const MAX_JOB_INTERVAL: Duration = Duration::from_secs(600);

impl Opened {
    /// Between two keep-alives.
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
    /// Boot clock: when this side gives up.
    deadline: u64,
    next_beat: u64,
    /// When the job's lease is next kept alive.
    next_job: u64,
    /// Which leases were asked about on this connection, and when.
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

    /// How long a connection may leave a keep-alive unanswered.
    pub(super) fn patience(&self) -> Duration {
        self.interval().min(MAX_PATIENCE)
    }

    /// How long a new connection may take: with a short lease not much less than a password needs.
    pub(super) fn dial_patience(&self) -> Duration {
        self.patience().max(MIN_DIAL)
    }

    pub(super) fn deadline(&self) -> u64 {
        self.deadline
    }

    /// Of a time without answers that begins now; `told`: when the user was told of one before.
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

    /// Why it is over.
    pub(super) fn lost(&self) -> Lost {
        if self.is_stalled {
            let seconds = self.options.stall_timeout.unwrap_or_default().as_secs_f64();
            let why = format!("this program has not asked for events for {seconds} s, so its keep-alives were stopped");
            return Lost::new(LostKind::Silent, why);
        }
        let (kind, message) = self.events.trouble().unwrap_or_else(|| (LostKind::Silent, SILENT.into()));
        Lost::new(kind, message)
    }

    /// Why etcd does not answer: told whoever is first to see that the lease is over.
    pub(super) fn set_trouble(&self, trouble: &str) {
        self.events.set_trouble(Some((LostKind::Silent, format!("{SILENT} ({trouble})"))));
    }

    /// The next moment at which there is something to do.
    pub(super) fn wake(&self) -> u64 {
        self.next_beat.min(self.deadline).min(self.overdue())
    }

    fn overdue(&self) -> u64 {
        self.unanswered.front().map_or(u64::MAX, |(_, sent)| sent + nanoseconds(self.patience()))
    }

    /// A new connection is asked at once: nothing else says that somebody is there.
    pub(super) fn begin_connection(&mut self) {
        self.unanswered.clear();
        self.next_beat = 0;
        self.next_job = 0;
    }

    /// Whether the connection is answered.
    pub(super) fn check_answers(&self, now: u64, at: &str) -> Result<(), Lost> {
        if now < self.overdue() {
            return Ok(());
        }
        let seconds = self.patience().as_secs_f64();
        Err(Lost::new(LostKind::Timeout, format!("etcd at {at} did not answer a keep-alive within {seconds} s")))
    }

    /// Sends keep-alives when it is time.
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

    /// Takes the answer to a keep-alive; true if it renews the lease of the session.
    pub(super) fn take(&mut self, answer: &pb::KeepAliveResponse, at: &str) -> Result<bool, Lost> {
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        if cluster != self.cluster {
            let why = format!("etcd at {at} belongs to another cluster than the endpoint used before");
            return Err(Lost::new(LostKind::NotOurs, why));
        }
        let Some(at) = self.unanswered.iter().position(|(id, _)| *id == answer.id) else {
            return Err(Lost::new(LostKind::Protocol, "etcd answered a keep-alive that was never sent"));
        };
        // Answers come in order.
        let sent = self.unanswered.remove(at).map_or(0, |(_, sent)| sent);
        if answer.id != self.id {
            // The job's lease is made again when it is needed.
            return Ok(false);
        }
        if answer.ttl <= 0 {
            let why = "the lease of this session has ended: etcd did not hear of it in time, or somebody revoked it";
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
