//! Runs the code of the fuzz target `timers` on random bytes and on random pieces of records.

#[path = "../fuzz/fuzz_targets/chain.rs"]
mod chain;

use proptest::prelude::*;

const PIECES: [&str; 16] = [
    "{\"version\": 1, \"pid\": 7, \"scope_id\": \"a\", \"expiration_time\": 1.7e9, \"signal\": 9}",
    "{\"version\": 1, \"pid\": 7, \"scope_id\": \"a\", \"expiration_time\": -1, \"signal\": 0}",
    "{\"version\": 1, \"pid\": 8, \"scope_id\": \"b\", \"expiration_time\": 1e400, \"signal\": 9}",
    "{\"version\": 1, \"pid\": 8, \"scope_id\": \"b\", \"expiration_time\": 2e9, \"signal\": 15, \"deadline_ns\": 5}",
    "{\"version\": 1, \"pid\": 9, \"scope_id\": \"",
    "{\"version\"",
    "\\u0061",
    "\", \"expiration_time\": ",
    "99999999999999999999999999",
    "-0.0",
    "NaN",
    ", \"signal\": -9}",
    ", \"at\": \"train.py#4\", \"start_time\": 1}",
    "\u{e9}",
    "}",
    "\n",
];

fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        3 => prop::sample::select(&PIECES[..]).prop_map(|piece| piece.as_bytes().to_vec()),
        2 => Just(b"\n".to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..9),
    ];
    prop::collection::vec(piece, 0..200).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn random_bytes_are_processed_without_a_panic(data in prop::collection::vec(any::<u8>(), 0..8192)) {
        let _ = chain::run(&data);
    }

    #[test]
    fn random_pieces_of_records_are_processed_without_a_panic(data in pieces()) {
        let _ = chain::run(&data);
    }
}

/// Checks that valid records reach the table, because the other tests would otherwise prove nothing.
#[test]
fn valid_records_reach_the_timer_table() {
    let lines =
        |numbers: &[usize]| numbers.iter().map(|number| [PIECES[*number], "\n"].concat()).collect::<Vec<_>>().concat();
    assert_eq!(chain::run(lines(&[0, 3]).as_bytes()), 2);
    assert_eq!(chain::run(lines(&[0, 0, 3, 1]).as_bytes()), 1);
    // A complete record is read even if it follows an incomplete one on the same line.
    assert_eq!(chain::run(lines(&[0]).replace('{', &format!("{}{{", PIECES[4])).as_bytes()), 1);
}

#[test]
fn a_record_after_a_very_long_line_is_read() {
    let long = PIECES[0].replace("\"a\"", &format!("\"{}\"", "a".repeat(200_000)));
    assert_eq!(chain::run(format!("{long}\n{}\n", PIECES[3]).as_bytes()), 1);
}
