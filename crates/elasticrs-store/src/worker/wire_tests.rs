//! Tests of the parser. They encode the requests independently of the code under test.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const GREETING: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];

/// A request to send: an opcode, keys and values, and in some requests a number.
#[derive(Debug, Clone, PartialEq)]
struct Sent {
    opcode: u8,
    fields: Vec<Vec<u8>>,
    number: Option<i64>,
}

impl Sent {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.opcode);
        match self.opcode {
            5 | 6 | 10 => put_number(out, i64::try_from(self.fields.len()).unwrap()),
            11 => put_number(out, i64::try_from(self.fields.len() / 2).unwrap()),
            _ => {}
        }
        self.fields.iter().for_each(|field| put_bytes(out, field));
        match (self.opcode, self.number) {
            (13, Some(nonce)) => out.extend(u32::try_from(nonce).unwrap().to_le_bytes()),
            (_, Some(number)) => put_number(out, number),
            (_, None) => {}
        }
    }

    fn of(request: Request<'_>) -> Self {
        let (opcode, fields, number) = match request {
            Request::Validate => panic!("it comes first, and once"),
            Request::Set { key, value } => (1, vec![key, value], None),
            Request::CompareSet { key, expected, desired } => (2, vec![key, expected, desired], None),
            Request::Get(key) => (3, vec![key], None),
            Request::Add { key, delta } => (4, vec![key], Some(delta)),
            Request::Check(keys) => (5, keys.collect(), None),
            Request::Wait(keys) => (6, keys.collect(), None),
            Request::NumKeys => (7, vec![], None),
            Request::Delete(key) => (8, vec![key], None),
            Request::Append { key, value } => (9, vec![key, value], None),
            Request::MultiGet(keys) => (10, keys.collect(), None),
            Request::MultiSet(pairs) => (11, pairs.flat_map(|(key, value)| [key, value]).collect(), None),
            Request::CancelWait => (12, vec![], None),
            Request::Ping(nonce) => (13, vec![], Some(nonce.into())),
            Request::QueuePush { key, value } => (14, vec![key, value], None),
            Request::QueuePop(key) => (15, vec![key], None),
            Request::QueueLen(key) => (16, vec![key], None),
            Request::ListKeys => (17, vec![], None),
            Request::Barrier { key, size } => (18, vec![key], Some(size)),
        };
        Self { opcode, fields: fields.into_iter().map(<[u8]>::to_vec).collect(), number }
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    let bytes = prop_oneof![4 => vec(any::<u8>(), 0..12), 1 => vec(any::<u8>(), 1000..3000)];
    (1..19_u8, vec(bytes, 3..8), any::<i64>()).prop_map(|(opcode, mut fields, number)| {
        fields.truncate(match opcode {
            7 | 12 | 13 | 17 => 0,
            1 | 9 | 14 => 2,
            2 => 3,
            5 | 6 | 10 => fields.len() - 3,
            11 => (fields.len() - 3) / 2 * 2,
            _ => 1,
        });
        let number = match opcode {
            4 | 18 => Some(number),
            13 => Some(number & i64::from(u32::MAX)),
            _ => None,
        };
        Sent { opcode, fields, number }
    })
}

/// Passes pieces of a byte stream to a parser, one at a time. Returns `Ok(true)` if the parsed requests equal the
/// expected ones.
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
                if expected.get(seen) != Some(&Sent::of(request)) {
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
    /// WS-1: the parsed requests do not depend on how the bytes are split.
    #[test]
    fn the_requests_do_not_depend_on_how_the_bytes_are_split(
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
        let bytes: Vec<_> = stream.chunks(1).take(500).chain(stream.get(500..)).collect();
        prop_assert_eq!(parse(&bytes, &requests), Ok(true));
    }

    #[test]
    fn random_bytes_are_parsed_or_refused_without_a_panic(
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

fn error(stream: &[u8]) -> Option<WireError> {
    let greeted = [&GREETING, stream].concat();
    let mut parser = Parser::default();
    let (_, length) = parser.next(&greeted).unwrap().unwrap();
    parser.next(&greeted[length..]).err()
}

#[test]
fn a_client_of_another_protocol_is_detected_by_its_first_wrong_byte() {
    for stream in [&b"G"[..], b"\x01", b"\0\0", b"\0\xCE\xF7\x85\x3D"] {
        assert_eq!(Parser::default().next(stream), Err(WireError::Stranger), "{stream:?}");
    }
    for length in 0..GREETING.len() {
        assert_eq!(Parser::default().next(&GREETING[..length]), Ok(None));
    }
    assert_eq!(error(b"\0\0\0\0\0"), Some(WireError::Stranger));
}

#[test]
fn a_key_or_value_that_is_too_long_is_refused_by_its_length_field() {
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
fn the_total_length_of_a_request_is_limited() {
    let mut stream = vec![11];
    stream.extend(MAX_KEYS.to_le_bytes());
    let value = vec![0; usize::try_from(MAX_VALUE).unwrap()];
    for _ in 0..16 {
        put_bytes(&mut stream, b"");
        put_bytes(&mut stream, &value);
    }
    assert_eq!(error(&stream), Some(WireError::Long));
}
