//! Workers that keep their state in memory (`elasticrs.Keep`): reads their notices, and orders them to copy their states.
//!
//! The notices arrive at the same socket as those of uncaught exceptions. An order is a datagram to a socket of the
//! worker. Sending it never waits.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use nix::sys::socket::{MsgFlags, UnixAddr, sendto};

use crate::supervisor::state::Input;

/// Datagram that orders a worker to copy its state.
const ORDER: &[u8] = b"keep";

/// Longest time that a worker may announce for a copy.
const LONGEST_COPY: Duration = Duration::from_secs(3600);

/// A notice about a worker's state. `python/elasticrs/_engine/inside/keep` sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeepNotice {
    /// The worker keeps its state. `name` is the abstract address of its socket for orders. `pace` is the time that a
    /// copy is expected to take.
    Joined { name: Vec<u8>, pace: Duration },
    /// The worker no longer keeps its state.
    Left,
    /// The worker has copied its state after an order, or cannot copy it.
    Answered,
}

impl KeepNotice {
    /// Parses a datagram. Returns `None` if it is not a notice about a worker's state.
    pub(super) fn of(said: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(said).ok()?.split(' ');
        if words.next()? != "keep" {
            return None;
        }
        let notice = match words.next()? {
            "left" => Self::Left,
            "answered" => Self::Answered,
            "joined" => {
                let (name, pace) = (bytes_of_hex(words.next()?)?, words.next()?.parse().ok()?);
                Self::Joined { name, pace: Duration::from_millis(pace).min(LONGEST_COPY) }
            }
            _ => return None,
        };
        words.next().is_none().then_some(notice)
    }
}

fn bytes_of_hex(digits: &str) -> Option<Vec<u8>> {
    let is_hex = digits.len().is_multiple_of(2) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).ok();
    if is_hex { (0..digits.len()).step_by(2).map(byte).collect() } else { None }
}

/// The workers of a group that keep their states.
#[derive(Debug, Default)]
pub(super) struct Keepers {
    /// Local rank of each such worker, with the address of its socket for orders.
    addresses: Vec<(u32, UnixAddr)>,
    /// Time of the order. Zero before it.
    ordered: Stamp,
    /// Workers that could not be reached.
    unreachable: Vec<u32>,
}

impl Keepers {
    /// Records a notice of a worker. Returns the input for the group's state machine; `None` if the address in the
    /// notice is invalid.
    pub(super) fn input(&mut self, local_rank: u32, notice: KeepNotice) -> Option<Input> {
        match notice {
            KeepNotice::Joined { name, pace } => {
                self.addresses.retain(|(other, _)| *other != local_rank);
                self.addresses.push((local_rank, UnixAddr::new_abstract(&name).ok()?));
                Some(Input::Keeper { local_rank, pace: Some(pace) })
            }
            KeepNotice::Left => Some(Input::Keeper { local_rank, pace: None }),
            KeepNotice::Answered => Some(Input::Copied { local_rank }),
        }
    }

    /// Orders workers to copy their states, through the socket for notices.
    pub(super) fn order(&mut self, local_ranks: &[u32], socket: Option<BorrowedFd<'_>>) {
        self.ordered = Stamp::now();
        for &local_rank in local_ranks {
            let address = self.addresses.iter().find(|(other, _)| *other == local_rank);
            let is_sent = socket.zip(address).is_some_and(|(socket, (_, address))| {
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                sendto(socket.as_raw_fd(), ORDER, address, flags).is_ok()
            });
            if !is_sent {
                self.unreachable.push(local_rank);
            }
        }
    }

    /// Returns the time of the order.
    pub(super) fn ordered(&self) -> Stamp {
        self.ordered
    }

    /// Returns the workers that could not be reached, once.
    pub(super) fn take_unreachable(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unreachable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_notices_are_understood() {
        let pace = Duration::from_millis(250);
        let joined = KeepNotice::Joined { name: b"\x00ab".to_vec(), pace };
        let longest = KeepNotice::Joined { name: b"a".to_vec(), pace: LONGEST_COPY };
        let cases: [(&[u8], Option<KeepNotice>); 14] = [
            (b"keep joined 006162 250", Some(joined)),
            (b"keep joined 61 18446744073709551615", Some(longest)),
            (b"keep left", Some(KeepNotice::Left)),
            (b"keep answered", Some(KeepNotice::Answered)),
            (b"keep", None),
            (b"keep left now", None),
            (b"keep joined", None),
            (b"keep joined 6 250", None),
            (b"keep joined +1 250", None),
            (b"keep joined \xc3\xa9 250", None),
            (b"keep joined 61 -1", None),
            (b"keep joined 61 250 1", None),
            (b"12 own\nkeep left", None),
            (b"\xff", None),
        ];
        for (said, expected) in cases {
            assert_eq!(KeepNotice::of(said), expected, "{}", String::from_utf8_lossy(said));
        }
    }

    #[test]
    fn a_worker_that_cannot_be_reached_is_returned_once() {
        let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
        let mut keepers = Keepers::default();
        let joined = |name: &[u8]| KeepNotice::Joined { name: name.to_vec(), pace: Duration::ZERO };
        assert!(keepers.input(0, joined(b"elasticrs-no-such-socket")).is_some());
        assert_eq!(keepers.input(1, joined(&[b'x'; 4096])), None);
        keepers.order(&[0, 1], Some(std::os::fd::AsFd::as_fd(&socket)));
        assert_eq!((keepers.take_unreachable(), keepers.take_unreachable()), (vec![0, 1], vec![]));
    }
}
