use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::session::watched::{Ages, ages};

const KEYS: [&str; 4] = ["w/a", "w/b", "w/c", "x"];

/// Changes of one revision. Maps the index of each changed key to true if the key is put, or false if it is
/// deleted.
type Step = BTreeMap<usize, bool>;

/// History of a simulated store. `events` contains the events of each revision. `content` contains the keys that exist
/// at each revision.
struct Store {
    events: Vec<Vec<pb::WatchEvent>>,
    content: Vec<BTreeMap<String, Ages>>,
}

fn store(steps: &[Step]) -> Store {
    let mut store = Store { events: vec![vec![]], content: vec![BTreeMap::new()] };
    for step in steps {
        let revision = store.events.len() as u64;
        let mut content = store.content.last().unwrap().clone();
        let mut events = Vec::new();
        for (index, is_put) in step {
            let key = KEYS[*index].to_owned();
            if *is_put {
                let (created, _) = content.get(&key).copied().unwrap_or((revision, 0));
                content.insert(key.clone(), (created, revision));
                events.push(event(&key, pb::EventKind::Put, created, revision));
            } else if content.remove(&key).is_some() {
                events.push(event(&key, pb::EventKind::Delete, 0, revision));
            }
        }
        store.events.push(events);
        store.content.push(content);
    }
    store
}

fn event(key: &str, kind: pb::EventKind, created: u64, revision: u64) -> pb::WatchEvent {
    let kv = pb::KeyValue {
        key: format!("/{key}").into_bytes(),
        create_revision: signed(created),
        mod_revision: signed(revision),
        value: revision.to_be_bytes().to_vec(),
    };
    pb::WatchEvent { kind: kind.into(), kv: Some(kv) }
}

impl Store {
    fn there(&self, watch: &Watch, revision: usize) -> Vec<Entry> {
        let covered = self.content[revision].iter().filter(|(key, _)| watch.covers(key));
        covered
            .map(|(key, (created, changed))| Entry {
                key: key.as_str().into(),
                value: changed.to_be_bytes().to_vec().into(),
                create_revision: *created,
                mod_revision: *changed,
            })
            .collect()
    }
}

fn keys() -> Keys {
    Keys { prefix: "/".into(), lease: 7, job_lease: 0 }
}

/// Next action of the simulated etcd.
#[derive(Debug, Clone)]
enum Sent {
    /// etcd sends one message with the events of this number of revisions.
    Some(usize),
    /// etcd sends the previous message again, which a correct etcd never does.
    Again,
    /// The connection breaks. The client then creates the watch again on a new connection.
    Break,
    /// etcd has deleted old revisions that the watch still needs, so the client reads the current entries instead. The
    /// field is the number of revisions since the last event that etcd sent.
    Compacted(usize),
}

fn sent() -> impl Strategy<Value = Sent> {
    prop_oneof![
        3 => (1..4_usize).prop_map(Sent::Some),
        1 => Just(Sent::Again),
        1 => Just(Sent::Break),
        1 => (0..4_usize).prop_map(Sent::Compacted),
    ]
}

fn apply(known: &mut BTreeMap<String, Ages>, sets: &ChangeSet) -> Result<(), TestCaseError> {
    for change in &sets.changes {
        if change.value.is_some() {
            known.insert(change.key.to_string(), (change.create_revision, change.mod_revision));
        } else {
            let before = known.remove(&*change.key);
            prop_assert_eq!(before.map(|(created, _)| created), Some(change.create_revision));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_watch_reports_changes_once_and_in_order(
        steps in vec(proptest::collection::btree_map(0..KEYS.len(), any::<bool>(), 1..4), 0..20),
        begin in 0..20_usize,
        exact: bool,
        sendings in vec(sent(), 0..20),
    ) {
        let store = store(&steps);
        let end = store.events.len() - 1;
        let begin = begin.min(end);
        let watch = Watch { prefix: if exact { "w/a" } else { "w/" }.into(), exact };
        let mut watches = Watches::default();
        let mut number = watches.add(Watched::new(watch.clone(), begin as u64, &store.there(&watch, begin)));
        let mut known: BTreeMap<_, _> = store.there(&watch, begin).iter().map(|e| (e.key.to_string(), ages(e))).collect();
        let covered = |from: usize, to: usize| -> Vec<pb::WatchEvent> {
            let events = store.events[from..to.max(from)].iter().flatten();
            let ours = |e: &&pb::WatchEvent| watch.covers(str::from_utf8(&e.kv.as_ref().unwrap().key[1..]).unwrap());
            events.filter(ours).cloned().collect()
        };
        // `at` is the next revision that etcd sends. `last` is the last revision reported to the user.
        let (mut at, mut last) = (begin + 1, begin as u64);
        let mut previous = 0..0;
        for sending in sendings.iter().chain(&[Sent::Some(usize::MAX)]) {
            let update = match sending {
                Sent::Some(count) => {
                    previous = at..at.saturating_add(*count).min(end + 1);
                    at = previous.end.max(at);
                    watches.update(&keys(), pb::WatchResponse {
                        watch_id: number, events: covered(previous.start, previous.end), ..Default::default()
                    })
                }
                Sent::Again => watches.update(&keys(), pb::WatchResponse {
                    watch_id: number, events: covered(previous.start, previous.end), ..Default::default()
                }),
                Sent::Break => {
                    let Some(pb::WatchCommand::Create(create)) = watches.create(number, &keys()).unwrap().command
                        else { panic!("no such watch") };
                    prop_assert!(create.start_revision <= signed(at as u64));
                    at = usize::try_from(create.start_revision).unwrap();
                    continue;
                }
                Sent::Compacted(later) => {
                    let update = watches.update(&keys(), pb::WatchResponse {
                        watch_id: number, canceled: true, compact_revision: 9, ..Default::default()
                    });
                    prop_assert_eq!(update, WatchUpdate::Compacted(number));
                    let to = (at - 1 + later).min(end);
                    let (new, sets) = watches.catch_up(number, signed(to as u64), store.there(&watch, to)).unwrap();
                    number = new;
                    at = to + 1;
                    WatchUpdate::Changes(sets.into_iter().collect())
                }
            };
            let WatchUpdate::Changes(sets) = update else { panic!("{update:?}") };
            for sets in sets {
                prop_assert!(sets.revision > last);
                last = sets.revision;
                apply(&mut known, &sets)?;
                // Check that the changes reported so far produce exactly the keys that exist at this revision.
                let there = store.there(&watch, usize::try_from(sets.revision).unwrap());
                let there: BTreeMap<_, _> = there.iter().map(|e| (e.key.to_string(), ages(e))).collect();
                prop_assert_eq!(&known, &there);
            }
        }
        let there: BTreeMap<_, _> = store.there(&watch, end).iter().map(|e| (e.key.to_string(), ages(e))).collect();
        prop_assert_eq!(known, there);
    }
}

#[test]
fn a_removed_watch_reports_no_changes() {
    let watch = Watch { prefix: "w/".into(), exact: false };
    let mut watches = Watches::default();
    let number = watches.add(Watched::new(watch.clone(), 1, &[]));
    assert_eq!(watches.remove(&watch), [number]);
    let events = vec![event("w/a", pb::EventKind::Put, 2, 2)];
    let message = pb::WatchResponse { watch_id: number, events, ..Default::default() };
    assert_eq!(watches.update(&keys(), message), WatchUpdate::Changes(vec![]));
    assert_eq!(watches.create(number, &keys()), None);
    assert!(watches.catch_up(number, 3, vec![]).is_none());
}

#[test]
fn the_reason_for_a_canceled_watch_is_reported() {
    let mut watches = Watches::default();
    let number = watches.add(Watched::new(Watch { prefix: "w/".into(), exact: false }, 1, &[]));
    let cancel_reason = "permission denied".to_owned();
    let message = pb::WatchResponse { watch_id: number, canceled: true, cancel_reason, ..Default::default() };
    assert_eq!(watches.update(&keys(), message), WatchUpdate::Canceled("permission denied".into()));
}
