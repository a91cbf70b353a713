//! Starts this library's threads in the user's process, wakes those that wait in a poll loop, and sends requests to the
//! tasks that run on them.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, SigmaskHow};
use tokio::sync::mpsc::UnboundedSender;

/// Interval at which [`ask_within`] checks whether the task that should answer still exists.
const LOOK: Duration = Duration::from_millis(100);
/// Maximum time that [`Leavable::leave`] waits for a thread to exit.
const LEAVE_GRACE: Duration = Duration::from_millis(200);

/// Starts a thread that blocks all signals, because Python's signal handlers should run only on Python's own
/// threads. Because SIGPIPE is also blocked, writing to a closed connection returns an error even in a program in
/// which SIGPIPE is fatal.
pub fn start<T: Send + 'static>(
    builder: Builder,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // Block the signals before starting the thread. The thread inherits the mask, so it never receives a signal.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let started = builder.spawn(body);
    before.thread_set_mask()?;
    started
}

/// Returns the message of a caught panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a text".into())
}

/// A thread that may hang in the kernel.
#[derive(Debug)]
pub struct Leavable {
    handle: JoinHandle<()>,
    /// Receiver that is disconnected when the thread exits, even after a panic, because the thread owns the only
    /// sender.
    ended: Receiver<()>,
}

impl Leavable {
    /// Starts the thread as [`start`] does. If `body` panics, only this thread exits.
    pub fn start(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (alive, ended) = channel();
        let handle = start(Builder::new().name(name.to_owned()), move || {
            let _alive = alive;
            body();
        })?;
        Ok(Self { handle, ended })
    }

    /// Waits a short time for the thread to exit. If the thread hangs, it is abandoned and exits later on its own.
    pub fn leave(self) {
        if self.ended.recv_timeout(LEAVE_GRACE) == Err(RecvTimeoutError::Disconnected) {
            let _ = self.handle.join();
        }
    }
}

/// Sends a request to a task and waits for the answer. Returns `None` if the task has stopped.
pub fn ask<Q, A>(inbox: &UnboundedSender<Q>, question: impl FnOnce(SyncSender<A>) -> Q) -> Option<A> {
    ask_within(inbox, question, Duration::MAX)
}

/// Like [`ask`], but also returns `None` if the task does not answer within `limit`, because its thread may hang.
///
/// Regularly checks whether the task still exists, because the reply channel may stay open if the task stops just after
/// the request was sent.
pub fn ask_within<Q, A>(
    inbox: &UnboundedSender<Q>,
    question: impl FnOnce(SyncSender<A>) -> Q,
    limit: Duration,
) -> Option<A> {
    let asked = Instant::now();
    let (reply, answer) = sync_channel(1);
    inbox.send(question(reply)).ok()?;
    loop {
        match answer.recv_timeout(LOOK) {
            Ok(answer) => return Some(answer),
            Err(RecvTimeoutError::Disconnected) => return None,
            // Check for an answer one last time, because the task may have answered just before it stopped.
            Err(RecvTimeoutError::Timeout) if inbox.is_closed() || asked.elapsed() >= limit => {
                return answer.try_recv().ok();
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// A file descriptor that [`Self::set`] makes readable. It stays readable until [`Self::clear`] is called.
#[derive(Debug)]
pub struct WakeFd(EventFd);

impl WakeFd {
    /// Creates a descriptor that is not readable yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    /// Makes the descriptor readable, which wakes the poll loop that waits for it. Never blocks.
    pub fn set(&self) {
        // Ignore EAGAIN. It means that the counter is full, so the descriptor is already readable.
        let _ = self.0.write(1);
    }

    /// Resets the descriptor, so that it is no longer readable. Never blocks.
    pub fn clear(&self) {
        // Ignore EAGAIN. It means that the descriptor was not readable.
        let _ = self.0.read();
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for WakeFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    #[test]
    fn a_request_is_answered_until_the_task_has_exited() {
        let (inbox, mut questions) = unbounded_channel::<SyncSender<u8>>();
        let task = std::thread::spawn(move || {
            questions.blocking_recv().unwrap().send(7).unwrap();
            // Drop the request without an answer.
            drop(questions.blocking_recv());
        });
        assert_eq!(ask(&inbox, |reply| reply), Some(7));
        assert_eq!(ask(&inbox, |reply| reply), None);
        task.join().unwrap();
        assert_eq!(ask(&inbox, |reply| reply), None);
    }

    #[test]
    fn waiting_for_an_answer_stops_at_the_time_limit() {
        let (inbox, questions) = unbounded_channel::<SyncSender<u8>>();
        assert_eq!(ask_within(&inbox, |reply| reply, Duration::from_millis(1)), None);
        assert_eq!(questions.len(), 1);
    }

    #[test]
    fn ask_returns_none_if_the_task_stops_before_it_reads_the_request() {
        let (inbox, questions) = unbounded_channel::<()>();
        let mut kept = None;
        let answer = ask::<_, u8>(&inbox, |reply| {
            // Simulate a task that stops just after the request was sent: drop the receiver of the requests, but keep
            // the reply channel open.
            kept = Some(reply);
            std::thread::spawn(move || drop(questions));
        });
        assert_eq!(answer, None);
        drop(kept);
    }

    #[test]
    fn threads_started_by_this_crate_block_signals() {
        let masked = start(Builder::new(), || SigSet::thread_get_mask().unwrap()).unwrap().join().unwrap();
        assert!(
            masked.contains(nix::sys::signal::Signal::SIGPIPE) && masked.contains(nix::sys::signal::Signal::SIGTERM)
        );
    }
}
