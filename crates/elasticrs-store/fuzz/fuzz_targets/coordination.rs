#![no_main]
//! Bytes from a stranger: cut into frames, decoded, and encoded again.

use elasticrs_store::coordination::protocol::{Answer, Request};
use elasticrs_store::coordination::wire::{Frames, MAGIC, MAX_REQUEST};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut frames = Frames::new(MAX_REQUEST);
    frames.feed(&MAGIC);
    for chunk in data.chunks(7) {
        frames.feed(chunk);
        while let Ok(Some(frame)) = frames.cut() {
            if let Ok(request) = Request::decode(frame) {
                assert_eq!(&request.encode()[4..], frame);
            }
            if let Ok(answer) = Answer::decode(frame) {
                assert_eq!(Answer::decode(&answer.encode()[4..]), Ok(answer));
            }
        }
    }
});
