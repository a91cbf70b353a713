use proptest::collection::vec;
use proptest::prelude::*;

use super::super::state::tests::{a_txn, a_watch};
use super::*;

fn a_digest() -> impl Strategy<Value = Option<Digest>> {
    prop::option::of(any::<Digest>())
}

fn a_pace() -> impl Strategy<Value = Pace> {
    any::<(u32, u32)>().prop_map(|(interval_ms, ttl_ms)| Pace { interval_ms, ttl_ms })
}

fn an_entry() -> impl Strategy<Value = Entry> {
    ("[a-zé/]{0,9}", vec(any::<u8>(), 0..9), any::<(u64, u64)>()).prop_map(|(key, value, revisions)| Entry {
        key: key.into(),
        value: value.into(),
        create_revision: revisions.0,
        mod_revision: revisions.1,
    })
}

fn a_change() -> impl Strategy<Value = Change> {
    (an_entry(), any::<bool>()).prop_map(|(entry, is_put)| Change {
        key: entry.key,
        value: is_put.then_some(entry.value),
        create_revision: entry.create_revision,
        mod_revision: entry.mod_revision,
    })
}

fn a_result() -> impl Strategy<Value = OpResult> {
    prop_oneof![
        any::<u64>().prop_map(OpResult::Count),
        prop::option::of(an_entry()).prop_map(OpResult::Entry),
        vec(an_entry(), 0..4).prop_map(OpResult::Entries),
    ]
}

fn a_request() -> impl Strategy<Value = Request> {
    let back = (prop::option::of(any::<(u64, Secret)>()), prop::option::of(any::<StoreId>()));
    let hello = (any::<(u16, u16)>(), "[a-z]{0,9}", any::<(u32, u16)>(), any::<Digest>(), back);
    prop_oneof![
        hello.prop_map(|(version, run_id, (interval_ms, attempts), challenge, (resume, confirmed))| {
            Request::Hello(Hello { version, run_id, interval_ms, attempts, challenge, resume, confirmed })
        }),
        (any::<Digest>(), prop::option::of("[a-z/]{0,9}"))
            .prop_map(|(proof, scope)| Request::Prove { proof, scope: scope.map(Into::into) }),
        (any::<u64>(), a_txn()).prop_map(|(tag, txn)| Request::Txn { tag, txn }),
        (any::<u64>(), a_watch(), any::<bool>()).prop_map(|(tag, watch, snapshot)| Request::Watch {
            tag,
            watch,
            snapshot
        }),
        a_watch().prop_map(Request::Unwatch),
        any::<u64>().prop_map(|sent| Request::KeepAlive { sent }),
    ]
}

fn an_answer() -> impl Strategy<Value = Answer> {
    let ready = (any::<(u64, u64)>(), a_pace(), a_digest(), any::<Secret>(), vec(any::<StoreId>(), 0..4));
    prop_oneof![
        (any::<(u16, u16)>(), "[a-z]{0,9}", a_digest()).prop_map(|(version, run_id, challenge)| Answer::Welcome {
            version,
            run_id,
            challenge
        }),
        ready.prop_map(|((session, revision), pace, proof, secret, ids)| Answer::Ready {
            session,
            revision,
            pace,
            proof,
            secret,
            ids
        }),
        (prop::sample::select(&LostKind::ALL[..]), "[a-z ]{0,9}")
            .prop_map(|(kind, message)| Answer::Refused { kind, message: message.into() }),
        (any::<(u64, bool, u64)>(), vec(a_result(), 0..4)).prop_map(|((tag, ok, revision), results)| Answer::Reply {
            tag,
            ok,
            revision,
            results
        }),
        (any::<u64>(), vec(a_change(), 0..4)).prop_map(|(revision, changes)| Answer::Changes { revision, changes }),
        (any::<(u64, u64)>(), a_pace()).prop_map(|((sent, wall_ns), pace)| Answer::Alive { sent, wall_ns, pace }),
    ]
}

proptest! {
    #[test]
    fn an_encoded_request_decodes_to_the_same_request(request in a_request()) {
        prop_assert_eq!(Request::decode(&request.encode()[4..]), Ok(request));
    }

    #[test]
    fn an_encoded_answer_decodes_to_the_same_answer(answer in an_answer()) {
        prop_assert_eq!(Answer::decode(&answer.encode()[4..]), Ok(answer));
    }

    #[test]
    fn a_truncated_or_extended_message_is_refused(request in a_request(), answer in an_answer(), cut in any::<prop::sample::Index>()) {
        let frame = &request.encode()[4..];
        prop_assert!(Request::decode(&frame[..cut.index(frame.len())]).is_err());
        prop_assert!(Request::decode(&[frame, &[0]].concat()).is_err());
        let frame = &answer.encode()[4..];
        prop_assert!(Answer::decode(&frame[..cut.index(frame.len())]).is_err());
    }

    #[test]
    fn random_bytes_decode_to_a_message_or_an_error(kind in prop_oneof![0..8_u8, 0x80..0x88_u8], bytes in vec(any::<u8>(), 0..200)) {
        let frame = [&[kind], &bytes[..]].concat();
        let _ = Request::decode(&frame).map(|request| assert_eq!(request.encode()[4..], frame));
        let _ = Answer::decode(&frame).map(|answer| answer.encode());
        let _ = Request::version_of(&frame);
    }

    #[test]
    fn decoding_a_message_with_a_wrong_byte_does_not_panic(request in a_request(), at in any::<prop::sample::Index>(), byte: u8) {
        let mut frame = request.encode()[4..].to_vec();
        let at = at.index(frame.len());
        frame[at] = byte;
        let _ = Request::decode(&frame);
    }
}

#[test]
fn a_list_longer_than_its_frame_is_refused() {
    let mut frame = vec![0x03];
    frame.extend([0; 8]);
    frame.extend(u32::MAX.to_le_bytes());
    assert_eq!(Request::decode(&frame), Err(Malformed("a list is longer than its frame")));
}

#[test]
fn error_kinds_keep_their_codes() {
    for (code, kind) in LostKind::ALL.into_iter().enumerate() {
        assert_eq!((usize::from(kind.code()), LostKind::of_code(kind.code())), (code, kind));
    }
    assert_eq!(LostKind::of_code(200), LostKind::Protocol);
}
