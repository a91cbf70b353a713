use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const NOBODY: [SessionId; 0] = [];
const S: u64 = 1_000 * MS;

fn expired(leases: &mut Leases, now: u64) -> Vec<SessionId> {
    leases.look(now);
    leases.expired()
}

#[test]
fn a_silent_session_ends_after_its_time_to_live() {
    let mut leases = Leases::default();
    assert_eq!(leases.begin(1, 1000, 5, 10 * S), Pace { interval_ms: 1000, ttl_ms: 5000 });
    assert_eq!(leases.renew(1, 11 * S), Some(Pace { interval_ms: 1000, ttl_ms: 5000 }));
    assert_eq!(expired(&mut leases, 16 * S - 1), NOBODY);
    assert_eq!(expired(&mut leases, 16 * S), [1]);
    leases.end(1);
    assert_eq!((expired(&mut leases, 99 * S), leases.plan(99 * S), leases.renew(1, 99 * S)), (vec![], None, None));
}

#[test]
fn time_while_the_store_is_paused_does_not_count_toward_leases() {
    let mut leases = Leases::default();
    leases.begin(1, 1000, 5, 0);
    assert_eq!(leases.plan(0), Some(S));
    // Simulate a paused store, which checks for expired sessions after 11 s instead of after 1 s.
    assert_eq!(expired(&mut leases, 11 * S), NOBODY);
    assert_eq!(expired(&mut leases, 15 * S - 1), NOBODY);
    assert_eq!(expired(&mut leases, 15 * S), [1]);
}

#[test]
fn a_pause_during_a_lease_check_does_not_count_toward_leases() {
    let mut leases = Leases::default();
    leases.look(0);
    leases.begin(1, 1000, 5, 0);
    leases.plan(0);
    leases.look(S);
    // Simulate a store that is paused from 1 s to 11 s, between its calls to `look` and `plan`.
    assert_eq!(leases.expired(), NOBODY);
    assert_eq!(leases.plan(11 * S), Some(12 * S));
    assert_eq!(expired(&mut leases, 12 * S), NOBODY);
    assert_eq!(expired(&mut leases, 15 * S - 1), NOBODY);
    assert_eq!(expired(&mut leases, 15 * S), [1]);
}

#[test]
fn a_restored_session_has_the_longest_time_to_live_that_was_granted() {
    let mut leases = Leases::default();
    leases.restore(1, 1000, 5, 15_000, 10 * S);
    assert_eq!(expired(&mut leases, 25 * S - 1), NOBODY);
    assert_eq!(expired(&mut leases, 25 * S), [1]);
    leases.restore(1, 1000, 5, 1000, 30 * S);
    assert_eq!(expired(&mut leases, 35 * S - 1), NOBODY);
    assert_eq!(leases.renew(1, 35 * S), Some(Pace { interval_ms: 1000, ttl_ms: 5000 }));
    leases.end(1);
    assert_eq!(leases.plan(99 * S), None);
}

#[test]
fn the_keep_alive_interval_grows_with_very_many_sessions() {
    let mut leases = Leases::default();
    for session in 0..10_000 {
        leases.begin(session, 1000, 5, 0);
    }
    assert_eq!(leases.renew(0, 0), Some(Pace { interval_ms: 2000, ttl_ms: 10_000 }));
    assert_eq!(leases.begin(10_000, 5000, 3, 0), Pace { interval_ms: 5000, ttl_ms: 15_000 });
}

#[test]
fn unusable_keep_alive_settings_are_refused() {
    assert!(Leases::is_allowed(10, 3) && Leases::is_allowed(1000, 5));
    assert!(!Leases::is_allowed(9, 5) && !Leases::is_allowed(1000, 2) && !Leases::is_allowed(u32::MAX, 5));
}

/// Step of the store's loop at which the test stops the store.
#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    Sleep,
    Look,
    Plan,
}

proptest! {
    /// Pauses the store at random times for random durations.
    ///
    /// A client that sends its keep-alives in time never expires.
    ///
    /// A client that sends no keep-alives expires after its time to live plus the duration of all pauses. It may expire
    /// up to one keep-alive interval late. Each pause may also make it expire up to one interval early.
    #[test]
    fn pauses_of_the_store_do_not_expire_an_active_session(
        stops in vec((0..3_000_u64, 0..60_000_u64, prop_oneof![Just(At::Sleep), Just(At::Look), Just(At::Plan)]), 0..10),
        attempts in 3..8_u16,
    ) {
        let mut leases = Leases::default();
        leases.look(0);
        leases.begin(1, 1000, attempts, 0);
        leases.begin(2, 1000, attempts, 0);
        let (mut now, mut beat, mut stopped, mut counted) = (0, 0, 0, 0);
        let mut silent_ended = None;
        for (run, stop, at) in stops.into_iter().chain([(100_000, 0, At::Sleep)]) {
            let until = now + run * MS;
            while let Some(look) = leases.plan(now) {
                let is_last = look > until;
                let pause = |now: u64, here: At| if is_last && at == here { now + stop * MS } else { now };
                now = pause(look.min(until), At::Sleep);
                leases.look(now);
                // Handle keep-alives between `look` and `expired`, because the real store uses the same order.
                now = pause(now, At::Look);
                if now >= beat + S {
                    beat = now;
                    leases.renew(1, now);
                }
                let expired = leases.expired();
                prop_assert!(!expired.contains(&1));
                if expired.contains(&2) {
                    silent_ended.get_or_insert((now, stopped, counted));
                    leases.end(2);
                }
                now = pause(now, At::Plan);
                if is_last {
                    break;
                }
            }
            stopped += stop * MS;
            counted += (stop * MS).saturating_sub(S);
        }
        let ttl = u64::from(attempts) * S;
        let (ended, stopped, counted) = silent_ended.expect("the last run is long enough");
        // Allow 60 s more, the longest possible pause, in the second assertion. If the session expired during a pause,
        // `stopped` does not include that pause yet.
        prop_assert!(ended >= ttl + counted, "{ended} {counted}");
        prop_assert!(ended <= ttl + stopped + 60 * S + S, "{ended} {stopped}");
    }
}
