use std::collections::{BTreeMap, VecDeque};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stored {
    value: Vec<u8>,
    created: i64,
    changed: i64,
    lease: i64,
}

type Content = BTreeMap<Vec<u8>, Stored>;

/// Model of etcd, limited to the operations that this client uses. It keeps the contents at every revision.
struct Etcd {
    revisions: Vec<Content>,
}

impl Etcd {
    fn new() -> Self {
        Self { revisions: vec![Content::new(), Content::new()] }
    }

    fn revision(&self) -> i64 {
        signed(self.revisions.len() as u64) - 1
    }

    fn newest(&self) -> &Content {
        self.revisions.last().unwrap()
    }

    fn txn(&mut self, txn: &pb::TxnRequest) -> pb::TxnResponse {
        let before = self.newest().clone();
        let mut content = before.clone();
        let mut answer = self.nested(txn, &before, &mut content);
        if content != before {
            self.revisions.push(content);
        }
        answer.header = Some(pb::Header { cluster_id: 1, revision: self.revision() });
        answer
    }

    fn nested(&self, txn: &pb::TxnRequest, before: &Content, content: &mut Content) -> pb::TxnResponse {
        let succeeded = txn.compare.iter().all(|compare| holds(compare, before));
        let ops = if succeeded { &txn.success } else { &txn.failure };
        let responses = ops
            .iter()
            .map(|op| ResponseOp {
                response: Some(match op.request.as_ref().unwrap() {
                    Request::Range(range) => Response::Range(self.range(range, content)),
                    Request::Put(put) => {
                        self.put(put, content);
                        Response::Put(())
                    }
                    Request::DeleteRange(range) => {
                        let found = keys(&range.key, &range.range_end, content);
                        for key in &found {
                            content.remove(key);
                        }
                        Response::DeleteRange(pb::DeleteRangeResponse { deleted: signed(found.len() as u64) })
                    }
                    Request::Txn(txn) => Response::Txn(self.nested(txn, before, content)),
                }),
            })
            .collect();
        pb::TxnResponse { header: None, succeeded, responses }
    }

    fn put(&self, put: &pb::PutRequest, content: &mut Content) {
        let changed = self.revision() + 1;
        let known = content.get(&put.key);
        assert!(known.is_some() || !put.ignore_lease, "etcd refuses this");
        let created = known.map_or(changed, |known| known.created);
        let lease = if put.ignore_lease { known.map_or(0, |known| known.lease) } else { put.lease };
        content.insert(put.key.clone(), Stored { value: put.value.clone(), created, changed, lease });
    }

    fn range(&self, range: &pb::RangeRequest, content: &Content) -> pb::RangeResponse {
        let content =
            if range.revision > 0 { &self.revisions[usize::try_from(range.revision).unwrap()] } else { content };
        let mut found = keys(&range.key, &range.range_end, content);
        found.retain(|key| {
            let most = if range.max_create_revision > 0 { range.max_create_revision } else { i64::MAX };
            (range.min_create_revision..=most).contains(&content[key].created)
        });
        if range.sort_order == i32::from(pb::SortOrder::Descend) {
            found.reverse();
            if range.sort_target == i32::from(pb::SortTarget::Create) {
                found.sort_by_key(|key| -content[key].created);
            }
        }
        if range.limit > 0 {
            found.truncate(usize::try_from(range.limit).unwrap());
        }
        let kvs = found.into_iter().map(|key| pb::KeyValue {
            create_revision: content[&key].created,
            mod_revision: content[&key].changed,
            value: content[&key].value.clone(),
            key,
        });
        pb::RangeResponse { header: None, kvs: kvs.collect() }
    }
}

fn keys(key: &[u8], end: &[u8], content: &Content) -> Vec<Vec<u8>> {
    let is_in = |each: &[u8]| if end.is_empty() { each == key } else { key <= each && (end == [0] || each < end) };
    content.keys().filter(|each| is_in(each)).cloned().collect()
}

fn holds(compare: &pb::Compare, content: &Content) -> bool {
    let found = content.get(&compare.key);
    match compare.operand.as_ref().unwrap() {
        Operand::CreateRevision(at) if compare.result == i32::from(CompareResult::Greater) => {
            found.map_or(0, |stored| stored.created) > *at
        }
        Operand::CreateRevision(at) => found.map_or(0, |stored| stored.created) == *at,
        Operand::ModRevision(at) => found.map_or(0, |stored| stored.changed) == *at,
        Operand::Value(value) => found.is_some_and(|stored| stored.value == *value),
    }
}

/// Executes a transaction directly, without encoding it for etcd. The returned keys do not have the store's
/// prefix.
fn plain(keys: &Keys, txn: &Txn, etcd: &Etcd) -> (bool, Vec<OpResult>, BTreeMap<Arc<str>, Stored>) {
    let named = |(key, stored): (&Vec<u8>, &Stored)| Some((keys.strip(key)?, stored.clone()));
    let mut content: BTreeMap<Arc<str>, Stored> = etcd.newest().iter().filter_map(named).collect();
    let ok = txn.compares.iter().all(|compare| match compare {
        Compare::Exists(key) => content.contains_key(key),
        Compare::Missing(key) => !content.contains_key(key),
        Compare::Create(key, at) => content.get(key).map_or(0, |found| found.created) == signed(*at),
        Compare::Mod(key, at) => content.get(key).map_or(0, |found| found.changed) == signed(*at),
        Compare::Value(key, value) => content.get(key).is_some_and(|found| found.value == *value),
    });
    let changed = etcd.revision() + 1;
    let ops = if ok { &txn.then } else { &txn.otherwise };
    let results = ops.iter().map(|op| direct(keys, op, changed, &mut content)).collect();
    (ok, results, content)
}

fn direct(keys: &Keys, op: &Op, changed: i64, content: &mut BTreeMap<Arc<str>, Stored>) -> OpResult {
    let entry = |key: &Arc<str>, content: &BTreeMap<Arc<str>, Stored>| {
        content.get(key).map(|found| Entry {
            key: Arc::clone(key),
            value: found.value.clone().into(),
            create_revision: unsigned(found.created),
            mod_revision: unsigned(found.changed),
        })
    };
    let under = |prefix: &str, content: &BTreeMap<Arc<str>, Stored>| -> Vec<Arc<str>> {
        content.keys().filter(|key| key.starts_with(prefix)).cloned().collect()
    };
    match op {
        Op::Put { key, value, leased } => {
            let known = content.get(key);
            let created = known.map_or(changed, |known| known.created);
            let lease = if *leased { keys.lease } else { known.map_or(keys.job_lease, |known| known.lease) };
            content.insert(Arc::clone(key), Stored { value: value.to_vec(), created, changed, lease });
            OpResult::Count(1)
        }
        Op::Delete(key) => OpResult::Count(u64::from(content.remove(key).is_some())),
        Op::DeletePrefix(prefix) => {
            let found = under(prefix, content);
            content.retain(|key, _| !found.contains(key));
            OpResult::Count(found.len() as u64)
        }
        Op::Get(key) | Op::Predecessor { key, .. } => OpResult::Entry(entry(key, content)),
        Op::Range { prefix, limit } => {
            let most = if *limit == 0 { usize::MAX } else { *limit as usize };
            OpResult::Entries(under(prefix, content).iter().take(most).filter_map(|key| entry(key, content)).collect())
        }
    }
}

fn key() -> impl Strategy<Value = Arc<str>> {
    "[ab]{1,2}".prop_map(Arc::from)
}

fn prefix() -> impl Strategy<Value = Arc<str>> {
    "[ab]{0,2}".prop_map(Arc::from)
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    vec(0..2_u8, 0..2)
}

fn any_compare() -> impl Strategy<Value = Compare> {
    prop_oneof![
        key().prop_map(Compare::Exists),
        key().prop_map(Compare::Missing),
        (key(), 0..6_u64).prop_map(|(key, at)| Compare::Create(key, at)),
        (key(), 0..6_u64).prop_map(|(key, at)| Compare::Mod(key, at)),
        (key(), value()).prop_map(|(key, value)| Compare::Value(key, value)),
    ]
}

fn any_op() -> impl Strategy<Value = Op> {
    let put = (key(), value(), any::<bool>());
    prop_oneof![
        3 => put.prop_map(|(key, value, leased)| Op::Put { key, value: value.into(), leased }),
        1 => key().prop_map(Op::Delete),
        1 => prefix().prop_map(Op::DeletePrefix),
        1 => key().prop_map(Op::Get),
        1 => (prefix(), 0..3_u32).prop_map(|(prefix, limit)| Op::Range { prefix, limit }),
    ]
}

/// Generates ops that etcd accepts in one transaction. No two of them write the same key, unless both are deletions.
fn any_ops() -> impl Strategy<Value = Vec<Op>> {
    vec(any_op(), 0..5).prop_map(|ops| {
        let mut taken = Vec::<Op>::new();
        for op in ops {
            let same = |other: &Op| match (other, &op) {
                (Op::Put { key, .. }, other) | (other, Op::Put { key, .. }) => writes(other) && covers(other, key),
                _ => false,
            };
            if !taken.iter().any(same) {
                taken.push(op);
            }
        }
        taken
    })
}

fn any_txn() -> impl Strategy<Value = Txn> {
    let parts = (vec(any_compare(), 0..3), any_ops(), any_ops());
    parts.prop_map(|(compares, then, otherwise)| Txn { compares, then, otherwise })
}

/// Opens a session in the simulated etcd. Returns the session's `Keys`, and the `Write` value for its first write
/// transaction.
fn begin(etcd: &mut Etcd) -> (Keys, Write) {
    let keys = Keys { prefix: "/run/".into(), lease: 7, job_lease: 8 };
    let marker = etcd.txn(&keys.begin()).header.unwrap().revision;
    (keys, Write { number: 1, marker })
}

fn named(keys: &Keys, etcd: &Etcd) -> BTreeMap<Arc<str>, Stored> {
    etcd.newest().iter().filter_map(|(key, stored)| Some((keys.strip(key)?, stored.clone()))).collect()
}

/// Simulated delivery of one copy of a request.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Answered,
    Unanswered,
    Dropped,
    /// Delayed. The field is the number of later transactions that etcd executes before this copy of the request.
    Late(usize),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![Just(Fate::Answered), Just(Fate::Unanswered), Just(Fate::Dropped), (0..3_usize).prop_map(Fate::Late),]
}

proptest! {
    /// A write is executed exactly once, however often it is sent and whatever happens to each copy. The answer
    /// describes that execution.
    #[test]
    fn a_write_is_executed_exactly_once_and_answered_correctly(steps in vec((any_txn(), vec(fate(), 0..4)), 0..12)) {
        let mut etcd = Etcd::new();
        let (keys, mut write) = begin(&mut etcd);
        let mut late = VecDeque::<(usize, pb::TxnRequest)>::new();
        for (at, (txn, fates)) in steps.iter().enumerate() {
            let (ok, results, content) = plain(&keys, txn, &etcd);
            let request = keys.write(txn, write);
            let mut answer = None;
            for fate in fates.iter().chain(&[Fate::Answered]) {
                match fate {
                    Fate::Answered => {
                        answer = Some(etcd.txn(&request));
                        break;
                    }
                    Fate::Unanswered => drop(etcd.txn(&request)),
                    Fate::Dropped => {}
                    Fate::Late(after) => late.push_back((at + after, request.clone())),
                }
            }
            let ops = if ok { &txn.then } else { &txn.otherwise };
            let (is_ok, revision, told) = match Keys::written(write, answer.unwrap()).unwrap() {
                Written::Now { ok, revision, responses } => (ok, revision, keys.results(ops, responses)),
                Written::Before { ok, revision } => {
                    let ask = |asked: &pb::RangeRequest| etcd.range(asked, etcd.newest()).kvs;
                    let recover = |(at, op): (usize, &Op)| {
                        let there = keys.recover(op, revision).iter().map(ask).collect();
                        keys.recovered(&ops[..at], op, there)
                    };
                    (ok, revision, Ok(ops.iter().enumerate().map(recover).collect()))
                }
                Written::Never => panic!("nobody else puts the marker"),
            };
            prop_assert_eq!((is_ok, told.unwrap()), (ok, results));
            prop_assert_eq!(named(&keys, &etcd), content.clone());
            write = Write { number: write.number + 1, marker: revision };
            let (due, rest): (Vec<_>, Vec<_>) = late.into_iter().partition(|(when, _)| *when <= at);
            late = rest.into();
            for (_, copy) in due {
                etcd.txn(&copy);
            }
            prop_assert_eq!(named(&keys, &etcd), content);
        }
    }

    #[test]
    fn a_read_translated_for_etcd_returns_the_expected_results(writes in vec(any_txn(), 0..6), txn in any_txn()) {
        let mut etcd = Etcd::new();
        let (keys, mut write) = begin(&mut etcd);
        for txn in &writes {
            write.marker = etcd.txn(&keys.write(txn, write)).header.unwrap().revision;
            write.number += 1;
        }
        let reads = |ops: &[Op]| ops.iter().filter(|op| !self::writes(op)).cloned().collect();
        let txn = Txn { then: reads(&txn.then), otherwise: reads(&txn.otherwise), ..txn };
        prop_assert!(!is_write(&txn));
        let (ok, results, _) = plain(&keys, &txn, &etcd);
        let answer = etcd.txn(&keys.read(&txn));
        let ops = if ok { &txn.then } else { &txn.otherwise };
        prop_assert_eq!((answer.succeeded, keys.results(ops, answer.responses).unwrap()), (ok, results));
    }

    #[test]
    fn the_predecessor_is_the_newest_key_created_before_the_given_key(writes in vec(any_txn(), 0..8), prefix in prefix(), of in key()) {
        let mut etcd = Etcd::new();
        let (keys, mut write) = begin(&mut etcd);
        for txn in &writes {
            write.marker = etcd.txn(&keys.write(txn, write)).header.unwrap().revision;
            write.number += 1;
        }
        let content = named(&keys, &etcd);
        let Some(own) = content.get(&of) else { return Ok(()) };
        let older = content.iter().filter(|(key, each)| key.starts_with(&*prefix) && each.created < own.created);
        let expected = older.max_by_key(|(key, each)| (each.created, Arc::clone(key))).map(|(key, _)| Arc::clone(key));
        let revision = etcd.revision();
        let range = |asked: &pb::RangeRequest| keys.entries(etcd.range(asked, etcd.newest()).kvs);
        let mut found = range(&keys.predecessor(&prefix, unsigned(own.created), revision));
        if found.len() == 2 && found[0].create_revision == found[1].create_revision {
            found = range(&keys.last_made(&prefix, found[0].create_revision, revision));
        }
        prop_assert_eq!(found.first().map(|entry| Arc::clone(&entry.key)), expected);
    }
}

#[test]
fn a_write_is_not_executed_if_its_marker_was_changed_or_removed() {
    let mut etcd = Etcd::new();
    let (keys, write) = begin(&mut etcd);
    let txn = Txn { then: vec![Op::Delete("a".into())], ..Txn::default() };
    etcd.txn(&keys.begin());
    assert_eq!(Keys::written(write, etcd.txn(&keys.write(&txn, write))), Ok(Written::Never));
    let mut content = etcd.newest().clone();
    content.remove(&keys.marker());
    etcd.revisions.push(content);
    assert_eq!(Keys::written(write, etcd.txn(&keys.write(&txn, write))), Ok(Written::Never));
    assert_eq!(Keys::written(write, pb::TxnResponse::default()), Err(Unexpected));
}

#[test]
fn foreign_keys_and_the_marker_key_are_ignored() {
    let keys = Keys { prefix: "/run/".into(), lease: 7, job_lease: 8 };
    assert_eq!(keys.strip(b"/run/k").as_deref(), Some("k"));
    for foreign in [&b"/ru"[..], b"/other/k", b"/run/\xff", &keys.marker()] {
        assert_eq!(keys.strip(foreign), None);
    }
}
