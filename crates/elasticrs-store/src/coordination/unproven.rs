//! Limits the number of connections that have not completed the handshake. The functions do no I/O, and the caller
//! passes the current time.
//!
//! These connections have their own limit, because any program can open them without knowing the token. Connections
//! that have completed the handshake do not count towards this limit.
//!
//! - **DOOR-2** if the limit is reached, the store closes the oldest connection of the address with the most
//!   connections. Clients at other addresses are not affected;
//! - **DOOR-3** a connection has at least the duration [`LEAST`] for its handshake before it is closed to make room.
//!   Until then, new connections wait in the kernel's queue.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Upper bound of [`limit`], for stores with many clients.
const MOST: usize = 4096;
/// Lower bound of [`limit`] for stores with few clients, because many clients may connect at the same time.
const FEWEST: usize = 64;
/// Lower bound of [`limit`] if the process may open only a few file descriptors.
const LEAST_OF_ALL: usize = 16;
/// Minimum time that each connection has for its handshake. A handshake takes two round trips.
pub(super) const LEAST: Duration = Duration::from_millis(100);

/// Returns the maximum number of connections that have not completed the handshake. This is a quarter of the store's
/// maximum number of connections, but at most a quarter of its file descriptors.
pub(super) fn limit(connections: usize, descriptors: usize) -> usize {
    (connections / 4).clamp(FEWEST, MOST).min(descriptors / 4).max(LEAST_OF_ALL)
}

/// Action to take before the next connection is accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Room<T> {
    /// Accept the connection immediately.
    Free,
    /// Wait for this duration, or until a connection completes its handshake or is closed.
    After(Duration),
    /// Close this connection from this address. The connection is no longer counted.
    Close(T, IpAddr),
}

/// Connections that have not completed the handshake. `T` is the caller's handle of a connection.
#[derive(Debug)]
pub(super) struct Unproven<T> {
    next: u64,
    /// Connections by number. Connections are numbered in the order in which they were accepted.
    all: BTreeMap<u64, (T, IpAddr, Instant)>,
    by_address: HashMap<IpAddr, BTreeSet<u64>>,
    /// Addresses, sorted by their number of connections.
    counts: BTreeSet<(usize, IpAddr)>,
}

impl<T> Default for Unproven<T> {
    fn default() -> Self {
        Self { next: 0, all: BTreeMap::new(), by_address: HashMap::new(), counts: BTreeSet::new() }
    }
}

impl<T> Unproven<T> {
    /// Returns the number for the next connection. Pass this number to [`Self::add`].
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn add(&mut self, number: u64, connection: T, address: IpAddr, now: Instant) {
        let address = network(address);
        self.all.insert(number, (connection, address, now));
        self.change(address, |numbers| numbers.insert(number));
    }

    /// Removes a connection that has completed its handshake or was closed. Returns `None` if the connection was
    /// already removed.
    pub(super) fn remove(&mut self, number: u64) -> Option<(T, IpAddr, Instant)> {
        let removed = self.all.remove(&number)?;
        self.change(removed.1, |numbers| numbers.remove(&number));
        Some(removed)
    }

    fn change(&mut self, address: IpAddr, change: impl FnOnce(&mut BTreeSet<u64>) -> bool) {
        let numbers = self.by_address.entry(address).or_default();
        self.counts.remove(&(numbers.len(), address));
        change(numbers);
        if numbers.is_empty() {
            self.by_address.remove(&address);
        } else {
            self.counts.insert((numbers.len(), address));
        }
    }

    /// Decides how to make room for one more connection. `most` is the maximum number of connections.
    pub(super) fn make_room(&mut self, most: usize, now: Instant) -> Room<T> {
        if self.all.len() < most {
            return Room::Free;
        }
        let oldest = self.counts.last().and_then(|(_, address)| self.by_address.get(address)?.first().copied());
        let Some((number, (_, _, since))) = oldest.and_then(|number| Some((number, self.all.get(&number)?))) else {
            return Room::Free;
        };
        match LEAST.checked_sub(now.saturating_duration_since(*since)) {
            Some(rest) if !rest.is_zero() => Room::After(rest),
            Some(_) | None => {
                self.remove(number).map_or(Room::Free, |(connection, address, _)| Room::Close(connection, address))
            }
        }
    }
}

/// Returns the address under which a connection is counted. For IPv6, this is the /64 network, because a machine can
/// usually use all addresses of its network.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(number: u8) -> IpAddr {
        [10, 0, 0, number].into()
    }

    #[derive(Debug, Clone)]
    enum Step {
        Arrive(u8),
        Leave(usize),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..4_u8).prop_map(Step::Arrive),
            1 => (0..20_usize).prop_map(Step::Leave),
            1 => (0..150_u64).prop_map(Step::Wait),
        ]
    }

    proptest! {
        /// Checks invariants DOOR-2 and DOOR-3.
        #[test]
        fn only_an_old_connection_of_the_busiest_address_makes_room(steps in prop::collection::vec(step(), 0..200)) {
            const MOST: usize = 6;
            let mut unproven = Unproven::default();
            let mut now = Instant::now();
            let mut model: Vec<(u64, u8, Instant)> = Vec::new();
            for step in steps {
                match step {
                    Step::Wait(ms) => now += Duration::from_millis(ms),
                    Step::Leave(index) if index < model.len() => {
                        let (number, from, _) = model.remove(index);
                        prop_assert_eq!(unproven.remove(number).map(|(from, ..)| from), Some(from));
                    }
                    Step::Leave(_) => prop_assert!(unproven.remove(u64::MAX).is_none()),
                    Step::Arrive(from) => {
                        let count = |from: u8| model.iter().filter(|(_, other, _)| *other == from).count();
                        match unproven.make_room(MOST, now) {
                            Room::Free => prop_assert!(model.len() < MOST),
                            Room::After(rest) => {
                                prop_assert!(model.len() == MOST && rest <= LEAST);
                                continue;
                            }
                            Room::Close(closed, at) => {
                                prop_assert_eq!((model.len(), at), (MOST, address(closed)));
                                prop_assert!((0..4).all(|other| count(other) <= count(closed)));
                                let oldest = model.iter().position(|(_, other, _)| *other == closed).unwrap();
                                prop_assert!(now - model[oldest].2 >= LEAST);
                                model.remove(oldest);
                            }
                        }
                        let number = unproven.number();
                        unproven.add(number, from, address(from), now);
                        model.push((number, from, now));
                    }
                }
            }
        }
    }

    #[test]
    fn the_limit_leaves_room_for_clients() {
        assert_eq!(limit(16_384, 1 << 20), 4096);
        assert_eq!(limit(16_384, 896), 224);
        assert_eq!(limit(0, 896), 64);
        assert_eq!(limit(0, 40), 16);
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_counted_together() {
        let mut unproven = Unproven::default();
        let now = Instant::now();
        for (number, address) in ["2001:db8::1", "10.0.0.1", "2001:db8::2"].into_iter().enumerate() {
            let id = unproven.number();
            unproven.add(id, number, address.parse().unwrap(), now);
        }
        assert_eq!(unproven.make_room(3, now + LEAST), Room::Close(0, "2001:db8::".parse().unwrap()));
    }
}
