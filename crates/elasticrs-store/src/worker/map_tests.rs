//! Tests of the map: single operations, and random operations that are compared with a slow, simple model.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::wire::Parser;
use super::*;

const GREETING: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];

/// An operation on the store, with owned keys.
#[derive(Debug, Clone)]
enum Op {
    Set(u8, Vec<u8>),
    CompareSet(u8, Vec<u8>, Vec<u8>),
    Get(u8),
    Add(u8, i64),
    Check(Vec<u8>),
    Wait(Vec<u8>),
    NumKeys,
    Delete(u8),
    Append(u8, Vec<u8>),
    MultiGet(Vec<u8>),
    MultiSet(Vec<(u8, Vec<u8>)>),
    CancelWait,
    Push(u8, Vec<u8>),
    Pop(u8),
    Len(u8),
    ListKeys,
    Barrier(u8, i64),
    Gone,
}

fn encode(op: &Op) -> Vec<u8> {
    let mut out = GREETING.to_vec();
    let keyed = |out: &mut Vec<u8>, opcode, key: u8| {
        out.push(opcode);
        put_bytes(out, &[key]);
    };
    let valued = |out: &mut Vec<u8>, opcode, key, values: &[&Vec<u8>]| {
        keyed(out, opcode, key);
        for value in values {
            put_bytes(out, value);
        }
    };
    let numbered = |out: &mut Vec<u8>, opcode, key, number| {
        keyed(out, opcode, key);
        put_number(out, number);
    };
    let listed = |out: &mut Vec<u8>, opcode, keys: &[u8]| {
        out.push(opcode);
        put_number(out, signed(keys.len()));
        for key in keys {
            put_bytes(out, &[*key]);
        }
    };
    match op {
        Op::Get(key) => keyed(&mut out, 3, *key),
        Op::Delete(key) => keyed(&mut out, 8, *key),
        Op::Pop(key) => keyed(&mut out, 15, *key),
        Op::Len(key) => keyed(&mut out, 16, *key),
        Op::Check(keys) => listed(&mut out, 5, keys),
        Op::Wait(keys) => listed(&mut out, 6, keys),
        Op::MultiGet(keys) => listed(&mut out, 10, keys),
        Op::NumKeys => out.push(7),
        Op::CancelWait => out.push(12),
        Op::ListKeys => out.push(17),
        Op::Set(key, value) => valued(&mut out, 1, *key, &[value]),
        Op::Append(key, value) => valued(&mut out, 9, *key, &[value]),
        Op::Push(key, value) => valued(&mut out, 14, *key, &[value]),
        Op::CompareSet(key, expected, desired) => valued(&mut out, 2, *key, &[expected, desired]),
        Op::Add(key, number) => numbered(&mut out, 4, *key, *number),
        Op::Barrier(key, number) => numbered(&mut out, 18, *key, *number),
        Op::MultiSet(pairs) => {
            out.push(11);
            put_number(&mut out, signed(pairs.len()));
            for (key, value) in pairs {
                put_bytes(&mut out, &[*key]);
                put_bytes(&mut out, value);
            }
        }
        Op::Gone => unreachable!("no request"),
    }
    out
}

/// Result of an operation: the reply, and the connections whose wait is over.
type Done = Result<(Vec<u8>, Vec<Id>), Refused>;

fn apply(map: &mut Map, from: Id, op: &Op) -> Done {
    if matches!(op, Op::Gone) {
        map.stop_waiting(from);
        return Ok(Default::default());
    }
    let bytes = encode(op);
    let mut parser = Parser::default();
    let (_, greeting) = parser.next(&bytes).unwrap().unwrap();
    let (request, _) = parser.next(&bytes[greeting..]).unwrap().unwrap();
    let (mut reply, mut woken) = (Vec::new(), Vec::new());
    map.apply(from, &request, &mut reply, &mut woken)?;
    Ok((reply, woken))
}

/// A simple model of the store. Each wait is a set of missing keys, and each change checks all waits.
#[derive(Default)]
struct Model {
    values: BTreeMap<u8, Vec<u8>>,
    queues: BTreeMap<u8, VecDeque<Vec<u8>>>,
    /// Waiting connections, longest wait first. Each tuple contains the connection's id, a flag that is true for a
    /// barrier, and the keys that are still missing.
    waits: Vec<(Id, bool, BTreeSet<u8>)>,
}

impl Model {
    fn stored(&mut self, key: u8) -> Vec<Id> {
        self.waits.iter_mut().filter(|wait| !wait.1).for_each(|wait| {
            wait.2.remove(&key);
        });
        let woken = self.waits.iter().filter(|wait| wait.2.is_empty()).map(|wait| wait.0).collect();
        self.waits.retain(|wait| !wait.2.is_empty());
        woken
    }

    fn pushed(&mut self, key: u8) -> Vec<Id> {
        for index in 0..self.waits.len() {
            let wait = &mut self.waits[index];
            if !wait.1 && wait.2.remove(&key) && wait.2.is_empty() {
                return vec![self.waits.remove(index).0];
            }
        }
        Vec::new()
    }

    fn number(&self, key: u8) -> Result<i64, Refused> {
        let Some(value) = self.values.get(&key) else { return Ok(0) };
        let text: String = value.iter().map(|byte| char::from(*byte)).collect();
        let text = text.trim_start_matches([' ', '\t', '\n', '\r', '\x0c']);
        let end = text.char_indices().find(|(at, c)| !c.is_ascii_digit() && (*at > 0 || !"+-".contains(*c)));
        let number = &text[..end.map_or(text.len(), |(at, _)| at)];
        number.parse().map_err(|_| Refused::NotANumber(String::from_utf8_lossy(&[key]).into_owned()))
    }

    fn has(&self, key: u8) -> bool {
        self.values.contains_key(&key) || self.queues.get(&key).is_some_and(|queue| !queue.is_empty())
    }

    fn apply(&mut self, from: Id, op: &Op) -> Done {
        let mut reply = Vec::new();
        let mut woken = Vec::new();
        match op.clone() {
            Op::Set(key, value) => {
                self.values.insert(key, value);
                woken = self.stored(key);
            }
            Op::CompareSet(key, expected, desired) => {
                let current = self.values.get(&key).cloned();
                if current.clone().unwrap_or_default() == expected {
                    self.values.insert(key, desired.clone());
                    woken = self.stored(key);
                    put_bytes(&mut reply, &desired);
                } else {
                    put_bytes(&mut reply, &current.unwrap_or(expected));
                }
            }
            Op::Get(key) => put_bytes(&mut reply, self.values.get(&key).map_or(&[], Vec::as_slice)),
            Op::Add(key, delta) => {
                let sum = self.number(key)?.wrapping_add(delta);
                self.values.insert(key, sum.to_string().into());
                woken = self.stored(key);
                put_number(&mut reply, sum);
            }
            Op::Check(keys) => reply.push(u8::from(!keys.iter().all(|key| self.has(*key)))),
            Op::Wait(keys) => {
                self.waits.retain(|wait| wait.0 != from);
                let missing: BTreeSet<u8> = keys.into_iter().filter(|key| !self.has(*key)).collect();
                if missing.is_empty() {
                    reply.push(0);
                } else {
                    self.waits.push((from, false, missing));
                }
            }
            Op::NumKeys => put_number(&mut reply, signed(self.values.len())),
            Op::Delete(key) => put_number(&mut reply, i64::from(self.values.remove(&key).is_some())),
            Op::Append(key, value) => {
                self.values.entry(key).or_default().extend(value);
                woken = self.stored(key);
            }
            Op::MultiGet(keys) => {
                for key in keys {
                    put_bytes(&mut reply, self.values.get(&key).map_or(&[], Vec::as_slice));
                }
            }
            Op::MultiSet(pairs) => {
                for (key, value) in pairs {
                    self.values.insert(key, value);
                    woken.extend(self.stored(key));
                }
            }
            Op::CancelWait | Op::Gone => {
                self.waits.retain(|wait| wait.0 != from);
                if matches!(op, Op::CancelWait) {
                    reply.push(1);
                }
            }
            Op::Push(key, value) => {
                self.queues.entry(key).or_default().push_back(value);
                woken = self.pushed(key);
            }
            Op::Pop(key) => {
                let queue = self.queues.entry(key).or_default();
                put_number(&mut reply, signed(queue.len()));
                if let Some(value) = queue.pop_front() {
                    put_bytes(&mut reply, &value);
                }
            }
            Op::Len(key) => put_number(&mut reply, signed(self.queues.get(&key).map_or(0, VecDeque::len))),
            Op::ListKeys => {
                put_number(&mut reply, signed(self.values.len()));
                for key in self.values.keys() {
                    put_bytes(&mut reply, &[*key]);
                }
            }
            Op::Barrier(key, size) => {
                self.waits.retain(|wait| wait.0 != from);
                let count = self.number(key)?.wrapping_add(1);
                self.values.insert(key, count.to_string().into());
                woken = self.stored(key);
                if count >= size {
                    reply.push(0);
                    let is_there = |wait: &(Id, bool, BTreeSet<u8>)| wait.1 && wait.2.contains(&key);
                    woken.extend(self.waits.iter().filter(|wait| is_there(wait)).map(|wait| wait.0));
                    self.waits.retain(|wait| !is_there(wait));
                } else {
                    self.waits.push((from, true, BTreeSet::from([key])));
                }
            }
        }
        Ok((reply, woken))
    }
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![3 => vec(any::<u8>(), 0..6), 1 => any::<i8>().prop_map(|number| number.to_string().into())]
}

fn op() -> impl Strategy<Value = Op> {
    let key = || 0..6_u8;
    let keys = || vec(0..6_u8, 0..4);
    prop_oneof![
        1 => (key(), value()).prop_map(|(key, value)| Op::Set(key, value)),
        1 => (key(), value(), value()).prop_map(|(key, expected, desired)| Op::CompareSet(key, expected, desired)),
        1 => (key(), value()).prop_map(|(key, desired)| Op::CompareSet(key, Vec::new(), desired)),
        1 => key().prop_map(Op::Get),
        1 => (key(), any::<i8>()).prop_map(|(key, delta)| Op::Add(key, delta.into())),
        1 => keys().prop_map(Op::Check),
        3 => keys().prop_map(Op::Wait),
        1 => Just(Op::NumKeys),
        2 => key().prop_map(Op::Delete),
        1 => (key(), value()).prop_map(|(key, value)| Op::Append(key, value)),
        1 => keys().prop_map(Op::MultiGet),
        1 => vec((key(), value()), 0..3).prop_map(Op::MultiSet),
        1 => Just(Op::CancelWait),
        2 => (key(), value()).prop_map(|(key, value)| Op::Push(key, value)),
        2 => key().prop_map(Op::Pop),
        1 => key().prop_map(Op::Len),
        1 => Just(Op::ListKeys),
        3 => (key(), 1..4_i64).prop_map(|(key, size)| Op::Barrier(key, size)),
        1 => Just(Op::Gone),
    ]
}

/// Sorts the reply to `ListKeys`, because the store returns the keys in arbitrary order.
fn sorted(op: &Op, reply: &[u8]) -> Vec<u8> {
    let mut items: Vec<&[u8]> = reply.chunks(9).collect();
    if matches!(op, Op::ListKeys) {
        items = reply[8..].chunks(9).collect();
        items.sort_unstable();
    }
    items.concat()
}

proptest! {
    #[test]
    fn the_map_behaves_like_the_model(ops in vec((0..4_u64, op()), 0..60)) {
        let mut map = Map::new(1 << 20);
        let mut model = Model::default();
        for (from, op) in &ops {
            match (apply(&mut map, *from, op), model.apply(*from, op)) {
                (Ok((reply, woken)), Ok((expected, expected_woken))) => {
                    prop_assert_eq!(sorted(op, &reply), sorted(op, &expected), "{:?}", op);
                    prop_assert_eq!(woken, expected_woken, "{:?}", op);
                }
                (got, expected) => {
                    prop_assert_eq!(got.err(), expected.err());
                    // Simulate the end of the connection, because the server closes a connection after an error.
                    map.stop_waiting(*from);
                    model.apply(*from, &Op::Gone).unwrap();
                }
            }
            let waiting: Vec<Id> = map.waiters(9).iter().map(|(id, _)| *id).collect();
            let expected: Vec<Id> = model.waits.iter().map(|wait| wait.0).collect();
            prop_assert_eq!(waiting, expected);
        }
        // Remove everything, to check that all memory is released.
        for from in 0..4 {
            map.stop_waiting(from);
        }
        for key in 0..6 {
            apply(&mut map, 0, &Op::Delete(key)).unwrap();
            while map.queues.contains_key(&[key][..]) {
                apply(&mut map, 0, &Op::Pop(key)).unwrap();
            }
        }
        prop_assert_eq!(map.budget().used(), 0);
        prop_assert!(map.waiters.iter().all(HashMap::is_empty) && map.waiting.is_empty());
    }

    #[test]
    fn the_map_never_uses_more_memory_than_its_limit(ops in vec((0..4_u64, op()), 0..200), limit in 0..2000_usize) {
        let mut map = Map::new(limit);
        for (from, op) in &ops {
            if apply(&mut map, *from, op).is_err() {
                map.stop_waiting(*from);
            }
            let stored: usize = map.values.iter().map(|(key, value)| cost(key, value)).sum();
            let queued: usize =
                map.queues.iter().flat_map(|(key, queue)| queue.iter().map(|value| cost(key, value))).sum();
            let waited: usize = map.waiting.values().map(|waiting| waiting.charged).sum();
            prop_assert_eq!(map.budget().used(), stored + queued + waited);
            prop_assert!(map.budget().used() <= limit);
        }
    }
}

#[test]
fn number_parsing_matches_the_torch_server() {
    assert_eq!(parse_number(b" 12ab"), Some(12));
    assert_eq!(parse_number(b"-2"), Some(-2));
    assert_eq!(parse_number(b"+7"), Some(7));
    for none in [&b""[..], b"-", b"ab", b"--1", b"9223372036854775808"] {
        assert_eq!(parse_number(none), None, "{none:?}");
    }
    let mut map = Map::new(1 << 20);
    apply(&mut map, 0, &Op::Set(1, i64::MAX.to_string().into())).unwrap();
    let mut wrapped = Vec::new();
    put_number(&mut wrapped, i64::MIN);
    assert_eq!(apply(&mut map, 0, &Op::Add(1, 1)), Ok((wrapped, vec![])));
    assert_eq!(map.values[&[1][..]], i64::MIN.to_string().as_bytes());
}

#[test]
fn a_pushed_value_wakes_the_first_client_that_waits_for_no_other_key() {
    let mut map = Map::new(1 << 20);
    apply(&mut map, 1, &Op::Wait(vec![1, 2])).unwrap();
    apply(&mut map, 2, &Op::Wait(vec![1])).unwrap();
    apply(&mut map, 3, &Op::Wait(vec![1])).unwrap();
    assert_eq!(apply(&mut map, 0, &Op::Push(1, vec![])), Ok((vec![], vec![2])));
    assert_eq!(apply(&mut map, 0, &Op::Push(1, vec![])), Ok((vec![], vec![3])));
    assert_eq!(apply(&mut map, 0, &Op::Set(2, vec![])), Ok((vec![], vec![1])));
}

#[test]
fn a_full_barrier_stays_open_and_a_cancelled_wait_still_counts() {
    let mut map = Map::new(1 << 20);
    assert_eq!(apply(&mut map, 1, &Op::Barrier(1, 2)), Ok((vec![], vec![])));
    assert_eq!(apply(&mut map, 1, &Op::CancelWait), Ok((vec![1], vec![])));
    assert_eq!(apply(&mut map, 2, &Op::Barrier(1, 2)), Ok((vec![READY], vec![])));
    assert_eq!(apply(&mut map, 3, &Op::Barrier(1, 2)), Ok((vec![READY], vec![])));
}

#[test]
fn a_write_beyond_the_limit_is_refused_and_changes_nothing() {
    let mut map = Map::new(300);
    apply(&mut map, 0, &Op::Set(1, vec![7; 100])).unwrap();
    let used = map.budget().used();
    let pairs = Op::MultiSet(vec![(2, vec![0; 10]), (3, vec![0; 100])]);
    assert_eq!(apply(&mut map, 0, &pairs), Err(Refused::Full(300)));
    assert_eq!(apply(&mut map, 0, &Op::Append(1, vec![0; 200])), Err(Refused::Full(300)));
    assert_eq!(apply(&mut map, 0, &Op::Barrier(4, 2)), Err(Refused::Full(300)));
    assert_eq!((map.values.len(), map.budget().used()), (1, used));
}

#[test]
fn an_appended_value_stays_readable_and_has_little_spare_capacity() {
    let mut map = Map::new(1 << 30);
    let piece = vec![1; 8 << 20];
    let appended = (0..17).map_while(|_| apply(&mut map, 0, &Op::Append(1, piece.clone())).ok()).count();
    assert_eq!(appended, MAX_MESSAGE / piece.len() - 1);
    let used = map.budget().used();
    let value = &map.values[&[1][..]];
    assert!(value.capacity() <= value.len() / 8 * 9 + piece.len(), "{} {}", value.capacity(), value.len());
    assert_eq!(apply(&mut map, 0, &Op::Get(1)).unwrap().0.len(), 8 + value_of(&map).len());
    assert_eq!(used, map.budget().used());
}

fn value_of(map: &Map) -> &[u8] {
    &map.values[&[1][..]]
}

#[test]
fn a_reply_beyond_the_memory_limit_is_refused() {
    let mut map = Map::new(1000);
    apply(&mut map, 0, &Op::Set(1, vec![7; 600])).unwrap();
    assert_eq!(apply(&mut map, 0, &Op::Get(1)), Err(Refused::Full(1000)));
    assert_eq!(apply(&mut map, 0, &Op::CompareSet(1, vec![], vec![1])), Err(Refused::Full(1000)));
    assert_eq!(value_of(&map), [7; 600]);
}
