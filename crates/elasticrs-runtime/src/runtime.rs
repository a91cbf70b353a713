//! Where the futures of this crate run.

use std::io;
use std::thread::{Builder, JoinHandle};

use elasticrs_core::supervisor::Supervisor;
use elasticrs_core::threads;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

pub use elasticrs_core::supervisor::Task;

/// Gives a task to another thread, once; `false` when there is none, and the task will never run.
pub type HandOver = Box<dyn FnOnce(Task) -> bool + Send>;

/// A thread that runs futures.
pub trait Spawn {
    /// Hands a task over; `false` when the thread has ended, and the task will never run.
    fn spawn(&self, task: Task) -> bool;
}

/// For what must not wait for a store: the client that holds a lease, and the look for the first client.
impl Spawn for Supervisor {
    fn spawn(&self, task: Task) -> bool {
        Supervisor::spawn(self, task).is_ok()
    }
}

/// The thread of the stores: of an agent's, of a server that stands alone, of a user's store object.
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
        let thread = threads::start(Builder::new().name("elasticrs-store".into()), move || {
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
