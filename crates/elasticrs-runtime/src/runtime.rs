//! A thread that runs futures.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::thread::{Builder, JoinHandle};

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

use crate::threads;

/// Function that creates a future on the thread that will run it. The future does not need to be `Send`, because it
/// never leaves that thread.
pub type Task = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Function that passes a task to another thread, and may start that thread first. Returns `false` if the thread does
/// not exist. The task then never runs.
pub type HandOver = Box<dyn Fn(Task) -> bool + Send>;

/// A thread that runs tasks for other threads.
pub trait Spawn {
    /// Passes a task to the thread. Returns `false` if the thread has exited. The task then never runs.
    fn spawn(&self, task: Task) -> bool;
}

/// Starts a thread that runs a future, and the tasks that the future spawns with [`tokio::task::spawn_local`]. When the
/// future completes or panics, unfinished tasks are dropped. If the future panics, `panicked` is called with the
/// message of the panic.
pub fn start<F: Future<Output = ()>>(
    builder: Builder,
    main: impl FnOnce() -> F + Send + 'static,
    panicked: impl FnOnce(String) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let runtime = Unawaited(Some(tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?));
    threads::start(builder, move || {
        let outcome = catch_unwind(AssertUnwindSafe(move || {
            let Unawaited(Some(runtime)) = &runtime else { return };
            let tasks = LocalSet::new();
            tasks.block_on(runtime, async { main().await });
        }));
        if let Err(panic) = outcome {
            panicked(threads::panic_message(panic.as_ref()));
        }
    })
}

/// A tokio runtime whose drop does not wait for blocking calls, because these may hang in the kernel. It can also be
/// dropped inside an async task. This happens if the task fails to start the runtime's thread.
struct Unawaited(Option<tokio::runtime::Runtime>);

impl Drop for Unawaited {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A thread that runs tasks. Dropping this value drops all tasks, which closes their sockets, and waits until the
/// thread has exited. In a forked child, dropping does nothing, because the thread exists only in the parent.
#[derive(Debug)]
pub struct Runtime {
    tasks: Option<UnboundedSender<Task>>,
    thread: Option<JoinHandle<()>>,
    owner: u32,
}

impl Runtime {
    /// Starts the thread.
    pub fn new(name: &str) -> io::Result<Self> {
        let (tasks, mut inbox) = unbounded_channel::<Task>();
        let serve = move || async move {
            while let Some(task) = inbox.recv().await {
                // Run the task as a separate tokio task, so that a panic affects only this task.
                tokio::task::spawn_local(async { task().await });
            }
        };
        let thread = start(Builder::new().name(name.to_owned()), serve, drop)?;
        Ok(Self { tasks: Some(tasks), thread: Some(thread), owner: std::process::id() })
    }
}

impl Spawn for Runtime {
    fn spawn(&self, task: Task) -> bool {
        self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok())
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let (tasks, thread) = (self.tasks.take(), self.thread.take());
        if self.owner != std::process::id() {
            return std::mem::forget((tasks, thread));
        }
        drop(tasks);
        if let Some(thread) = thread {
            // Ignore the result. It is never an error, because this thread catches panics.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn tasks_run_on_the_runtime_thread_and_are_dropped_with_the_runtime() {
        let runtime = Runtime::new("elasticrs-tasks").unwrap();
        let (ran, seen) = channel();
        let started = ran.clone();
        assert!(runtime.spawn(Box::new(|| panic!("a task that cannot be made ends nobody else"))));
        assert!(runtime.spawn(Box::new(move || {
            Box::pin(async move {
                started.send(std::thread::current().name().map(str::to_owned)).unwrap();
                // Keep `started` alive until the runtime drops the task.
                std::future::pending::<()>().await;
                drop(started);
            })
        })));
        assert_eq!(seen.recv().unwrap().as_deref(), Some("elasticrs-tasks"));
        drop(ran);
        drop(runtime);
        assert!(seen.recv().is_err());
    }

    #[test]
    fn a_panic_is_reported_with_its_message() {
        let (tell, told) = channel();
        let main = || async { panic!("out of luck") };
        start(Builder::new(), main, move |message| tell.send(message).unwrap()).unwrap().join().unwrap();
        assert_eq!(told.recv().unwrap(), "out of luck");
    }
}
