//! Access to the store: proofs that a peer knows a token, and scopes.
//!
//! A token is optional. If the store has one, each side proves that it knows the token, without sending it.
//!
//! A scope is a key prefix. A session with a scope may use only keys with this prefix. Each scope has its own token. A
//! client with that token can open only sessions with that scope. The token of a scope is derived from the store's
//! token. Therefore the store needs no list of scopes, and anyone who has the store's token can create a scope.
//!
//! - **SCOPE-1** a session with a scope cannot read, write or watch a key outside of the scope;
//! - **SCOPE-2** the token of a scope reveals neither the store's token nor the token of another scope.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::protocol::{Digest, Request};
use crate::secrets::{hex, keyed};
use crate::types::{Compare, Op, Txn};

/// Side of the connection that proves its knowledge of the token. The proof includes the side, because a peer could
/// otherwise send a proof back to the side that computed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// The client answers the store's challenge.
    Client,
    /// The store answers the client's challenge.
    Store,
}

fn mac(token: &[u8], challenge: &Digest, run_id: &str, direction: Direction) -> Hmac<Sha256> {
    let mut mac = keyed(token);
    // Hash a constant before the challenge. Without it, the peer, which chooses the challenge, could choose one for
    // which the proof is equal to the token of a scope.
    mac.update(b"proof\0");
    mac.update(challenge);
    mac.update(run_id.as_bytes());
    mac.update(match direction {
        Direction::Client => b"client",
        Direction::Store => b"store",
    });
    mac
}

/// Returns the keyed hash (MAC) that answers a peer's challenge, and so proves that this side knows the token.
pub(super) fn proof(token: &[u8], challenge: &Digest, run_id: &str, direction: Direction) -> Digest {
    mac(token, challenge, run_id, direction).finalize().into_bytes().into()
}

/// Returns true if the peer's answer to a challenge was made with this token. Compares in constant time.
pub(super) fn is_proof(answer: &Digest, token: &[u8], challenge: &Digest, run_id: &str, direction: Direction) -> bool {
    mac(token, challenge, run_id, direction).verify_slice(answer).is_ok()
}

/// Derives the token for a scope (a key prefix) from the store's token. Returns it as hexadecimal text.
pub fn scoped_token(token: &[u8], scope: &str) -> String {
    let mut mac = keyed(token);
    // Hash a constant first, to keep scope tokens different from handshake proofs, which are computed with the same key
    // but start with another constant.
    mac.update(b"scope\0");
    mac.update(scope.as_bytes());
    hex(&mac.finalize().into_bytes())
}

/// Returns true if all keys in a request start with the prefix `scope`. Without a scope, all keys are allowed.
pub(super) fn allows(scope: Option<&str>, request: &Request) -> bool {
    let is_within = |key: &str| scope.is_none_or(|prefix| key.starts_with(prefix));
    match request {
        Request::Txn { txn: Txn { compares, then, otherwise }, .. } => {
            compares.iter().all(|compare| is_within(key_of(compare)))
                && then.iter().chain(otherwise).all(|op| match op {
                    Op::Put { key, .. } | Op::Delete(key) | Op::Get(key) => is_within(key),
                    Op::DeletePrefix(prefix) | Op::Range { prefix, .. } => is_within(prefix),
                    Op::Predecessor { prefix, key } => is_within(prefix) && is_within(key),
                })
        }
        Request::Watch { watch, .. } => is_within(&watch.prefix),
        Request::Hello(_) | Request::Prove { .. } | Request::Unwatch(_) | Request::KeepAlive { .. } => true,
    }
}

fn key_of(compare: &Compare) -> &str {
    match compare {
        Compare::Exists(key)
        | Compare::Missing(key)
        | Compare::Create(key, _)
        | Compare::Mod(key, _)
        | Compare::Value(key, _) => key,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::secrets::random;
    use crate::types::Watch;

    #[test]
    fn a_proof_is_bound_to_token_challenge_run_and_direction() {
        let challenge = random().unwrap();
        let answer = proof(b"secret", &challenge, "run", Direction::Client);
        assert!(is_proof(&answer, b"secret", &challenge, "run", Direction::Client));
        assert!(!is_proof(&answer, b"Secret", &challenge, "run", Direction::Client));
        assert!(!is_proof(&answer, b"secret", &[0; 32], "run", Direction::Client));
        assert!(!is_proof(&answer, b"secret", &challenge, "ruN", Direction::Client));
        assert!(!is_proof(&answer, b"secret", &challenge, "run", Direction::Store));
    }

    #[test]
    fn the_digest_is_hmac_sha256() {
        // Expected digest, computed with Python's `hmac` module. The key is `token`. The message is `proof` and a zero
        // byte, 32 bytes with the value 7, then `run`, then `client`.
        let answer = proof(b"token", &[7; 32], "run", Direction::Client);
        let known = [
            0xa8, 0x8d, 0x94, 0xc2, 0xa7, 0x0c, 0x09, 0x95, 0xe7, 0x3d, 0xf2, 0x9e, 0x70, 0xe4, 0x26, 0xa6, 0x73, 0x76,
            0x38, 0x9b, 0x90, 0x81, 0x1a, 0x7f, 0x11, 0xac, 0xd0, 0xa2, 0x5e, 0xea, 0x0b, 0xef,
        ];
        assert_eq!(answer, known);
    }

    /// Returns test requests, one for each request field that can hold a key or a prefix. In each request, one field is
    /// set to `key`. All other keys are inside the allowed key prefix.
    fn requests(key: &str) -> Vec<Request> {
        let (name, inside): (Arc<str>, Arc<str>) = (key.into(), "/own/x".into());
        let compares = [
            Compare::Exists(name.clone()),
            Compare::Missing(name.clone()),
            Compare::Create(name.clone(), 0),
            Compare::Mod(name.clone(), 0),
            Compare::Value(name.clone(), vec![]),
        ];
        let ops = [
            Op::Put { key: name.clone(), value: Arc::from([]), leased: false },
            Op::Delete(name.clone()),
            Op::DeletePrefix(name.clone()),
            Op::Get(name.clone()),
            Op::Range { prefix: name.clone(), limit: 0 },
            Op::Predecessor { prefix: name.clone(), key: inside.clone() },
            Op::Predecessor { prefix: inside.clone(), key: name.clone() },
        ];
        let harmless = Op::Get(inside);
        let mut txns: Vec<Txn> =
            compares.map(|compare| Txn { compares: vec![compare], ..Txn::default() }).into_iter().collect();
        for op in ops {
            txns.push(Txn { then: vec![harmless.clone(), op.clone()], ..Txn::default() });
            txns.push(Txn { otherwise: vec![harmless.clone(), op], ..Txn::default() });
        }
        let mut found: Vec<Request> = txns.into_iter().map(|txn| Request::Txn { tag: 1, txn }).collect();
        for exact in [false, true] {
            let watch = Watch { prefix: name.clone(), exact };
            found.push(Request::Watch { tag: 1, watch, snapshot: true });
        }
        found
    }

    proptest! {
        #[test]
        fn a_request_is_allowed_only_if_all_its_keys_start_with_the_scope(key in "(/own|/ow|x)?[/a-z]{0,3}") {
            for request in requests(&key) {
                prop_assert_eq!(allows(Some("/own/"), &request), key.starts_with("/own/"), "{:?}", request);
                prop_assert!(allows(None, &request));
            }
        }
    }

    #[test]
    fn each_scope_has_a_token_of_its_own() {
        let tokens = ["", "a", "b", "ab"].map(|scope| scoped_token(b"secret", scope));
        let unique: std::collections::HashSet<_> = tokens.iter().collect();
        assert_eq!(unique.len(), tokens.len());
        assert!(tokens.iter().all(|token| token.len() == 64));
    }
}
