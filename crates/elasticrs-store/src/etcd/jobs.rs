//! Executes the user's requests on one connection. If the connection breaks, the session may execute a request again on
//! the next connection.

use std::rc::Rc;
use std::time::Duration;

use super::errors::EtcdError;
use super::grpc::{CallError, Channel};
use super::mapping::{Keys, Unexpected, Write, Written, is_write, unsigned};
use super::messages as pb;
use super::open::{RANGE, TXN, keep};
use crate::session::error::{Failure, StoreError};
use crate::session::watched::Watched;
use crate::types::{Entry, LostKind, Op, OpResult, Txn, Watch};

/// A unit of work for the session. It needs one or more calls to etcd.
#[derive(Debug, Clone)]
pub(super) enum Job {
    /// Checks, on a new connection, that the session's marker key still exists. Also checks that etcd has not gone
    /// back to an older revision, for example because it was restored from a backup.
    Look,
    Txn {
        tag: u64,
        txn: Rc<Txn>,
    },
    Watch {
        tag: u64,
        watch: Watch,
        snapshot: bool,
    },
    /// Reads the entries that a watch currently covers, because etcd has compacted the history that the watch still
    /// needs.
    CatchUp {
        number: i64,
        watch: Watch,
    },
}

/// Result of a job (work that sends requests to etcd). `has_written` is true if the job has written the session's
/// marker key, and `revision` is then the revision of etcd at which this happened.
#[derive(Debug)]
pub(super) enum Done {
    Looked,
    Replied { tag: u64, ok: bool, revision: i64, results: Vec<OpResult>, has_written: bool },
    Watching { tag: u64, watched: Watched, revision: i64, results: Vec<OpResult> },
    CaughtUp { number: i64, revision: i64, there: Vec<Entry> },
}

/// The session's connection and a copy of the session's state, for a single task that sends requests to etcd.
#[derive(Debug, Clone)]
pub(super) struct Desk {
    pub(super) channel: Channel,
    pub(super) at: String,
    pub(super) keys: Rc<Keys>,
    pub(super) job_lease: Option<(i64, Duration)>,
    /// Identifies the next write. Contains its number and the revision of the key that records the session's writes.
    pub(super) write: Write,
    /// Highest revision that was known when the job started. Watches may report higher revisions while the job runs.
    pub(super) known: u64,
}

impl From<Unexpected> for Failure {
    fn from(error: Unexpected) -> Self {
        Self::fatal(LostKind::Protocol, format!("etcd: {error}"))
    }
}

fn lease_is_gone() -> Failure {
    let why = "the lease of this session is gone: etcd has not heard of it in time, or another client revoked it";
    Failure::fatal(LostKind::Silent, why)
}

impl Desk {
    /// Executes a job, which is work that sends requests to etcd.
    pub(super) async fn carry_out(self, job: Job) -> Result<Done, Failure> {
        match job {
            Job::Look => self.look().await.map(|()| Done::Looked),
            Job::Txn { tag, txn } if is_write(&txn) => self.write(tag, &txn).await,
            Job::Txn { tag, txn } => self.read(tag, &txn).await,
            Job::Watch { tag, watch, snapshot } => self.watch(tag, watch, snapshot).await,
            Job::CatchUp { number, watch } => {
                let asked = self.keys.region(&watch).range();
                let (revision, kvs) = self.newest(&asked).await?;
                Ok(Done::CaughtUp { number, revision, there: self.keys.entries(kvs) })
            }
        }
    }

    fn failure(&self, error: CallError) -> Failure {
        Failure::of(error, &self.at)
    }

    async fn look(&self) -> Result<(), Failure> {
        let (_, kvs) = self.newest(&self.keys.find_marker()).await?;
        if kvs.is_empty() { Err(lease_is_gone()) } else { Ok(()) }
    }

    async fn read(&self, tag: u64, txn: &Txn) -> Result<Done, Failure> {
        let answer = self.channel.call(TXN, &self.keys.read(txn)).await;
        let answer: pb::TxnResponse = answer.map_err(|error| self.failure(error))?;
        let (ok, revision) = (answer.succeeded, revision_of(answer.header)?);
        self.check_revision(revision)?;
        let ops = if ok { &txn.then } else { &txn.otherwise };
        let results = self.keys.results(ops, answer.responses)?;
        let results = self.with_predecessors(ops, results, revision).await?;
        Ok(Done::Replied { tag, ok, revision, results, has_written: false })
    }

    async fn write(&self, tag: u64, txn: &Txn) -> Result<Done, Failure> {
        let asked = self.keys.write(txn, self.write);
        let answer = match self.channel.call(TXN, &asked).await {
            Err(error) if error.is(EtcdError::LeaseNotFound) && self.renew_job().await? => {
                self.channel.call(TXN, &asked).await
            }
            answer => answer,
        };
        let answer = match answer {
            Err(error) if error.is(EtcdError::LeaseNotFound) => return Err(lease_is_gone()),
            answer => answer.map_err(|error| self.failure(error))?,
        };
        let (ok, revision, responses) = match Keys::written(self.write, answer)? {
            Written::Now { ok, revision, responses } => (ok, revision, Some(responses)),
            Written::Before { ok, revision } => (ok, revision, None),
            Written::Never => return Err(lease_is_gone()),
        };
        let ops = if ok { &txn.then } else { &txn.otherwise };
        let results = match responses {
            Some(responses) => self.keys.results(ops, responses)?,
            None => self.recovered(ops, revision).await?,
        };
        let results = self.with_predecessors(ops, results, revision).await?;
        Ok(Done::Replied { tag, ok, revision, results, has_written: true })
    }

    /// Recreates the job's lease if it no longer exists. Returns true if the lease was recreated.
    async fn renew_job(&self) -> Result<bool, Failure> {
        let Some((id, ttl)) = self.job_lease else { return Ok(false) };
        keep(&self.channel, id, ttl).await.map_err(|error| self.failure(error))
    }

    /// Reconstructs the results of a transaction whose answer was lost because the connection broke.
    async fn recovered(&self, ops: &[Op], revision: i64) -> Result<Vec<OpResult>, Failure> {
        let mut results = Vec::new();
        for (at, op) in ops.iter().enumerate() {
            let mut there = Vec::new();
            for asked in self.keys.recover(op, revision) {
                match self.range(&asked).await {
                    Err(error) if error.is_out_of_history() => {
                        let why = "the answer to a transaction was lost with its connection, and etcd has compacted its \
                                   history since";
                        return Err(Failure::fatal(LostKind::Closed, why));
                    }
                    found => there.push(found.map_err(|error| self.failure(error))?.1),
                }
            }
            results.push(self.keys.recovered(&ops[..at], op, there));
        }
        Ok(results)
    }

    async fn with_predecessors(
        &self,
        ops: &[Op],
        mut results: Vec<OpResult>,
        revision: i64,
    ) -> Result<Vec<OpResult>, Failure> {
        for (op, result) in ops.iter().zip(&mut results) {
            if let (Op::Predecessor { prefix, .. }, OpResult::Entry(Some(own))) = (op, &*result) {
                *result = OpResult::Entry(self.predecessor(prefix, own.create_revision, revision).await?);
            }
        }
        Ok(results)
    }

    async fn predecessor(&self, prefix: &str, created: u64, revision: i64) -> Result<Option<Entry>, Failure> {
        let failure = |error| self.failure(error);
        // If etcd has compacted this revision, read the newest revision instead. It lacks only keys that were deleted
        // in the meantime.
        let (mut youngest, at) = match self.range(&self.keys.predecessor(prefix, created, revision)).await {
            Err(error) if error.is_out_of_history() => {
                (self.range(&self.keys.predecessor(prefix, created, 0)).await.map_err(failure)?.1, 0)
            }
            found => (found.map_err(failure)?.1, revision),
        };
        if let [one, other] = &youngest[..]
            && one.create_revision == other.create_revision
        {
            let asked = self.keys.last_made(prefix, unsigned(one.create_revision), at);
            youngest = self.range(&asked).await.map_err(failure)?.1;
        }
        Ok(self.keys.entries(youngest).into_iter().next())
    }

    async fn watch(&self, tag: u64, watch: Watch, snapshot: bool) -> Result<Done, Failure> {
        // Always read the entries that exist when the watch starts, even if the user did not ask for them. The watch
        // needs these entries to report deletions. It also needs them to compute the changes if etcd compacts its
        // history.
        let range = pb::RangeRequest { keys_only: !snapshot, ..self.keys.region(&watch).range() };
        let (revision, kvs) = self.newest(&range).await?;
        let there = self.keys.entries(kvs);
        let watched = Watched::new(watch, unsigned(revision), &there);
        let results =
            if snapshot { there.into_iter().map(|entry| OpResult::Entry(Some(entry))).collect() } else { vec![] };
        Ok(Done::Watching { tag, watched, revision, results })
    }

    /// Same as [`Self::range`], but fails if the answer's revision is lower than the highest known revision.
    async fn newest(&self, asked: &pb::RangeRequest) -> Result<(i64, Vec<pb::KeyValue>), Failure> {
        let found = self.range(asked).await.map_err(|error| self.failure(error))?;
        self.check_revision(found.0)?;
        Ok(found)
    }

    /// Fails if the revision in an answer is lower than the highest revision that this client has seen. The member of
    /// the cluster that has answered then has old data: a member that was paused can return such data until it has
    /// caught up (etcd issue 20418, fixed in the 2026 releases).
    fn check_revision(&self, revision: i64) -> Result<(), Failure> {
        not_behind(self.known, revision).map_err(Failure::Retryable)
    }

    /// Reads a range. Returns the store's revision and the entries in the range.
    async fn range(&self, asked: &pb::RangeRequest) -> Result<(i64, Vec<pb::KeyValue>), CallError> {
        let answer: pb::RangeResponse = self.channel.call(RANGE, asked).await?;
        let header = answer.header.ok_or_else(|| CallError::Foreign("an answer without a revision".into()))?;
        Ok((header.revision, answer.kvs))
    }
}

fn revision_of(header: Option<pb::Header>) -> Result<i64, Unexpected> {
    header.map(|header| header.revision).ok_or(Unexpected)
}

/// Fails if `revision` is lower than `known`, the highest revision seen so far. A lower revision means that etcd has
/// lost data, or that the etcd member does not have the newest data yet.
pub(super) fn not_behind(known: u64, revision: i64) -> Result<(), StoreError> {
    if unsigned(revision) >= known {
        return Ok(());
    }
    let message = format!(
        "etcd went back from revision {known} to {revision}: it was restored from a backup, or a member was paused"
    );
    Err(StoreError::new(LostKind::Protocol, message))
}
