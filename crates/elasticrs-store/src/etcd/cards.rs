//! Encodes and decodes the data with which sessions connect to each other: the entry that each session publishes in
//! etcd, and the first message on a connection. All functions are pure.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use super::mapping::{Keys, Region, signed};
use super::messages as pb;
use crate::secrets::{hex, keyed};

/// Prefix of the keys under which sessions publish their contact entries ([`Card`]). It is relative to the store's
/// prefix, and sorts after all keys of users.
const CARDS: &str = "~sessions/links/";
/// Secret that identifies a session to its peers. It is stored in etcd, so only programs that can read etcd know it.
pub(super) type Nonce = [u8; 16];
/// Secret that an agent sends to its peers to end a session. It is sent after all processes that depend on the session
/// have exited.
pub(super) type LastWord = [u8; 32];
/// SHA-256 hash of a [`LastWord`].
pub(super) type Seal = [u8; 32];

/// Returns the hash of a session's [`LastWord`], the secret that announces the end of the session. The session
/// publishes the hash in etcd.
pub(super) fn seal_of(word: &LastWord) -> Seal {
    Sha256::digest(word).into()
}

/// Entry in etcd that tells other sessions how to connect to a session and how to verify it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) lease: i64,
    pub(super) nonce: Nonce,
    pub(super) port: u16,
    /// Hash of the session's [`LastWord`], the secret that announces the end of the session. Other sessions use the
    /// hash to verify the secret that they receive.
    pub(super) seal: Seal,
    /// Host names or addresses of the machine that the session runs on.
    pub(super) hosts: Vec<String>,
}

impl Card {
    /// Encodes the entry as text for etcd: port, nonce, hash and hosts, separated by spaces.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (nonce, seal) = (hex(&self.nonce), hex(&self.seal));
        format!("{} {nonce} {seal} {}", self.port, self.hosts.join(" ")).into_bytes()
    }

    /// Decodes a session's contact entry in etcd. Returns `None` if the bytes are invalid, because other programs may
    /// also write to etcd.
    pub(super) fn decode(lease: i64, value: &[u8]) -> Option<Self> {
        let mut words = str::from_utf8(value).ok()?.split(' ');
        let port = words.next()?.parse().ok()?;
        let nonce = unhex(words.next()?)?;
        let seal = unhex(words.next()?)?;
        Some(Self {
            lease,
            nonce,
            port,
            seal,
            hosts: words.filter(|word| !word.is_empty()).map(str::to_owned).collect(),
        })
    }
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Length of [`Hello::encode`] in bytes.
pub(super) const HELLO: usize = MAGIC.len() + 8 + 16 + 32;
const MAGIC: [u8; 8] = *b"\x93ERSLNK\x02";

/// First message on a link, sent by the session that opens it. The other session answers with its own nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) lease: i64,
    pub(super) nonce: Nonce,
}

impl Hello {
    /// Encodes the message for the session with the nonce `peer`. The message ends with a proof that the sender knows
    /// this nonce. The proof does not reveal the nonce.
    pub(super) fn encode(&self, peer: &Nonce) -> Vec<u8> {
        let proof = self.mac(peer).finalize().into_bytes();
        [&MAGIC[..], &self.lease.to_be_bytes(), &self.nonce, &proof].concat()
    }

    /// Decodes a message for the session with the nonce `own`. Returns `None` if the bytes are not a hello, or if the
    /// sender does not know the nonce. Both can happen, because any program can connect.
    pub(super) fn decode(bytes: &[u8; HELLO], own: &Nonce) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (lease, rest) = rest.split_first_chunk()?;
        let (nonce, proof) = rest.split_first_chunk()?;
        let hello = Self { lease: i64::from_be_bytes(*lease), nonce: *nonce };
        // `verify_slice` compares in constant time, so its duration does not reveal the expected proof.
        hello.mac(own).verify_slice(proof).is_ok().then_some(hello)
    }

    fn mac(&self, peer: &Nonce) -> Hmac<Sha256> {
        let mut mac = keyed(peer);
        mac.update(b"link\0");
        mac.update(&self.lease.to_be_bytes());
        mac.update(&self.nonce);
        mac
    }
}

impl Keys {
    fn card(&self, scope: &str, lease: i64) -> Vec<u8> {
        self.full(&format!("{CARDS}{scope}/{lease:016x}"))
    }

    /// Returns the request that publishes a session's contact entry ([`Card`]) in etcd. etcd deletes the entry when the
    /// session's lease expires or is revoked.
    pub(super) fn put_card(&self, scope: &str, card: &Card) -> pb::PutRequest {
        let (key, lease) = (self.card(scope, card.lease), card.lease);
        pb::PutRequest { key, value: card.encode(), lease, ..pb::PutRequest::default() }
    }

    /// Returns the request that reads a session's contact entry ([`Card`]) from etcd.
    pub(super) fn get_card(&self, scope: &str, lease: i64) -> pb::RangeRequest {
        Region::key(self.card(scope, lease)).range()
    }

    /// Returns the request that reads the newest session contact entry ([`Card`]) with a creation revision below
    /// `created`.
    pub(super) fn card_before(&self, scope: &str, created: u64) -> pb::RangeRequest {
        pb::RangeRequest {
            limit: 1,
            sort_order: pb::SortOrder::Descend.into(),
            sort_target: pb::SortTarget::Create.into(),
            max_create_revision: signed(created) - 1,
            ..self.under(&format!("{CARDS}{scope}/")).range()
        }
    }

    /// Returns the session's contact entry ([`Card`]) that etcd's answer contains. `None` if there is none, or if it is
    /// invalid.
    pub(super) fn card_of(&self, scope: &str, answer: &pb::RangeResponse) -> Option<Card> {
        let found = answer.kvs.first()?;
        let lease = found.key.strip_prefix(&self.full(&format!("{CARDS}{scope}/"))[..])?;
        Card::decode(i64::from_str_radix(str::from_utf8(lease).ok()?, 16).ok()?, &found.value)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys() -> Keys {
        Keys { prefix: "/site".into(), lease: 7, job_lease: 0 }
    }

    proptest! {
        #[test]
        fn a_card_is_read_back_unchanged(
            lease in 1..=i64::MAX, nonce: Nonce, port: u16, seal: Seal, hosts in prop::collection::vec("[a-z0-9.:-]{1,20}", 0..3),
        ) {
            let card = Card { lease, nonce, port, seal, hosts };
            let put = keys().put_card("job", &card);
            let kvs = vec![pb::KeyValue { key: put.key, value: put.value, ..pb::KeyValue::default() }];
            let answer = pb::RangeResponse { kvs, ..pb::RangeResponse::default() };
            prop_assert_eq!(keys().card_of("job", &answer), Some(card));
            prop_assert_eq!(keys().card_of("another", &answer), None);
        }

        #[test]
        fn a_card_decoded_from_random_bytes_encodes_to_the_same_card(lease: i64, value: Vec<u8>) {
            if let Some(card) = Card::decode(lease, &value) {
                prop_assert_eq!(Card::decode(lease, &card.encode()), Some(card));
            }
        }

        #[test]
        fn a_hello_is_decoded_unchanged_and_a_wrong_bit_is_noticed(lease: i64, nonce: Nonce, peer: Nonce, at in 0..HELLO) {
            let hello = Hello { lease, nonce };
            let mut bytes: [u8; HELLO] = hello.encode(&peer).try_into().unwrap();
            prop_assert_eq!(Hello::decode(&bytes, &peer), Some(hello));
            let mut other = peer;
            other[at % other.len()] ^= 1;
            prop_assert_eq!(Hello::decode(&bytes, &other), None);
            bytes[at] ^= 1;
            prop_assert_eq!(Hello::decode(&bytes, &peer), None);
        }
    }
}
