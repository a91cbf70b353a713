//! Compares the store with a naive implementation that keeps everything in lists and scans them.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::watches::Watches;
use super::*;

const KEYS: [&str; 6] = ["a", "a/1", "a/2", "a/2x", "b", "é"];
const PREFIXES: [&str; 5] = ["", "a", "a/", "a/2", "é"];
const SESSIONS: u64 = 3;

#[derive(Debug, Clone)]
enum Step {
    Txn(SessionId, Txn),
    EndSessions(Vec<SessionId>),
}

/// A key of the naive store: name, value, create revision, mod revision and lease.
type Row = (String, Vec<u8>, u64, u64, Option<SessionId>);

/// Naive store: a list of keys, sorted by name.
#[derive(Debug, Default)]
struct Naive {
    revision: u64,
    keys: Vec<Row>,
    ended: Vec<SessionId>,
}

impl Naive {
    fn find(&self, key: &str) -> Option<&Row> {
        self.keys.iter().find(|found| found.0 == key)
    }

    fn entry(found: &Row) -> Entry {
        let (key, value, create_revision, mod_revision, _) = found;
        let (key, value) = (key.as_str().into(), value.as_slice().into());
        Entry { key, value, create_revision: *create_revision, mod_revision: *mod_revision }
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Exists(key) => self.find(key).is_some(),
            Compare::Missing(key) => self.find(key).is_none(),
            Compare::Create(key, revision) => self.find(key).map_or(0, |found| found.2) == *revision,
            Compare::Mod(key, revision) => self.find(key).map_or(0, |found| found.3) == *revision,
            Compare::Value(key, value) => self.find(key).is_some_and(|found| found.1 == *value),
        }
    }

    fn delete(&mut self, key: &str, changes: &mut Vec<Change>) {
        let found = self.find(key).unwrap().clone();
        self.keys.retain(|other| other.0 != key);
        let mod_revision = self.revision + 1;
        changes.push(Change { key: key.into(), value: None, create_revision: found.2, mod_revision });
    }

    fn apply(&mut self, session: SessionId, op: &Op, changes: &mut Vec<Change>) -> OpResult {
        let under = |prefix: &str| -> Vec<_> { self.keys.iter().filter(|found| found.0.starts_with(prefix)).collect() };
        match op {
            Op::Put { key, value, leased } => {
                let create_revision = self.find(key).map_or(self.revision + 1, |found| found.2);
                let mod_revision = self.revision + 1;
                let lease = leased.then_some(session).or(self.find(key).and_then(|found| found.4));
                self.keys.retain(|other| other.0 != **key);
                self.keys.push((key.to_string(), value.to_vec(), create_revision, mod_revision, lease));
                self.keys.sort();
                changes.push(Change {
                    key: Arc::clone(key),
                    value: Some(Arc::clone(value)),
                    create_revision,
                    mod_revision,
                });
                OpResult::Count(1)
            }
            Op::Delete(key) if self.find(key).is_none() => OpResult::Count(0),
            Op::Delete(key) => {
                self.delete(key, changes);
                OpResult::Count(1)
            }
            Op::DeletePrefix(prefix) => {
                let keys: Vec<String> = under(prefix).into_iter().map(|found| found.0.clone()).collect();
                for key in &keys {
                    self.delete(key, changes);
                }
                OpResult::Count(keys.len() as u64)
            }
            Op::Get(key) => OpResult::Entry(self.find(key).map(Self::entry)),
            Op::Range { prefix, limit } => {
                let limit = if *limit == 0 { usize::MAX } else { *limit as usize };
                OpResult::Entries(under(prefix).into_iter().take(limit).map(Self::entry).collect())
            }
            Op::Predecessor { prefix, key } => {
                let below = self.find(key).map_or(0, |found| found.2);
                let before = under(prefix).into_iter().filter(|found| found.2 < below);
                OpResult::Entry(before.max_by_key(|found| (found.2, &found.0)).map(Self::entry))
            }
        }
    }

    fn step(&mut self, step: &Step) -> (Option<(bool, Vec<OpResult>)>, Vec<Change>) {
        let mut changes = Vec::new();
        let told = match step {
            Step::Txn(session, txn) => {
                let ok = txn.compares.iter().all(|compare| self.holds(compare));
                let ops = if ok { &txn.then } else { &txn.otherwise };
                Some((ok, ops.iter().map(|op| self.apply(*session, op, &mut changes)).collect()))
            }
            Step::EndSessions(sessions) => {
                for session in sessions {
                    let theirs = self.keys.iter().filter(|found| found.4 == Some(*session));
                    let keys: Vec<String> = theirs.map(|found| found.0.clone()).collect();
                    for key in &keys {
                        self.delete(key, &mut changes);
                    }
                    self.ended.push(*session);
                }
                None
            }
        };
        self.revision += u64::from(!changes.is_empty());
        (told, changes)
    }
}

fn a_key() -> impl Strategy<Value = Arc<str>> {
    prop::sample::select(&KEYS[..]).prop_map(Arc::from)
}

fn a_prefix() -> impl Strategy<Value = Arc<str>> {
    prop::sample::select(&PREFIXES[..]).prop_map(Arc::from)
}

fn a_compare() -> impl Strategy<Value = Compare> {
    prop_oneof![
        a_key().prop_map(Compare::Exists),
        a_key().prop_map(Compare::Missing),
        (a_key(), 0..6_u64).prop_map(|(key, revision)| Compare::Create(key, revision)),
        (a_key(), 0..6_u64).prop_map(|(key, revision)| Compare::Mod(key, revision)),
        (a_key(), vec(0..2_u8, 0..2)).prop_map(|(key, value)| Compare::Value(key, value)),
    ]
}

pub(crate) fn an_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (a_key(), vec(0..2_u8, 0..2), any::<bool>())
            .prop_map(|(key, value, leased)| Op::Put { key, value: value.into(), leased }),
        1 => a_key().prop_map(Op::Delete),
        1 => a_prefix().prop_map(Op::DeletePrefix),
        1 => a_key().prop_map(Op::Get),
        1 => (a_prefix(), 0..3_u32).prop_map(|(prefix, limit)| Op::Range { prefix, limit }),
        1 => (a_prefix(), a_key()).prop_map(|(prefix, key)| Op::Predecessor { prefix, key }),
    ]
}

pub(crate) fn a_txn() -> impl Strategy<Value = Txn> {
    (vec(a_compare(), 0..3), vec(an_op(), 0..6), vec(an_op(), 0..3)).prop_map(|(compares, then, otherwise)| Txn {
        compares,
        then,
        otherwise,
    })
}

fn a_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..=SESSIONS, a_txn()).prop_map(|(session, txn)| Step::Txn(session, txn)),
        1 => vec(1..=SESSIONS, 1..3).prop_map(Step::EndSessions),
    ]
}

pub(crate) fn a_watch() -> impl Strategy<Value = Watch> {
    (a_prefix(), any::<bool>()).prop_map(|(prefix, exact)| Watch { prefix, exact })
}

fn with_sessions(max_bytes: usize) -> State {
    let mut state = State::new(max_bytes);
    (1..=SESSIONS).for_each(|session| state.begin_session(session));
    state
}

proptest! {
    #[test]
    fn the_store_behaves_like_a_naive_implementation(steps in vec(a_step(), 1..30)) {
        let mut state = with_sessions(1 << 20);
        let mut naive = Naive::default();
        for step in &steps {
            if let Step::Txn(session, _) = step && naive.ended.contains(session) {
                continue;
            }
            let (told, changes) = naive.step(step);
            let revision = match step {
                Step::Txn(session, txn) => {
                    let done = state.txn(*session, txn).unwrap();
                    prop_assert_eq!((done.ok, done.results.unwrap()), told.unwrap());
                    done.revision
                }
                Step::EndSessions(sessions) => state.end_sessions(sessions),
            };
            prop_assert_eq!(revision.map(|revision| revision.changes.clone()).unwrap_or_default(), changes);
            prop_assert_eq!(state.revision(), naive.revision);
            let all = state.snapshot(&Watch { prefix: "".into(), exact: false }).unwrap();
            prop_assert_eq!(all, naive.keys.iter().map(Naive::entry).collect::<Vec<_>>());
        }
        (1..=SESSIONS).for_each(|session| drop(state.end_sessions(&[session])));
        prop_assert!(state.entries.values().all(|stored| stored.lease.is_none()));
    }

    #[test]
    fn stored_bytes_never_exceed_the_limit(
        limit in 500..5_000_usize,
        puts in vec((a_key(), 0..400_usize, any::<bool>()), 1..60),
    ) {
        let mut state = with_sessions(limit);
        for (key, length, is_delete) in puts {
            let op = if is_delete { Op::Delete(key) } else {
                Op::Put { key, value: vec![0; length].into(), leased: false }
            };
            let before = state.revision();
            let done = state.txn(1, &Txn { then: vec![op], ..Txn::default() });
            prop_assert!(done.is_ok() || state.revision() == before);
            prop_assert!(state.entry_bytes <= limit);
            let entries = state.entries.iter().map(|(key, stored)| cost(key, &stored.value)).sum::<usize>();
            prop_assert_eq!(state.entry_bytes, entries);
            prop_assert_eq!(state.by_creation.len(), state.entries.len());
        }
    }

    /// Each client receives every change that its watches cover, exactly once and in order, and receives the changes
    /// of a revision together. The test also starts and stops watches between changes.
    #[test]
    fn watchers_receive_each_change_exactly_once(
        schedule in vec(prop_oneof![
            3 => a_step().prop_map(Ok),
            2 => (1..4_u64, a_watch(), any::<bool>()).prop_map(Err),
        ], 1..40),
    ) {
        let mut state = with_sessions(1 << 20);
        let mut watches = Watches::default();
        let mut own: HashMap<u64, Vec<Watch>> = HashMap::new();
        for turn in schedule {
            let revision = match turn {
                Err((client, watch, is_begin)) => {
                    let mine = own.entry(client).or_default();
                    mine.retain(|other| *other != watch);
                    if is_begin {
                        mine.push(watch.clone());
                        watches.add(client, watch);
                    } else {
                        watches.remove(client, &watch);
                    }
                    prop_assert_eq!(watches.count(client), mine.len());
                    continue;
                }
                Ok(Step::Txn(session, txn)) => state.txn(session, &txn).unwrap().revision,
                Ok(Step::EndSessions(sessions)) => {
                    let ended = state.end_sessions(&sessions);
                    for session in sessions { state.begin_session(session); }
                    ended
                }
            };
            let Some(revision) = revision else { continue };
            let mut heard: HashMap<u64, Vec<usize>> = HashMap::new();
            for (changes, clients) in watches.deliveries(&revision) {
                for client in clients {
                    prop_assert!(heard.insert(client, changes.clone()).is_none());
                }
            }
            for (client, mine) in &own {
                let due: Vec<usize> = (0..revision.changes.len())
                    .filter(|position| mine.iter().any(|watch| watch.covers(&revision.changes[*position].key)))
                    .collect();
                prop_assert_eq!(heard.remove(client).unwrap_or_default(), due);
            }
            prop_assert!(heard.is_empty());
        }
    }
}

#[test]
fn sessions_that_end_together_end_in_one_revision() {
    let mut state = with_sessions(1 << 20);
    for session in 1..=3 {
        let put = Op::Put { key: format!("n/{session}").into(), value: [].into(), leased: true };
        state.txn(session, &Txn { then: vec![put], ..Txn::default() }).unwrap();
    }
    let ended = state.end_sessions(&[3, 1]).unwrap();
    assert_eq!(ended.number, 4);
    assert_eq!(ended.changes.iter().map(|change| &*change.key).collect::<Vec<_>>(), ["n/3", "n/1"]);
    assert_eq!(state.end_sessions(&[3, 1]), None);
}

#[test]
fn a_leased_put_takes_over_the_lease_and_a_plain_put_keeps_it() {
    let mut state = with_sessions(1 << 20);
    let put = |leased| Txn { then: vec![Op::Put { key: "k".into(), value: [].into(), leased }], ..Txn::default() };
    state.txn(1, &put(true)).unwrap();
    state.txn(2, &put(true)).unwrap();
    assert_eq!(state.end_sessions(&[1]), None);
    state.txn(3, &put(false)).unwrap();
    assert_eq!(state.end_sessions(&[3]), None);
    assert_eq!(&*state.end_sessions(&[2]).unwrap().changes[0].key, "k");
}

#[test]
fn a_transaction_is_applied_even_if_its_answer_is_too_large() {
    let mut state = with_sessions(1 << 30);
    let value: Arc<[u8]> = vec![0; 1 << 20].into();
    for n in 0..65 {
        let put = Op::Put { key: format!("big/{n}").into(), value: Arc::clone(&value), leased: false };
        state.txn(1, &Txn { then: vec![put], ..Txn::default() }).unwrap();
    }
    let everything = Watch { prefix: "".into(), exact: false };
    assert_eq!(state.snapshot(&everything), Err(Exceeded::Answer(MAX_ANSWER)));
    let range = Op::Range { prefix: "big/".into(), limit: 0 };
    let done = state.txn(1, &Txn { then: vec![range, Op::Delete("big/0".into())], ..Txn::default() }).unwrap();
    assert_eq!(
        (done.results, done.revision.map(|revision| revision.number)),
        (Err(Exceeded::Answer(MAX_ANSWER)), Some(66))
    );
}

/// Puts `count` keys with the given prefix, each in its own transaction.
fn put_all(state: &mut State, prefix: &str, count: usize) {
    for number in 0..count {
        let put = Op::Put { key: format!("{prefix}{number}").into(), value: [].into(), leased: false };
        state.txn(1, &Txn { then: vec![put], ..Txn::default() }).unwrap();
    }
}

#[test]
fn a_predecessor_search_visits_the_smaller_set_of_keys() {
    let mut state = with_sessions(1 << 30);
    put_all(&mut state, "few/", 3);
    put_all(&mut state, "many/", 10_000);
    for (prefix, key, found, most) in [
        ("absent/", "many/9999", None, 1),
        ("few/", "many/9999", Some("few/2"), 4),
        ("many/", "many/9999", Some("many/9998"), 1),
        ("", "many/9999", Some("many/9998"), 1),
        ("many/", "few/1", None, 2),
    ] {
        let mut searched = Some(1000);
        assert_eq!(state.predecessor(prefix, key, &mut searched).as_deref(), found, "{prefix} before {key}");
        assert!(searched.is_some_and(|left| left >= 1000 - most), "STATE-5: {prefix} before {key}: {searched:?}");
    }
}

#[test]
fn the_number_of_searches_in_a_transaction_is_limited() {
    let mut state = with_sessions(1 << 30);
    put_all(&mut state, "old/", 1000);
    put_all(&mut state, "key/", 1);
    put_all(&mut state, "new/", 1000);
    let search = || Op::Predecessor { prefix: "new/".into(), key: "key/0".into() };
    let few = Txn { then: vec![search(), search()], ..Txn::default() };
    assert_eq!(state.txn(1, &few).unwrap().results, Ok(vec![OpResult::Entry(None), OpResult::Entry(None)]));
    let mut then: Vec<Op> = (0..4095).map(|_| search()).collect();
    then.push(Op::Delete("key/0".into()));
    let done = state.txn(1, &Txn { then, ..Txn::default() }).unwrap();
    assert_eq!(done.results, Err(Exceeded::Searched), "STATE-5");
    assert!(done.revision.is_some(), "STATE-1: it is carried out, and whole");
}
