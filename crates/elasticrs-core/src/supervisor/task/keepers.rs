//! Communication with workers that use `elasticrs.Keep`. Such a worker can copy its training state into memory of the
//! agent.
//!
//! The worker sends notices to the agent's socket, which also receives the notices of uncaught exceptions. Before the
//! agent stops the worker, it sends an order to the worker's own socket: the worker is to copy its state now. Sending an
//! order never blocks.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use elasticrs_sys::clock::Stamp;
use nix::sys::socket::{MsgFlags, UnixAddr, sendto};

use crate::supervisor::state::Input;

/// Datagram that orders a worker to copy its state.
const ORDER: &[u8] = b"keep";

/// Upper limit of the copy time that a worker can announce. A longer time is cut to it.
const LONGEST_COPY: Duration = Duration::from_secs(3600);

/// A notice that a worker sends to the agent. The Python code that sends it is in
/// `python/elasticrs/_engine/inside/keep`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeepNotice {
    /// From now on, the worker can copy its state when it is ordered to. `name` is the abstract address of the socket at
    /// which the worker receives orders. `pace` is the time that a copy is expected to take.
    Joined { name: Vec<u8>, pace: Duration },
    /// The worker can no longer copy its state, and needs no order.
    Left,
    /// The worker has carried out an order, or cannot carry it out.
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

/// The workers of a group that can copy their states.
#[derive(Debug, Default)]
pub(super) struct Keepers {
    /// Local rank of each of these workers, and the address of the socket at which it receives orders.
    addresses: Vec<(u32, UnixAddr)>,
    /// Time at which the orders were sent. Zero before that.
    ordered: Stamp,
    /// Local ranks of the workers to which no order could be sent.
    unreachable: Vec<u32>,
}

impl Keepers {
    /// Handles a notice that a worker has sent. Returns the corresponding input for the group's state machine. Returns
    /// `None` if the notice contains an invalid address.
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

    /// Sends each of these workers an order to copy its state. `socket` is the agent's socket from which the orders are
    /// sent.
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

    /// Returns the time at which the orders were sent.
    pub(super) fn ordered(&self) -> Stamp {
        self.ordered
    }

    /// Returns the local ranks of the workers to which no order could be sent, and forgets them.
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
