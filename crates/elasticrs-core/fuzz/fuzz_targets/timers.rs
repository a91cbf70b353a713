#![no_main]
//! See [`chain`].

mod chain;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = chain::run(data);
});
