use proptest::collection::vec;
use proptest::prelude::*;

use super::super::protocol::{self, Answer};
use super::super::state::State;
use super::super::watches::Watches;
use super::*;
use crate::types::{Op, Txn};

const KEYS: [&str; 3] = ["a/1", "a/2", "b"];
const OTHER: u64 = 2;

/// A step of the simulation.
#[derive(Debug, Clone)]
enum Step {
    /// This client puts or deletes a key.
    Write(usize, bool),
    /// Another client puts or deletes a key.
    Elsewhere(usize, bool),
    Watch(usize, bool),
    Unwatch(usize),
    /// The store executes queued requests. The field is the maximum number of requests.
    Serve(usize),
    /// The client reads this number of queued answers, or all of them if there are fewer.
    Read(usize),
    /// The connection breaks, all messages in transit are lost, and the session resumes on a new connection.
    Break,
}

fn a_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3_usize, any::<bool>()).prop_map(|(key, is_put)| Step::Write(key, is_put)),
        (0..3_usize, any::<bool>()).prop_map(|(key, is_put)| Step::Elsewhere(key, is_put)),
        (0..3_usize, any::<bool>()).prop_map(|(watch, snapshot)| Step::Watch(watch, snapshot)),
        (0..3_usize).prop_map(Step::Unwatch),
        (1..4_usize).prop_map(Step::Serve),
        (1..4_usize).prop_map(Step::Read),
        Just(Step::Break),
    ]
}

/// Returns the watch with this index. The watches are on the prefix `a/`, the key `b`, and the key `a/1`.
fn watch(index: usize) -> Watch {
    let (prefix, exact) = [("a/", false), ("b", true), ("a/1", true)][index];
    Watch { prefix: prefix.into(), exact }
}

fn write(key: usize, is_put: bool) -> Txn {
    let key = KEYS[key].into();
    let op = if is_put { Op::Put { key, value: [1][..].into(), leased: false } } else { Op::Delete(key) };
    Txn { then: vec![op], ..Txn::default() }
}

/// A store, its connection to a client, and the events delivered to the client's user.
struct World {
    state: State,
    watches: Watches,
    unanswered: Unanswered,
    /// Requests in transit, as frames without length prefixes.
    requests: VecDeque<Vec<u8>>,
    answers: VecDeque<Answer>,
    tags: VecDeque<u64>,
    told: Vec<ChangeSet>,
    replied: u64,
}

impl World {
    fn new() -> Self {
        let mut state = State::new(1 << 20);
        state.begin_session(1);
        Self {
            state,
            watches: Watches::default(),
            unanswered: Unanswered::default(),
            requests: VecDeque::new(),
            answers: VecDeque::new(),
            tags: VecDeque::new(),
            told: Vec::new(),
            replied: 0,
        }
    }

    fn ask(&mut self, request: impl Fn(u64) -> Request) {
        let tag = self.replied + self.tags.len() as u64 + 1;
        let request = request(tag);
        if !matches!(request, Request::Unwatch(_)) {
            self.tags.push_back(tag);
        }
        self.requests.push_back(encode_request(&request, true)[4..].to_vec());
        self.unanswered.ask(request);
    }

    fn publish(&mut self, txn: &Txn, session: u64) {
        let Some(revision) = self.state.txn(session, txn).unwrap().revision else { return };
        for (positions, _) in self.watches.deliveries(&revision) {
            let changes = positions.iter().map(|position| revision.changes[*position].clone()).collect();
            self.answers.push_back(Answer::Changes { revision: revision.number, changes });
        }
    }

    fn serve(&mut self) {
        let Some(frame) = self.requests.pop_front() else { return };
        match protocol::Request::decode(&frame).unwrap() {
            protocol::Request::Txn { tag, txn } => {
                self.publish(&txn, 1);
                self.reply(tag, Vec::new());
            }
            protocol::Request::Watch { tag, watch, snapshot } => {
                assert!(snapshot, "otherwise nobody knows what is missing after a break");
                let there = self.state.snapshot(&watch).unwrap();
                self.reply(tag, there.into_iter().map(|entry| OpResult::Entry(Some(entry))).collect());
                self.watches.add(1, watch);
            }
            protocol::Request::Unwatch(watch) => self.watches.remove(1, &watch),
            other => panic!("{other:?}"),
        }
    }

    fn reply(&mut self, tag: u64, results: Vec<OpResult>) {
        self.answers.push_back(Answer::Reply { tag, ok: true, revision: self.state.revision(), results });
    }

    fn read(&mut self) {
        let effect = match self.answers.pop_front() {
            Some(Answer::Changes { revision, changes }) => {
                let set = ChangeSet { revision, changes };
                self.unanswered.note(&set);
                AnswerEffect::Changes(set)
            }
            Some(Answer::Reply { tag, revision, results, .. }) => {
                let effect = self.unanswered.reply(revision, results).unwrap();
                if let AnswerEffect::Reply(_) = effect {
                    assert_eq!(Some(tag), self.tags.pop_front(), "in the order in which they were made");
                    self.replied += 1;
                }
                effect
            }
            Some(other) => panic!("{other:?}"),
            None => return,
        };
        if let AnswerEffect::Changes(told) = effect {
            self.told.push(told);
        }
    }

    fn reconnect(&mut self) {
        self.watches.remove_client(1);
        (self.requests, self.answers) = (VecDeque::new(), VecDeque::new());
        let mut frames = &self.unanswered.ask_again()[..];
        while let Some((length, rest)) = frames.split_first_chunk::<4>() {
            let (frame, rest) = rest.split_at(usize::try_from(u32::from_le_bytes(*length)).unwrap());
            self.requests.push_back(frame.to_vec());
            frames = rest;
        }
    }

    fn settle(&mut self) {
        while !self.requests.is_empty() || !self.answers.is_empty() {
            self.serve();
            self.read();
        }
    }
}

proptest! {
    #[test]
    fn a_resumed_session_loses_no_event_and_receives_none_twice(steps in vec(a_step(), 0..60)) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Write(key, is_put) => world.ask(|tag| Request::Txn { tag, txn: write(key, is_put) }),
                Step::Elsewhere(key, is_put) => world.publish(&write(key, is_put), OTHER),
                Step::Watch(index, snapshot) => {
                    world.ask(|tag| Request::Watch { tag, watch: watch(index), snapshot });
                }
                Step::Unwatch(index) => world.ask(|_| Request::Unwatch(watch(index))),
                Step::Serve(count) => (0..count).for_each(|_| world.serve()),
                Step::Read(count) => (0..count).for_each(|_| world.read()),
                Step::Break => world.reconnect(),
            }
        }
        world.settle();
        prop_assert!(world.tags.is_empty(), "everything is answered");
        prop_assert!(world.unanswered.asked.is_empty());
        // The changes of each key arrive in order, and no change arrives twice.
        let mut last = BTreeMap::new();
        for told in &world.told {
            prop_assert!(!told.changes.is_empty());
            for change in &told.changes {
                let before = last.insert(change.key.clone(), change.mod_revision);
                prop_assert!(before < Some(change.mod_revision), "{} was told twice", change.key);
            }
        }
        // Applying all delivered events to each watch's initial entries yields its current entries.
        for (watch, watched) in &mut world.unanswered.watches {
            let there = world.state.snapshot(watch).unwrap();
            prop_assert_eq!(watched.catch_up(world.state.revision(), there), None);
        }
    }
}

#[test]
fn a_watch_reports_the_deletion_of_a_key_that_existed_before_the_watch() {
    let mut world = World::new();
    world.publish(&write(0, true), OTHER);
    world.ask(|tag| Request::Watch { tag, watch: watch(0), snapshot: false });
    world.settle();
    world.reconnect();
    world.publish(&write(0, false), OTHER);
    world.settle();
    let changes: Vec<_> = world.told.iter().flat_map(|told| &told.changes).collect();
    assert_eq!(changes.len(), 1);
    assert_eq!((&*changes[0].key, &changes[0].value, changes[0].create_revision), ("a/1", &None, 1));
}
