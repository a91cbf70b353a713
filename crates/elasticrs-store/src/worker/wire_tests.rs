//! Tests of the parser, with an encoder of their own.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const GREETING: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];

/// A request with its own bytes, so that parsed ones can be compared with it.
#[derive(Debug, Clone)]
enum Sent {
    Plain(u8),
    Ping(u32),
    One(u8, Vec<u8>),
    Two(u8, Vec<u8>, Vec<u8>),
    Compare(Vec<u8>, Vec<u8>, Vec<u8>),
    Number(u8, Vec<u8>, i64),
    Keys(u8, Vec<Vec<u8>>),
    Pairs(Vec<(Vec<u8>, Vec<u8>)>),
}

impl Sent {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Plain(opcode) => out.push(*opcode),
            Self::Ping(nonce) => {
                out.push(13);
                out.extend(nonce.to_le_bytes());
            }
            Self::One(opcode, key) => {
                out.push(*opcode);
                put_bytes(out, key);
            }
            Self::Two(opcode, key, value) => {
                out.push(*opcode);
                put_bytes(out, key);
                put_bytes(out, value);
            }
            Self::Compare(key, expected, desired) => {
                out.push(2);
                for bytes in [key, expected, desired] {
                    put_bytes(out, bytes);
                }
            }
            Self::Number(opcode, key, number) => {
                out.push(*opcode);
                put_bytes(out, key);
                put_number(out, *number);
            }
            Self::Keys(opcode, keys) => {
                out.push(*opcode);
                out.extend((keys.len() as u64).to_le_bytes());
                for key in keys {
                    put_bytes(out, key);
                }
            }
            Self::Pairs(pairs) => {
                out.push(11);
                out.extend((pairs.len() as u64).to_le_bytes());
                for (key, value) in pairs {
                    put_bytes(out, key);
                    put_bytes(out, value);
                }
            }
        }
    }

    fn is(&self, request: &Request<'_>) -> bool {
        use Request::{
            Add, Append, Barrier, CancelWait, Check, CompareSet, Delete, Get, ListKeys, MultiGet, MultiSet, NumKeys,
            Ping, QueueLen, QueuePop, QueuePush, Set, Wait,
        };
        match (self, request) {
            (Self::Plain(7), NumKeys) | (Self::Plain(12), CancelWait) | (Self::Plain(17), ListKeys) => true,
            (Self::Ping(nonce), Ping(seen)) => nonce == seen,
            (Self::One(3, key), Get(seen))
            | (Self::One(8, key), Delete(seen))
            | (Self::One(15, key), QueuePop(seen))
            | (Self::One(16, key), QueueLen(seen)) => key == seen,
            (Self::Two(1, key, value), Set { key: k, value: v })
            | (Self::Two(9, key, value), Append { key: k, value: v })
            | (Self::Two(14, key, value), QueuePush { key: k, value: v }) => (&key[..], &value[..]) == (*k, *v),
            (Self::Compare(key, old, new), CompareSet { key: k, expected, desired }) => {
                (&key[..], &old[..], &new[..]) == (*k, *expected, *desired)
            }
            (Self::Number(4, key, number), Add { key: k, delta: n })
            | (Self::Number(18, key, number), Barrier { key: k, size: n }) => (&key[..], number) == (*k, n),
            (Self::Keys(5, keys), Check(seen))
            | (Self::Keys(6, keys), Wait(seen))
            | (Self::Keys(10, keys), MultiGet(seen)) => keys.iter().map(Vec::as_slice).eq(seen.clone()),
            (Self::Pairs(pairs), MultiSet(seen)) => pairs.iter().map(|(k, v)| (&k[..], &v[..])).eq(seen.clone()),
            _ => false,
        }
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![4 => vec(any::<u8>(), 0..12), 1 => vec(any::<u8>(), 1000..3000)]
}

fn sent() -> impl Strategy<Value = Sent> {
    prop_oneof![
        prop::sample::select(vec![7, 12, 17]).prop_map(Sent::Plain),
        any::<u32>().prop_map(Sent::Ping),
        (prop::sample::select(vec![3, 8, 15, 16]), bytes()).prop_map(|(opcode, key)| Sent::One(opcode, key)),
        (prop::sample::select(vec![1, 9, 14]), bytes(), bytes()).prop_map(|(op, key, value)| Sent::Two(op, key, value)),
        (bytes(), bytes(), bytes()).prop_map(|(key, expected, desired)| Sent::Compare(key, expected, desired)),
        (prop::sample::select(vec![4, 18]), bytes(), any::<i64>()).prop_map(|(op, key, n)| Sent::Number(op, key, n)),
        (prop::sample::select(vec![5, 6, 10]), vec(bytes(), 0..5)).prop_map(|(op, keys)| Sent::Keys(op, keys)),
        vec((bytes(), bytes()), 0..4).prop_map(Sent::Pairs),
    ]
}

/// Feeds the pieces as a connection would; `true` when the requests were those that were sent.
fn parse(pieces: &[&[u8]], expected: &[Sent]) -> Result<bool, WireError> {
    let mut parser = Parser::default();
    let mut buffer = Vec::new();
    let mut seen = 0;
    for piece in pieces {
        buffer.extend_from_slice(piece);
        let mut used = 0;
        while let Some((request, length)) = parser.next(&buffer[used..])? {
            used += length;
            if request != Request::Validate {
                if !expected.get(seen).is_some_and(|sent| sent.is(&request)) {
                    return Ok(false);
                }
                seen += 1;
            }
        }
        buffer.drain(..used);
    }
    Ok(seen == expected.len() && buffer.is_empty())
}

proptest! {
    /// WS-1
    #[test]
    fn however_the_bytes_are_cut_the_requests_are_the_same(
        requests in vec(sent(), 0..8),
        cuts in vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let mut stream = GREETING.to_vec();
        for request in &requests { request.encode(&mut stream); }
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len())).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let pieces: Vec<_> = cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parse(&pieces, &requests), Ok(true));
    }

    #[test]
    fn random_bytes_are_requests_or_an_error_but_never_a_panic(
        is_greeted in any::<bool>(),
        stream in vec(prop_oneof![0..20_u8, any::<u8>()], 0..300),
        step in 1..50_usize,
    ) {
        let mut parser = Parser::default();
        let mut buffer = if is_greeted { GREETING.to_vec() } else { Vec::new() };
        'fed: for piece in stream.chunks(step) {
            buffer.extend_from_slice(piece);
            let mut used = 0;
            loop {
                match parser.next(&buffer[used..]) {
                    Ok(Some((_, length))) => used += length,
                    Ok(None) => break,
                    Err(_) => break 'fed,
                }
            }
            buffer.drain(..used);
        }
    }
}

#[test]
fn one_byte_at_a_time_is_enough() {
    let requests = [Sent::Pairs(vec![(b"k".to_vec(), b"v".to_vec()); 3]), Sent::Plain(7)];
    let mut stream = GREETING.to_vec();
    for request in &requests {
        request.encode(&mut stream);
    }
    assert_eq!(parse(&stream.chunks(1).collect::<Vec<_>>(), &requests), Ok(true));
}

fn error(stream: &[u8]) -> Option<WireError> {
    let greeted = [&GREETING, stream].concat();
    let mut parser = Parser::default();
    let (_, length) = parser.next(&greeted).unwrap().unwrap();
    parser.next(&greeted[length..]).err()
}

#[test]
fn a_stranger_is_known_by_its_first_wrong_byte() {
    for stream in [&b"G"[..], b"\x01", b"\0\0", b"\0\xCE\xF7\x85\x3D"] {
        assert_eq!(Parser::default().next(stream), Err(WireError::Stranger), "{stream:?}");
    }
    for length in 0..GREETING.len() {
        assert_eq!(Parser::default().next(&GREETING[..length]), Ok(None));
    }
    assert_eq!(error(b"\0\0\0\0\0"), Some(WireError::Stranger));
}

#[test]
fn what_is_too_long_is_refused_by_its_length_alone() {
    let with = |opcode: u8, numbers: &[u64]| {
        let mut stream = vec![opcode];
        for number in numbers {
            stream.extend(number.to_le_bytes());
        }
        error(&stream)
    };
    assert_eq!(with(3, &[MAX_KEY + 1]), Some(WireError::Key(MAX_KEY + 1)));
    assert_eq!(with(3, &[MAX_KEY]), None);
    assert_eq!(with(1, &[0, MAX_VALUE + 1]), Some(WireError::Value(MAX_VALUE + 1)));
    assert_eq!(with(1, &[0, u64::MAX]), Some(WireError::Value(u64::MAX)));
    assert_eq!(with(6, &[MAX_KEYS + 1]), Some(WireError::Keys(MAX_KEYS + 1)));
    assert_eq!(with(11, &[MAX_KEYS, 0, MAX_VALUE]), None);
    assert_eq!(error(&[19]), Some(WireError::Opcode(19)));
}

#[test]
fn a_request_has_a_limit_as_a_whole() {
    let mut stream = vec![11];
    stream.extend(MAX_KEYS.to_le_bytes());
    let value = vec![0; usize::try_from(MAX_VALUE).unwrap()];
    for _ in 0..16 {
        put_bytes(&mut stream, b"");
        put_bytes(&mut stream, &value);
    }
    assert_eq!(error(&stream), Some(WireError::Long));
}
