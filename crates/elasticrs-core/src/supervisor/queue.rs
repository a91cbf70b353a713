//! Queue of events for the agent. Waiting for the next event also ends when a watched descriptor becomes
//! readable.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;
use std::time::Duration;

use elasticrs_runtime::lock;
use elasticrs_runtime::threads::WakeFd;
use elasticrs_sys::fds::{Polled, poll_readable};

use super::event::Event;

/// Maximum number of [notices](Event::is_notice) in the queue. Further notices are dropped and counted.
const MAX_NOTICES: usize = 1024;

/// Queue of events from the runtime thread. The agent can wait for an event and for watched descriptors at the same
/// time.
///
/// The queue holds at most `MAX_NOTICES` notices, because workers can cause an unlimited number of them while the
/// agent does not read its events. Other events have no limit, because their number depends on the agent's requests.
#[derive(Debug)]
pub struct Queue {
    events: Mutex<Events>,
    watched: Mutex<Vec<RawFd>>,
    wake: WakeFd,
}

#[derive(Debug, Default)]
struct Events {
    waiting: VecDeque<Event>,
    notices: usize,
    /// Number of dropped notices that have not been reported yet.
    dropped: u64,
}

impl Events {
    fn push(&mut self, event: Event) {
        if event.is_notice() {
            if self.notices == MAX_NOTICES {
                self.dropped += 1;
                return;
            }
            self.notices += 1;
        }
        self.waiting.push_back(event);
    }

    fn pop(&mut self) -> Option<Event> {
        let event = self.waiting.pop_front()?;
        self.notices -= usize::from(event.is_notice());
        if self.waiting.is_empty() && self.dropped > 0 {
            let dropped = std::mem::take(&mut self.dropped);
            let message = format!(
                "{dropped} further messages about the workers were dropped, because {MAX_NOTICES} were already waiting"
            );
            self.push(Event::Degraded { message });
        }
        Some(event)
    }
}

/// Result of [`Queue::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// An event from the runtime thread.
    Event(Event),
    /// A watched descriptor is readable.
    FdReady(RawFd),
    TimedOut,
    /// A signal handler ran in this thread.
    Interrupted,
}

impl Queue {
    /// Creates an empty queue.
    pub fn new() -> io::Result<Self> {
        Ok(Self { events: Mutex::default(), watched: Mutex::default(), wake: WakeFd::new()? })
    }

    /// Adds an event and wakes the waiter. Called by the runtime thread. Drops the event if it is a notice and the
    /// queue already holds the maximum number of notices.
    pub fn push(&self, event: Event) {
        lock(&self.events).push(event);
        self.wake.set();
    }

    /// Reports that a feature is impaired or has failed. See [`Event::Degraded`].
    pub(super) fn degraded(&self, message: impl Into<String>) {
        self.push(Event::Degraded { message: message.into() });
    }

    /// Watches a descriptor: while it is readable, [`Self::next`] returns immediately.
    pub fn watch(&self, fd: RawFd) {
        let mut watched = lock(&self.watched);
        if !watched.contains(&fd) {
            watched.push(fd);
        }
    }

    /// Stops watching a descriptor that was passed to [`Self::watch`].
    pub fn unwatch(&self, fd: RawFd) {
        lock(&self.watched).retain(|w| *w != fd);
    }

    /// Blocks until there is an event, a watched descriptor is readable, or `timeout` elapses. Only one thread may call
    /// this method at a time.
    ///
    /// A readable descriptor is returned before any event, because it may announce a signal. The caller must read all
    /// data from the descriptor. Otherwise, the next call returns the descriptor again.
    pub fn next(&self, timeout: Option<Duration>) -> io::Result<Next> {
        let mut fds = lock(&self.watched).clone();
        fds.push(self.wake.as_raw_fd());
        match poll_readable(&fds, timeout)? {
            Polled::Ready(index) if index + 1 < fds.len() => Ok(Next::FdReady(fds[index])),
            Polled::Ready(_) => Ok(self.take()),
            Polled::TimedOut => Ok(Next::TimedOut),
            Polled::Interrupted => Ok(Next::Interrupted),
        }
    }

    fn take(&self) -> Next {
        let mut events = lock(&self.events);
        let event = events.pop();
        if events.waiting.is_empty() {
            // Clear the wake-up while holding the lock. Otherwise the wake-up of a concurrent push could be lost.
            self.wake.clear();
        }
        event.map_or(Next::Interrupted, Next::Event)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn only_notices_are_dropped_and_all_dropped_ones_are_counted(
            bursts in prop::collection::vec((0..3 * MAX_NOTICES, 0..4_usize), 1..6)
        ) {
            let mut events = Events::default();
            let (mut pushed, mut notices) = (Vec::new(), 0);
            for (index, (burst, paused)) in bursts.into_iter().enumerate() {
                for number in 0..burst {
                    events.push(Event::Degraded { message: format!("{index} {number}") });
                }
                notices += burst;
                for _ in 0..paused {
                    let event = event(&pushed.len().to_string());
                    events.push(event.clone());
                    pushed.push(event);
                }
                prop_assert!(events.waiting.len() <= MAX_NOTICES + pushed.len());
            }
            let popped: Vec<_> = std::iter::from_fn(|| events.pop()).collect();
            let (told, kept): (Vec<_>, Vec<_>) = popped.into_iter().partition(Event::is_notice);
            prop_assert_eq!(kept, pushed);
            prop_assert!(told.len() <= MAX_NOTICES + 1);
            if notices > MAX_NOTICES {
                let Some(Event::Degraded { message }) = told.last() else { panic!("the dropped ones are counted") };
                prop_assert!(message.starts_with(&format!("{} ", notices - MAX_NOTICES)), "{}", message);
            } else {
                prop_assert_eq!(told.len(), notices);
            }
            prop_assert_eq!((events.notices, events.dropped), (0, 0));
        }
    }

    fn event(message: &str) -> Event {
        Event::Panicked { message: message.into() }
    }

    #[test]
    fn each_event_is_returned_once_and_in_order() {
        let queue = Queue::new().unwrap();
        for message in ["a", "b", "c"] {
            queue.push(event(message));
        }
        for message in ["a", "b", "c"] {
            assert_eq!(queue.next(None).unwrap(), Next::Event(event(message)));
        }
        assert_eq!(queue.next(Some(Duration::ZERO)).unwrap(), Next::TimedOut);
    }

    #[test]
    fn a_waiter_is_woken_by_a_push_from_another_thread() {
        let queue = Arc::new(Queue::new().unwrap());
        let pusher = std::thread::spawn({
            let queue = Arc::clone(&queue);
            move || queue.push(event("late"))
        });
        assert_eq!(queue.next(Some(Duration::from_secs(10))).unwrap(), Next::Event(event("late")));
        pusher.join().unwrap();
    }

    #[test]
    fn a_ready_descriptor_is_returned_before_queued_events() {
        let queue = Queue::new().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        queue.watch(reader.as_raw_fd());
        queue.push(event("waits"));
        writer.write_all(b"x").unwrap();
        assert_eq!(queue.next(None).unwrap(), Next::FdReady(reader.as_raw_fd()));
        queue.unwatch(reader.as_raw_fd());
        assert_eq!(queue.next(None).unwrap(), Next::Event(event("waits")));
    }
}
