//! Queue of events for the agent. Waiting for the next event also ends when a watched descriptor becomes
//! readable.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;
use std::time::Duration;

use elasticrs_runtime::lock;
use elasticrs_runtime::wake::Wake;
use elasticrs_sys::poll::{Polled, poll_readable};

use super::event::Event;

/// Queue of events from the runtime thread. The agent can wait for an event and for watched descriptors at the same
/// time.
#[derive(Debug)]
pub struct Queue {
    events: Mutex<VecDeque<Event>>,
    watched: Mutex<Vec<RawFd>>,
    wake: Wake,
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
        Ok(Self { events: Mutex::default(), watched: Mutex::default(), wake: Wake::new()? })
    }

    /// Adds an event and wakes the waiter. Called by the runtime thread.
    pub fn push(&self, event: Event) {
        lock(&self.events).push_back(event);
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
        let event = events.pop_front();
        if events.is_empty() {
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

    use super::*;

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
