//! Connections that have not completed the handshake. Pure: the time is an argument.
//!
//! A stranger can open such connections without knowing the token, so they have a limit of their own, and the
//! connections of clients do not count.
//!
//! - **DOOR-2** while the limit is reached, the connection that makes room is the oldest one of the address with the
//!   most connections. Clients at other addresses are not affected;
//! - **DOOR-3** a connection is not closed before it has had [`LEAST`] for its handshake. Until then, further
//!   connections wait in the kernel's queue.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Maximum number of connections, even in a store for more clients.
const MOST: usize = 4096;
/// Number of connections that are possible in a store for few clients, because many may start at the same time.
const FEWEST: usize = 64;
/// Number of connections that are possible if the process may have few file descriptors.
const LEAST_OF_ALL: usize = 16;
/// Time that each connection gets for its handshake, however many wait. A handshake takes two round trips.
pub(super) const LEAST: Duration = Duration::from_millis(100);

/// Returns the maximum number of connections without a handshake: a quarter of the connections that the store may have,
/// and at most a quarter of the file descriptors.
pub(super) fn limit(connections: usize, descriptors: usize) -> usize {
    (connections / 4).clamp(FEWEST, MOST).min(descriptors / 4).max(LEAST_OF_ALL)
}

/// What to do before the next connection is accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Room<T> {
    /// Accept it.
    Free,
    /// Wait this long, or until a handshake is complete.
    After(Duration),
    /// Close this connection, which is no longer counted. It comes from the address `IpAddr`.
    Close(T, IpAddr),
}

/// The connections without a handshake. `T` identifies a connection for the caller.
#[derive(Debug)]
pub(super) struct Unproven<T> {
    next: u64,
    /// Connections by number, which is the order in which they were accepted.
    all: BTreeMap<u64, (T, IpAddr, Instant)>,
    by_address: HashMap<IpAddr, BTreeSet<u64>>,
    /// Number of connections of each address.
    counts: BTreeSet<(usize, IpAddr)>,
}

impl<T> Default for Unproven<T> {
    fn default() -> Self {
        Self { next: 0, all: BTreeMap::new(), by_address: HashMap::new(), counts: BTreeSet::new() }
    }
}

impl<T> Unproven<T> {
    /// Returns the number for the next connection, which [`Self::add`] then adds.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn add(&mut self, number: u64, connection: T, address: IpAddr, now: Instant) {
        let address = network(address);
        self.all.insert(number, (connection, address, now));
        self.change(address, |numbers| numbers.insert(number));
    }

    /// Removes a connection that has completed its handshake or was closed. Does nothing if it is not there.
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

    /// Makes room for one more connection.
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

/// Returns the address under which a connection is counted. For IPv6, that is its network, because a machine usually
/// has all addresses of its network.
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
        /// DOOR-2, DOOR-3
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
