//! Handle of the workers' store.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::sync::Mutex;

use elasticrs_runtime::listen::{ListenError, Port, listen};
use elasticrs_runtime::lock;
use elasticrs_runtime::notices::{Notices, Tell};
use elasticrs_runtime::runtime::{HandOver, Spawn};
use elasticrs_runtime::threads::ask;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::hub::Limits;
use super::server::{self, Question};

/// Reason why serving a store failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("the store is served already")]
    Serving,
    #[error("the store is closed")]
    Closed,
    #[error("the thread of the store has stopped")]
    Stopped,
}

enum State {
    Listening(TcpListener),
    Serving(UnboundedSender<Question>),
    Closed,
}

/// A key-value store that the workers of one rendezvous round share.
///
/// Dropping the store closes it, as [`Self::close`] does. In a forked child, dropping does nothing, because the
/// server belongs to the parent.
pub struct WorkerStore {
    port: u16,
    limits: Limits,
    state: Mutex<State>,
    owner: u32,
}

impl WorkerStore {
    /// Binds and listens. From then on, clients can connect, but they get no answer until [`Self::serve`] is called.
    ///
    /// Without a `host`, the store listens on all addresses.
    pub fn new(host: Option<&str>, port: Port, limits: Limits) -> Result<Self, ListenError> {
        let listener = listen(host, port)?;
        let failed = |source: io::Error| ListenError { host: host.map(str::to_owned), port, source };
        let port = listener.local_addr().map_err(failed)?.port();
        Ok(Self { port, limits, state: Mutex::new(State::Listening(listener)), owner: std::process::id() })
    }

    /// Returns the port on which the store listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Starts to serve clients on the thread `on`. `tell` is called with a message for the user when the store closes a
    /// connection because of the client's behavior. Fails if the store is already served or closed, or if the thread
    /// has exited.
    pub fn serve(&self, on: &dyn Spawn, tell: Tell) -> Result<(), ServeError> {
        self.begin(|listener, inbox| {
            let limits = self.limits.clone();
            on.spawn(Box::new(move || Box::pin(server::run(listener, limits, Notices::new(tell), inbox))))
        })
    }

    /// Like [`Self::serve`], but starts the server only when the first client connects. `on` is the thread that waits
    /// for the client, and `hand_over` starts the server on another thread.
    pub fn serve_elsewhere(&self, on: &dyn Spawn, hand_over: HandOver, tell: Tell) -> Result<(), ServeError> {
        self.begin(|listener, inbox| {
            let limits = self.limits.clone();
            let wait = async move {
                if let Some((listener, inbox)) = server::first_client(listener, inbox).await {
                    let serve = move || server::run(listener, limits, Notices::new(tell), inbox);
                    hand_over(Box::new(move || Box::pin(serve())));
                }
            };
            on.spawn(Box::new(move || Box::pin(wait)))
        })
    }

    fn begin(&self, spawn: impl FnOnce(TcpListener, UnboundedReceiver<Question>) -> bool) -> Result<(), ServeError> {
        let mut state = lock(&self.state);
        let listener = match std::mem::replace(&mut *state, State::Closed) {
            State::Listening(listener) => listener,
            State::Closed => return Err(ServeError::Closed),
            serving @ State::Serving(_) => {
                *state = serving;
                return Err(ServeError::Serving);
            }
        };
        let (questions, inbox) = unbounded_channel();
        if !spawn(listener, inbox) {
            return Err(ServeError::Stopped);
        }
        *state = State::Serving(questions);
        Ok(())
    }

    /// Returns the waiting clients, each with the keys that it waits for. A client is described by its address and
    /// pid. Long lists are shortened. The result is empty if the store is not being served.
    pub fn waiting(&self) -> BTreeMap<String, Vec<String>> {
        let questions = match &*lock(&self.state) {
            State::Serving(questions) if self.is_ours() => questions.clone(),
            _ => return BTreeMap::new(),
        };
        // No answer means that the server has stopped, so no client is waiting.
        ask(&questions, Question::Waiting).unwrap_or_default()
    }

    /// Closes the listener and every connection, and blocks until they are closed. Idempotent.
    pub fn close(&self) {
        if !self.is_ours() {
            return;
        }
        let state = std::mem::replace(&mut *lock(&self.state), State::Closed);
        if let State::Serving(questions) = state {
            // If there is no answer, the server has already stopped and has closed its listener and connections.
            ask(&questions, Question::Close);
        }
    }

    /// Returns true if this process created the store, and false in a forked child.
    pub fn is_ours(&self) -> bool {
        std::process::id() == self.owner
    }
}

impl Drop for WorkerStore {
    fn drop(&mut self) {
        self.close();
    }
}
