//! The store of the workers: a server for the clients of torch's `TCPStore` (2.4 and later).
//!
//! [`WorkerStore`] is the handle. It binds and listens when it is created, and serves clients after
//! [`WorkerStore::serve`] has been called. [`wire`] splits bytes into requests, [`map`] executes the requests, and
//! `server` moves bytes between the sockets and these two modules.
//!
//! Invariants that the tests refer to:
//!
//! - **WS-1** The replies do not depend on how the bytes of a connection were split into segments.
//! - **WS-2** The replies of a connection are sent in the order of its requests.
//! - **WS-3** No memory is reserved for a length that a peer announces. All memory in use counts toward one limit.
//! - **WS-4** An error of a connection closes only that connection.
//! - **WS-5** Closing the store immediately closes the listener and every connection.

mod connection;
mod handle;
mod hub;
pub mod map;
mod server;
pub mod wire;

pub use handle::{ServeError, WorkerStore};
pub use hub::{Closed, Limits};
