//! Functions for secrets: HMACs, random bytes, and a comparison in constant time. They are used by the coordination
//! store and by the etcd client.

use std::fmt::Write;

use hmac::{Hmac, KeyInit};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

/// Starts the computation of an HMAC-SHA256 with this token as the key.
pub(crate) fn keyed(token: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(token).expect("HMAC takes a key of any length")
}

/// Returns unpredictable bytes, for use as a challenge, as a secret, or as the ID of a store.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// Returns the bytes as hexadecimal text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns true if two secrets are equal. Compares in constant time.
pub(crate) fn is_same(one: &[u8], other: &[u8]) -> bool {
    one.ct_eq(other).into()
}
