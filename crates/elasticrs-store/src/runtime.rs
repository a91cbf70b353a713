//! Where the futures of this crate run.

use std::io;
use std::pin::Pin;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

/// Makes a future on the thread on which it then runs, so that the future itself need not be `Send`.
pub type Task = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// A thread that runs futures.
pub trait Spawn {
    /// Hands a task over; `false` when the thread has ended, and the task will never run.
    fn spawn(&self, task: Task) -> bool;
}

/// How often somebody who waits for an answer looks whether there is still anybody to give one.
const LOOK: Duration = Duration::from_millis(100);

/// Asks a task for something and waits for it; `None`: the task has ended.
///
/// That a question is dropped with its inbox is not enough: one that is sent in the moment in which the task ends can stay
/// behind in the channel for as long as its sender lives.
pub(crate) fn ask<Q, A>(inbox: &UnboundedSender<Q>, question: impl FnOnce(SyncSender<A>) -> Q) -> Option<A> {
    let (reply, answer) = sync_channel(1);
    inbox.send(question(reply)).ok()?;
    loop {
        match answer.recv_timeout(LOOK) {
            Ok(answer) => return Some(answer),
            Err(RecvTimeoutError::Disconnected) => return None,
            // The task answers before it drops its inbox.
            Err(RecvTimeoutError::Timeout) if inbox.is_closed() => return answer.try_recv().ok(),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// A thread of our own, for programs without an agent: a server that stands alone, a user's store object.
#[derive(Debug)]
pub struct Runtime {
    tasks: Option<UnboundedSender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread or no descriptor is left.
    pub fn new() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (tasks, mut inbox) = unbounded_channel::<Task>();
        let thread = std::thread::Builder::new().name("elasticrs-store".into()).spawn(move || {
            LocalSet::new().block_on(&runtime, async move {
                while let Some(task) = inbox.recv().await {
                    tokio::task::spawn_local(task());
                }
            });
        })?;
        Ok(Self { tasks: Some(tasks), thread: Some(thread) })
    }
}

impl Spawn for Runtime {
    fn spawn(&self, task: Task) -> bool {
        self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok())
    }
}

impl Drop for Runtime {
    /// Drops every task where it stands, which closes its sockets, and waits for the thread.
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // A panic of a task stays in that task; the loop itself has none to pass on.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_question_is_answered_until_the_task_has_ended() {
        let (inbox, mut questions) = unbounded_channel::<SyncSender<u8>>();
        let task = std::thread::spawn(move || {
            questions.blocking_recv().unwrap().send(7).unwrap();
            // Dropped without an answer.
            drop(questions.blocking_recv());
        });
        assert_eq!(ask(&inbox, |reply| reply), Some(7));
        assert_eq!(ask(&inbox, |reply| reply), None);
        task.join().unwrap();
        assert_eq!(ask(&inbox, |reply| reply), None);
    }

    #[test]
    fn a_question_that_stays_behind_is_given_up() {
        let (inbox, questions) = unbounded_channel::<()>();
        let mut kept = None;
        let answer = ask::<_, u8>(&inbox, |reply| {
            // As if it was sent in the moment in which the inbox went: nobody drops it.
            kept = Some(reply);
            std::thread::spawn(move || drop(questions));
        });
        assert_eq!(answer, None);
        drop(kept);
    }

    #[test]
    fn tasks_run_on_its_thread_and_are_dropped_with_it() {
        let runtime = Runtime::new().unwrap();
        let (ran, seen) = channel();
        let started = ran.clone();
        assert!(runtime.spawn(Box::new(move || {
            Box::pin(async move {
                started.send(std::thread::current().name().map(str::to_owned)).unwrap();
                // Held until the runtime goes.
                std::future::pending::<()>().await;
                drop(started);
            })
        })));
        assert_eq!(seen.recv().unwrap().as_deref(), Some("elasticrs-store"));
        drop(ran);
        drop(runtime);
        assert!(seen.recv().is_err());
    }
}
