//! Keep-alives for the session's lease and for the job's lease. The two leases share one stream per connection.

use std::time::Duration;

use elasticrs_sys::clock::nanoseconds;

use super::grpc::{CallError, Duplex};
use super::mapping::unsigned;
use super::messages as pb;
use crate::session::core::Core;
use crate::session::error::StoreError;
use crate::session::lease::Terms;
use crate::types::LostKind;

/// Number of keep-alive intervals in a lease's time to live. The client considers the session lost one interval
/// before the lease expires.
const BEATS: u32 = 5;
/// Upper bound on the keep-alive interval, even for a long lease. It limits how long it takes to notice that etcd
/// no longer responds.
const MAX_INTERVAL: Duration = Duration::from_secs(15);
/// Upper bound on the time limit for answering a keep-alive.
const MAX_PATIENCE: Duration = Duration::from_secs(3);
/// Upper bound on the keep-alive interval of the job's lease.
const MAX_JOB_INTERVAL: Duration = Duration::from_secs(600);

/// Returns the maximum keep-alive interval for a lease with this time to live.
pub(super) fn interval(ttl: Duration) -> Duration {
    ttl / BEATS
}

/// Returns the client's time limits for a lease with this time to live.
pub(super) fn terms(ttl: Duration) -> Terms {
    let interval = interval(ttl);
    Terms {
        interval: interval.min(MAX_INTERVAL),
        lasts: ttl.saturating_sub(interval),
        patience: interval.min(MAX_PATIENCE),
    }
}

pub(super) type Beats = Duplex<pb::KeepAliveResponse>;

/// IDs of the leases that the session keeps alive.
pub(super) struct Leases {
    own: i64,
    cluster: u64,
    /// ID and time to live of the job's lease.
    job: Option<(i64, Duration)>,
    /// Time of the next keep-alive for the job's lease, in nanoseconds of the boot clock.
    next_job: u64,
    /// Number of unanswered keep-alives for the job's lease on this connection.
    unanswered_job: u32,
}

impl Leases {
    pub(super) fn new(own: i64, cluster: u64, job: Option<(i64, Duration)>) -> Self {
        Self { own, cluster, job, next_job: 0, unanswered_job: 0 }
    }

    /// Resets the state that applies to a single connection.
    pub(super) fn begin_connection(&mut self) {
        self.next_job = 0;
        self.unanswered_job = 0;
    }

    /// Sends the keep-alives that are due.
    pub(super) fn beat(&mut self, core: &mut Core<'_>, now: u64, beats: &mut Beats) -> Result<(), CallError> {
        if !core.beat(now) {
            return Ok(());
        }
        beats.send(&pb::KeepAliveRequest { id: self.own })?;
        if let Some((id, ttl)) = self.job
            && now >= self.next_job
        {
            self.next_job = now + nanoseconds((ttl / 3).min(MAX_JOB_INTERVAL));
            beats.send(&pb::KeepAliveRequest { id })?;
            self.unanswered_job += 1;
        }
        Ok(())
    }

    /// Handles the answer to a keep-alive. Returns true if the answer renews the session's lease.
    pub(super) fn answer(
        &mut self,
        core: &mut Core<'_>,
        answer: &pb::KeepAliveResponse,
        at: &str,
    ) -> Result<bool, StoreError> {
        let cluster = answer.header.as_ref().map_or(0, |header| header.cluster_id);
        if cluster != self.cluster {
            let why = format!("etcd at {at} belongs to another cluster than the endpoint used before");
            return Err(StoreError::new(LostKind::NotOurs, why));
        }
        if answer.id != self.own && self.unanswered_job > 0 {
            // Ignore the answer to a keep-alive for the job's lease. Even if the lease has expired, the next write that
            // needs the lease recreates it.
            self.unanswered_job -= 1;
            return Ok(false);
        }
        if answer.id == self.own && answer.ttl <= 0 {
            let why =
                "the lease of this session has ended: etcd did not hear of it in time, or another client revoked it";
            return Err(StoreError::new(LostKind::Silent, why));
        }
        // Answers for one lease arrive in order, so this answer belongs to the oldest unanswered keep-alive. If there
        // is no such keep-alive, or if the lease is unknown, `core.answer` fails.
        let sent = core.lease.oldest().filter(|_| answer.id == self.own).unwrap_or_default();
        core.answer(sent, terms(Duration::from_secs(unsigned(answer.ttl))), None)?;
        Ok(true)
    }
}
