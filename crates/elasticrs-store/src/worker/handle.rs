//! The handle of a store.

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

/// Why a store does not answer.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("the store is served already")]
    Serving,
    #[error("the store is closed")]
    Closed,
    #[error("the thread of the store has ended")]
    Ended,
}

enum State {
    Listening(TcpListener),
    Serving(UnboundedSender<Question>),
    Closed,
}

/// A store for the workers of one round.
///
/// Dropping it does what [`Self::close`] does. In a process made by `fork` it does nothing: the server is the parent's.
pub struct WorkerStore {
    port: u16,
    limits: Limits,
    state: Mutex<State>,
    owner: u32,
}

impl WorkerStore {
    /// Binds and listens: from now on clients can connect, and are answered from [`Self::serve`] on.
    ///
    /// Without a `host` it listens on every address.
    pub fn new(host: Option<&str>, port: Port, limits: Limits) -> Result<Self, ListenError> {
        let listener = listen(host, port)?;
        let failed = |source: io::Error| ListenError { host: host.map(str::to_owned), port, source };
        let port = listener.local_addr().map_err(failed)?.port();
        Ok(Self { port, limits, state: Mutex::new(State::Listening(listener)), owner: std::process::id() })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Answers on this thread from now on. `tell` gets a line for the user when a connection is closed for what it did.
    /// Fails when it is served already, or closed, or the thread has ended.
    pub fn serve(&self, on: &dyn Spawn, tell: Tell) -> Result<(), ServeError> {
        self.begin(|listener, inbox| {
            let limits = self.limits.clone();
            on.spawn(Box::new(move || Box::pin(server::run(listener, limits, Notices::new(tell), inbox))))
        })
    }

    /// The same, but another thread answers, from the first client on: `hand_over` gives it the task then. Until that,
    /// `on` looks whether anybody comes.
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
            return Err(ServeError::Ended);
        }
        *state = State::Serving(questions);
        Ok(())
    }

    /// Who waits for which keys: by address and pid of the client, in words; not all when there are many. Empty when nobody
    /// is served.
    pub fn waiting(&self) -> BTreeMap<String, Vec<String>> {
        let questions = match &*lock(&self.state) {
            State::Serving(questions) if self.is_ours() => questions.clone(),
            _ => return BTreeMap::new(),
        };
        // Where a server has ended, nobody waits for anything.
        ask(&questions, Question::Waiting).unwrap_or_default()
    }

    /// Ends the listener and every connection; when it returns, they are gone. Idempotent.
    pub fn close(&self) {
        if !self.is_ours() {
            return;
        }
        let state = std::mem::replace(&mut *lock(&self.state), State::Closed);
        if let State::Serving(questions) = state {
            // A server that has ended, with its thread, has closed everything by itself.
            ask(&questions, Question::Close);
        }
    }

    /// Whether this process made it; a child made by `fork` did not.
    pub fn is_ours(&self) -> bool {
        std::process::id() == self.owner
    }
}

impl Drop for WorkerStore {
    fn drop(&mut self) {
        self.close();
    }
}
