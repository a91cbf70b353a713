//! Runs blocking calls, such as file reads and name lookups, for threads that run futures and therefore must not block.
//!
//! - **BLOCKING-1** the calling thread never blocks, because each call runs on a new thread that is never joined;
//! - **BLOCKING-2** a call that hangs in the kernel occupies only one thread, however often its callers time out and
//!   retry.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::thread::Builder;

use tokio::sync::watch;

use crate::threads;

/// Maximum number of calls that may be running at the same time.
pub(crate) const MAX_CALLS: usize = 8;

/// Blocking calls that one thread has started and that have not returned yet. Callers that pass the same key share one
/// call.
///
/// A caller should set a timeout. The call itself continues after the timeout, and the next caller with the same key
/// waits for its result.
#[derive(Debug)]
pub struct BlockingCalls<K, V> {
    running: RefCell<BTreeMap<K, watch::Receiver<Option<V>>>>,
}

impl<K, V> Default for BlockingCalls<K, V> {
    fn default() -> Self {
        Self { running: RefCell::new(BTreeMap::new()) }
    }
}

impl<K: Ord, V: Clone + Send + Sync + 'static> BlockingCalls<K, V> {
    /// Runs `call` on a new thread named `thread` and returns its result. If a call with this key is already running,
    /// returns the result of that call instead.
    ///
    /// # Errors
    /// Fails if the thread cannot be started, if it panics, or if [`MAX_CALLS`] other calls are still running.
    pub async fn run(&self, thread: &str, key: K, call: impl FnOnce() -> V + Send + 'static) -> io::Result<V> {
        let mut result = self.join_or_start(thread, key, call)?;
        let panicked = || io::Error::other(format!("the thread {thread} has panicked"));
        let result = result.wait_for(Option::is_some).await.map_err(|_| panicked())?;
        result.clone().ok_or_else(panicked)
    }

    fn join_or_start(
        &self,
        thread: &str,
        key: K,
        call: impl FnOnce() -> V + Send + 'static,
    ) -> io::Result<watch::Receiver<Option<V>>> {
        let mut running = self.running.borrow_mut();
        running.retain(|_, result| result.has_changed().is_ok() && result.borrow().is_none());
        if let Some(result) = running.get(&key) {
            return Ok(result.clone());
        }
        if running.len() == MAX_CALLS {
            return Err(io::Error::other(format!("{MAX_CALLS} earlier calls of the thread {thread} still hang")));
        }
        let (sender, result) = watch::channel(None);
        threads::start(Builder::new().name(thread.to_owned()), move || sender.send_replace(Some(call())))?;
        running.insert(key, result.clone());
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn retries_share_a_blocking_call_that_hangs() {
        let calls = BlockingCalls::default();
        let started = Arc::new(AtomicUsize::new(0));
        let (release, released) = channel::<()>();
        let mut released = Some(released);
        block_on(async {
            let mut call = |patience| {
                let (started, released) = (Arc::clone(&started), released.take());
                let hang = move || {
                    started.fetch_add(1, Ordering::SeqCst);
                    // Block until the sender is dropped, at which point `recv` returns an error.
                    let _ = released.map(|released| released.recv());
                    7
                };
                timeout(patience, calls.run("hanging", "key", hang))
            };
            for _ in 0..20 {
                assert!(call(Duration::from_millis(1)).await.is_err());
            }
            // The last caller is already waiting when the hanging call returns.
            let (last, ()) = tokio::join!(call(Duration::MAX), async { drop(release) });
            assert_eq!(last.unwrap().unwrap(), 7);
        });
        assert_eq!(started.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_finished_call_is_run_again_for_the_next_caller() {
        let calls = BlockingCalls::default();
        block_on(async {
            for expected in 0..3 * MAX_CALLS {
                assert_eq!(calls.run("quick", "key", move || expected).await.unwrap(), expected);
            }
        });
    }

    #[test]
    fn the_number_of_hanging_calls_is_limited() {
        let calls = BlockingCalls::default();
        let mut senders = Vec::new();
        block_on(async {
            for key in 0..MAX_CALLS {
                let (release, released) = channel::<()>();
                senders.push(release);
                let hanging = calls.run("hanging", key, move || released.recv().unwrap_or_default());
                assert!(timeout(Duration::from_millis(1), hanging).await.is_err());
            }
            assert!(calls.run("hanging", MAX_CALLS, || ()).await.is_err());
            senders.clear();
            calls.run("hanging", 0, || ()).await.unwrap();
        });
    }

    #[test]
    fn a_panic_in_a_blocking_call_is_an_error() {
        let calls = BlockingCalls::<u8, ()>::default();
        block_on(async {
            assert!(calls.run("panicking", 0, || panic!("out of luck")).await.is_err());
            calls.run("panicking", 0, || ()).await.unwrap();
        });
    }
}
