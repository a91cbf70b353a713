//! Whatever bytes two connections send, however they are cut: no panic, the limit holds, and the cut does not matter.
#![no_main]

use elasticrs_store::worker::map::Map;
use elasticrs_store::worker::wire::{MAX_MESSAGE, Parser};
use libfuzzer_sys::fuzz_target;

const LIMIT: usize = 1 << 20;
const GREETING: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];

/// One connection of the two, as the server treats it.
#[derive(Default)]
struct Connection {
    parser: Parser,
    unparsed: Vec<u8>,
    out: Vec<u8>,
    is_closed: bool,
}

/// Feeds each piece to the connection that its number names; returns what each of them got.
fn play(pieces: &[(usize, &[u8])], step: usize) -> [(Vec<u8>, bool); 2] {
    let mut map = Map::new(LIMIT);
    let mut connections = [Connection::default(), Connection::default()];
    for connection in &mut connections {
        connection.unparsed.extend(GREETING);
    }
    for (number, piece) in pieces {
        for part in piece.chunks(step) {
            connections[*number].unparsed.extend_from_slice(part);
            run(&mut map, &mut connections, *number);
        }
    }
    assert!(map.budget().used() <= LIMIT);
    connections.map(|connection| (connection.out, connection.is_closed))
}

fn run(map: &mut Map, connections: &mut [Connection; 2], number: usize) {
    let mut unparsed = std::mem::take(&mut connections[number].unparsed);
    let mut used = 0;
    let mut woken = Vec::new();
    while !connections[number].is_closed {
        let connection = &mut connections[number];
        match connection.parser.next(&unparsed[used..]) {
            Ok(None) => break,
            Err(_) => connection.is_closed = true,
            Ok(Some((request, length))) => {
                used += length;
                let before = connection.out.len();
                match map.apply(number as u64, &request, &mut connection.out, &mut woken) {
                    Ok(()) => assert!(connection.out.len() - before <= MAX_MESSAGE),
                    Err(_) => connection.is_closed = true,
                }
            }
        }
        for id in woken.drain(..) {
            connections[usize::try_from(id).expect("0 or 1")].out.push(0);
        }
        if connections[number].is_closed {
            map.stop_waiting(number as u64);
        }
    }
    unparsed.drain(..used);
    connections[number].unparsed = unparsed;
}

fuzz_target!(|data: &[u8]| {
    let Some((&step, data)) = data.split_first() else { return };
    // A byte of 255 hands over to the other connection.
    let pieces: Vec<_> = data.split(|byte| *byte == 255).enumerate().map(|(at, piece)| (at % 2, piece)).collect();
    let whole = play(&pieces, usize::MAX);
    let cut = play(&pieces, usize::from(step % 16) + 1);
    // The order of the keys in a list is not the same for two maps, but its length is.
    assert_eq!(whole.map(|(out, closed)| (out.len(), closed)), cut.map(|(out, closed)| (out.len(), closed)));
});
