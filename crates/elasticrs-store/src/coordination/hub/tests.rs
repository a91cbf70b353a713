use std::sync::mpsc::channel;

use elasticrs_runtime::notices::Tell;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::{LocalSet, spawn_local};

use super::super::protocol::VERSION;
use super::super::relay::Target;
use super::super::server::run;
use super::*;

const OWN: StoreId = [1; 16];
const FORERUNNER: StoreId = [2; 16];

fn a_hub(tell: Tell) -> Hub {
    let config = Config {
        run_id: None,
        token: None,
        max_connections: 1,
        max_bytes: MAX_BYTES,
        request_timeout: REQUEST_TIMEOUT,
        state: None,
    };
    Hub::new(config, vec![OWN, FORERUNNER], Notices::new(tell), Arc::default(), nobodys_relay())
}

fn nobodys_relay() -> Relay {
    Relay::new(tokio::sync::watch::channel(Target::default()).1, Box::new(|_| false))
}

fn an_outbox(hub: &Hub) -> Rc<Outbox> {
    Rc::new(Outbox::new(&hub.held, ([127, 0, 0, 1], 1).into()))
}

fn enter(
    hub: &Hub,
    outbox: &Rc<Outbox>,
    resume: Option<(u64, Secret)>,
    confirmed: Option<StoreId>,
) -> Result<(SessionId, Secret), LostKind> {
    let hello = Hello {
        version: VERSION,
        run_id: String::new(),
        interval_ms: 1000,
        attempts: 5,
        challenge: [0; 32],
        resume,
        confirmed,
    };
    match hub.enter(outbox, &hello, None) {
        Ok((session, Answer::Ready { secret, .. })) => Ok((session, secret)),
        Ok((_, other)) => panic!("{other:?}"),
        Err((kind, _)) => Err(kind),
    }
}

fn sessions(hub: &Hub) -> usize {
    hub.sessions.load(Ordering::Relaxed)
}

#[test]
fn a_session_with_a_broken_connection_can_be_resumed_only_with_its_secret() {
    let hub = a_hub(Box::new(drop));
    let (first, second) = (an_outbox(&hub), an_outbox(&hub));
    let (session, secret) = enter(&hub, &first, None, None).unwrap();
    hub.leave(session, &first, true);
    assert_eq!(sessions(&hub), 1);
    let mut wrong = secret;
    wrong[31] ^= 1;
    for refused in [(session, wrong), (session + 1, secret)] {
        assert_eq!(enter(&hub, &second, Some(refused), None).err(), Some(LostKind::Gone));
    }
    assert_eq!(enter(&hub, &second, Some((session, secret)), None), Ok((session, secret)));
    hub.leave(session, &first, false);
    assert_eq!(sessions(&hub), 1, "the end of another connection says nothing");
    hub.leave(session, &second, false);
    assert_eq!(sessions(&hub), 0);
    assert_eq!(enter(&hub, &first, Some((session, secret)), None).err(), Some(LostKind::Gone));
}

#[test]
fn a_session_continues_on_the_connection_that_resumed_it_last() {
    let hub = a_hub(Box::new(drop));
    let (first, second) = (an_outbox(&hub), an_outbox(&hub));
    let (session, secret) = enter(&hub, &first, None, None).unwrap();
    enter(&hub, &second, Some((session, secret)), None).unwrap();
    assert!(first.is_closing() && !second.is_closing());
    hub.leave(session, &first, true);
    enter(&hub, &first, Some((session, secret)), None).unwrap();
    assert_eq!((sessions(&hub), hub.shared.borrow().absent), (1, 0));
}

#[test]
fn the_number_of_disconnected_sessions_is_limited() {
    let hub = a_hub(Box::new(drop));
    let both = [an_outbox(&hub), an_outbox(&hub)];
    let begun = both.each_ref().map(|outbox| enter(&hub, outbox, None, None).unwrap());
    for (outbox, begun) in both.iter().zip(&begun) {
        hub.leave(begun.0, outbox, true);
    }
    let back = begun.map(|begun| enter(&hub, &both[0], Some(begun), None).is_ok());
    assert_eq!(back, [true, false]);
}

#[test]
fn a_restored_session_can_be_resumed_and_its_id_is_not_reused() {
    let hub = a_hub(Box::new(drop));
    hub.restore(7, &Granted { secret: [7; 32], interval_ms: 1000, attempts: 5, ttl_ms: 15_000 }, boot_now());
    assert_eq!((sessions(&hub), hub.shared.borrow().absent), (1, 1));
    let outbox = an_outbox(&hub);
    assert_eq!(enter(&hub, &outbox, Some((7, [7; 32])), Some(FORERUNNER)).unwrap().0, 7);
    assert_eq!(enter(&hub, &an_outbox(&hub), None, Some(OWN)).unwrap().0, 8);
    assert_eq!(enter(&hub, &outbox, Some((7, [7; 32])), Some([3; 16])).err(), Some(LostKind::Other));
    assert_eq!(enter(&hub, &outbox, None, Some([3; 16])).err(), Some(LostKind::Other));
}

#[tokio::test(flavor = "current_thread")]
#[expect(clippy::await_holding_refcell_ref, reason = "what makes the other side panic")]
async fn a_panic_while_ending_sessions_stops_the_store_with_a_notice() {
    let (told, notices) = channel();
    let hub = Rc::new(a_hub(Box::new(move |line| told.send(line).unwrap())));
    let (commands, inbox) = unbounded_channel();
    let serving = async {
        let serving = spawn_local(run(Rc::clone(&hub), Vec::new(), inbox));
        let taken = hub.shared.borrow_mut();
        hub.reap.notify_one();
        commands.closed().await;
        drop(taken);
        serving.await
    };
    LocalSet::new().run_until(serving).await.unwrap();
    let line = notices.recv().unwrap();
    assert!(line.starts_with("the store has ended"), "{line}");
}

#[test]
fn a_session_does_not_expire_while_its_requests_wait_for_a_turn() {
    let hub = a_hub(Box::new(drop));
    let outbox = an_outbox(&hub);
    enter(&hub, &outbox, None, None).unwrap();
    let hour = 3_600_000_000_000;
    for (waits, left) in [(true, 1), (false, 0)] {
        outbox.waits.set(waits);
        hub.shared.borrow_mut().leases.look(boot_now() + hour);
        hub.end_silent();
        assert_eq!(sessions(&hub), left);
    }
}
