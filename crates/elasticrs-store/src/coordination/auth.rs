//! Authentication with an optional token. Each side proves that it knows the token, without sending it.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::protocol::Digest;
use crate::secrets::keyed;

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
    // Hash a constant first, because the peer chooses the challenge. Without the constant, the peer could choose one for
    // which the proof is the token of a scope.
    mac.update(b"proof\0");
    mac.update(challenge);
    mac.update(run_id.as_bytes());
    mac.update(match direction {
        Direction::Client => b"client",
        Direction::Store => b"store",
    });
    mac
}

/// Returns the MAC that answers a challenge and proves knowledge of the token.
pub(super) fn proof(token: &[u8], challenge: &Digest, run_id: &str, direction: Direction) -> Digest {
    mac(token, challenge, run_id, direction).finalize().into_bytes().into()
}

/// Returns true if the proof was made with this token. Compares in constant time.
pub(super) fn is_proof(answer: &Digest, token: &[u8], challenge: &Digest, run_id: &str, direction: Direction) -> bool {
    mac(token, challenge, run_id, direction).verify_slice(answer).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::random;

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
}
