//! The store of the workers: a server for the clients of torch's `TCPStore` (2.4 and later).
//!
//! [`WorkerStore`] is the handle: it binds and listens when it is made, and answers once it is given a thread. [`wire`]
//! cuts bytes into requests, [`map`] says what a request does, `server` moves bytes between sockets and these two.
//!
//! Invariants, cited by the tests:
//!
//! - **WS-1** what a connection gets does not depend on how its bytes were cut into segments;
//! - **WS-2** the replies of a connection come in the order of its requests;
//! - **WS-3** no memory is taken because a peer *says* that much will come; what is taken counts towards one limit;
//! - **WS-4** whatever a connection does wrong ends that connection alone;
//! - **WS-5** when the store is closed, so are the listener and every connection, at once.

mod connection;
mod handle;
mod hub;
pub mod map;
mod server;
pub mod wire;

pub use handle::{ServeError, WorkerStore};
pub use hub::{Closed, Limits};
