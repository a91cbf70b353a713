//! Tests for callers' futures on the supervisor's runtime thread.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use common::groups::{HANG, supervisor};
use elasticrs_core::supervisor::queue::Next;
use elasticrs_core::supervisor::{Event, SupervisorError};
use elasticrs_testkit::{assert_no_children, is_running};

#[test]
fn tasks_share_the_one_runtime_thread_and_need_not_be_send() {
    let supervisor = supervisor();
    let (names, said) = sync_channel(2);
    for _ in 0..2 {
        let names = names.clone();
        let task = move || -> std::pin::Pin<Box<dyn Future<Output = ()>>> {
            let count = Rc::new(Cell::new(0));
            Box::pin(async move {
                let inner = Rc::clone(&count);
                tokio::task::spawn_local(async move { inner.set(7) }).await.unwrap();
                assert_eq!(count.get(), 7);
                names.send(std::thread::current().id()).unwrap();
            })
        };
        supervisor.spawn(Box::new(task)).unwrap();
    }
    let threads = [said.recv_timeout(HANG).unwrap(), said.recv_timeout(HANG).unwrap()];
    assert_eq!(threads[0], threads[1]);
    assert_ne!(threads[0], std::thread::current().id());
    supervisor.close(false).unwrap();
    assert!(matches!(supervisor.spawn(Box::new(|| Box::pin(async {}))), Err(SupervisorError::Closed)));
    drop(supervisor);
    assert_no_children();
}

#[test]
fn a_panic_of_a_task_is_reported_and_does_not_affect_other_tasks() {
    let supervisor = supervisor();
    let (ended, other) = sync_channel::<()>(0);
    supervisor
        .spawn(Box::new(move || {
            Box::pin(async move {
                let _held = ended;
                std::future::pending::<()>().await;
            })
        }))
        .unwrap();
    supervisor.spawn(Box::new(|| panic!("in the maker"))).unwrap();
    supervisor.spawn(Box::new(|| Box::pin(async { panic!("in the future") }))).unwrap();
    let mut said: Vec<String> = (0..2)
        .map(|_| match supervisor.next(Some(HANG)).unwrap() {
            Next::Event(Event::Degraded { message }) => message,
            other => panic!("{other:?}"),
        })
        .collect();
    said.sort();
    let expected = ["in the future", "in the maker"].map(|text| format!("a task of the runtime panicked: {text}"));
    assert_eq!(said, expected);
    assert!(is_running(supervisor.nursery_pid().unwrap()));
    assert_eq!(other.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty), "the other task goes on");
    supervisor.close(false).unwrap();
    assert_eq!(other.recv_timeout(HANG), Err(RecvTimeoutError::Disconnected), "and is dropped at the close");
    drop(supervisor);
    assert_no_children();
}

/// Value that the task owns. When it is dropped, it reports whether the nursery is still running.
struct Held {
    nursery: i32,
    connection: UnixStream,
}

impl Drop for Held {
    fn drop(&mut self) {
        let there: &[u8] = if is_running(self.nursery) { b"too early" } else { b"in order" };
        // Ignore an error, because a test that has already failed does not read.
        let _ = self.connection.write_all(there);
    }
}

#[test]
fn a_task_is_dropped_after_the_nursery_has_ended() {
    let supervisor = supervisor();
    let (ours, mut peer) = UnixStream::pair().unwrap();
    let held = Held { nursery: supervisor.nursery_pid().unwrap(), connection: ours };
    supervisor
        .spawn(Box::new(move || {
            Box::pin(async move {
                let _held = held;
                std::future::pending::<()>().await;
            })
        }))
        .unwrap();
    drop(supervisor);
    let mut said = String::new();
    peer.read_to_string(&mut said).unwrap();
    assert_eq!(said, "in order");
    assert_no_children();
}
