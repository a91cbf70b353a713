//! Compares a store that is repeatedly restarted from its state file with a store that runs without interruption.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use tempfile::TempDir;

use super::super::state::tests::a_txn;
use super::*;
use crate::types::Txn;

#[derive(Debug, Clone)]
enum Step {
    Begin,
    Txn(SessionId, Txn),
    Extend(SessionId, u32),
    EndSessions(Vec<SessionId>),
    /// Saves all changes to disk.
    Save,
    /// Replaces the store with a new one that restores its state from the file.
    Restart,
}

fn a_step() -> impl Strategy<Value = Step> {
    let session = || 1..8_u64;
    prop_oneof![
        2 => Just(Step::Begin),
        6 => (session(), a_txn()).prop_map(|(session, txn)| Step::Txn(session, txn)),
        1 => (session(), 0..100_u32).prop_map(|(session, ttl_ms)| Step::Extend(session, ttl_ms)),
        1 => vec(session(), 1..3).prop_map(Step::EndSessions),
        2 => Just(Step::Save),
        1 => Just(Step::Restart),
    ]
}

/// The keys and sessions of a store, without the connections.
struct Life {
    state: State,
    sessions: BTreeMap<SessionId, u32>,
    next_session: SessionId,
    journal: Option<Journal>,
}

impl Life {
    fn new() -> Self {
        Self { state: State::new(1 << 20), sessions: BTreeMap::new(), next_session: 1, journal: None }
    }

    fn from(path: &Path) -> Self {
        let (file, mut image) = StateFile::open(path, None, [0; 16], usize::MAX).unwrap();
        let mut life = Self { next_session: image.next_session, ..Self::new() };
        for (session, granted) in &image.sessions {
            life.state.begin_session(*session);
            life.sessions.insert(*session, granted.ttl_ms);
        }
        life.state.restore(image.revision, std::mem::take(&mut image.entries));
        Self { journal: Some(Journal::new(file, image)), ..life }
    }

    fn carry_out(&mut self, step: &Step) {
        let Self { state, sessions, next_session, journal } = self;
        let revision = match step {
            Step::Begin => {
                let granted = Granted { secret: [1; 32], interval_ms: 1, attempts: 2, ttl_ms: 0 };
                sessions.insert(*next_session, 0);
                state.begin_session(*next_session);
                if let Some(journal) = journal {
                    journal.begin(*next_session, granted.clone());
                }
                *next_session += 1;
                None
            }
            Step::Txn(session, txn) if sessions.contains_key(session) => state.txn(*session, txn).unwrap().revision,
            Step::Extend(session, ttl_ms) => {
                sessions.entry(*session).and_modify(|longest| *longest = (*longest).max(*ttl_ms));
                if let Some(journal) = journal {
                    journal.extend(*session, *ttl_ms);
                }
                None
            }
            Step::EndSessions(ended) => {
                sessions.retain(|session, _| !ended.contains(session));
                if let Some(journal) = journal {
                    journal.end(ended);
                }
                state.end_sessions(ended)
            }
            Step::Txn(..) | Step::Save | Step::Restart => None,
        };
        if let (Some(revision), Some(journal)) = (revision, journal) {
            journal.revise(&revision);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_restarted_store_equals_a_store_that_was_never_restarted(steps in vec(a_step(), 1..60)) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("state");
        let mut kept = Life::from(&path);
        let mut plain = Life::new();
        // These changes are not on disk, so no client has seen them.
        let mut unsaved = Vec::new();
        for step in steps {
            if let Step::Save = step {
                let line = kept.journal.as_ref().unwrap().save(&kept.state, kept.next_session).unwrap();
                prop_assert_eq!(line, None);
                unsaved.drain(..).for_each(|step| plain.carry_out(&step));
            } else if let Step::Restart = step {
                drop(kept);
                kept = Life::from(&path);
                unsaved.clear();
            } else {
                kept.carry_out(&step);
                unsaved.push(step);
            }
            if unsaved.is_empty() {
                prop_assert_eq!(kept.state.entries(), plain.state.entries());
                prop_assert_eq!((kept.state.revision(), kept.next_session), (plain.state.revision(), plain.next_session));
                prop_assert_eq!(&kept.sessions, &plain.sessions);
                prop_assert_eq!(kept.state.entry_bytes(), plain.state.entry_bytes());
            }
        }
        // Check that the restored store has the same leases.
        unsaved.drain(..).for_each(|step| plain.carry_out(&step));
        for session in 1..8 {
            let ended = [&mut kept, &mut plain].map(|life| life.state.end_sessions(&[session]));
            prop_assert_eq!(&ended[0], &ended[1]);
        }
    }
}

#[test]
fn a_wait_for_the_disk_does_not_include_later_changes() {
    let folder = TempDir::new().unwrap();
    let life = Life::from(&folder.path().join("state"));
    let journal = life.journal.as_ref().unwrap();
    let change = || journal.end(&[1]);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    change();
    let mut settled = std::pin::pin!(journal.settled());
    assert!(settled.as_mut().poll(&mut context).is_pending());
    journal.save(&life.state, life.next_session).unwrap();
    // Another client makes a change before the waiting task runs.
    change();
    assert!(settled.as_mut().poll(&mut context).is_ready());
    // A call to `settled` that starts now must wait for the second change, which is not on disk yet.
    assert!(std::pin::pin!(journal.settled()).poll(&mut context).is_pending());
}

#[test]
fn a_store_whose_file_cannot_be_replaced_continues_and_reports_it() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("state");
    let mut life = Life::from(&path);
    std::fs::create_dir(folder.path().join(".state.elasticrs-new")).unwrap();
    life.carry_out(&Step::Begin);
    let mut lines = Vec::new();
    let put = |value: u8| {
        let op = crate::types::Op::Put { key: "k".into(), value: vec![value; 200_000].into(), leased: false };
        Step::Txn(1, Txn { then: vec![op], ..Txn::default() })
    };
    for value in 0..28 {
        life.carry_out(&put(value));
        let journal = life.journal.as_ref().unwrap();
        lines.extend(journal.save(&life.state, life.next_session).unwrap());
    }
    assert_eq!(lines.len(), 1, "{lines:?}");
    std::fs::remove_dir(folder.path().join(".state.elasticrs-new")).unwrap();
    drop(life.journal.take());
    assert_eq!(Life::from(&path).state.entries(), life.state.entries());
}
