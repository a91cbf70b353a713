//! Client for etcd v3, an alternative to the coordination store for sites that run etcd. The clients of both stores
//! accept the same requests and report the same events.
//!
//! `mapping` translates requests and answers, and `watching` tracks which events a watch has received; both consist of
//! pure functions. `grpc` makes calls to one member, and `errors` identifies the errors that etcd sends. `dial` (which
//! also has the client's options) and [`tls`] connect to a member, and `open` opens a session. `tasks` is the queue of
//! requests and limits how long a failing request is retried, and `session` and `jobs` execute them. `messages` defines
//! the messages of etcd's API that are used. With `links`, sessions detect each other's end, and `cards` defines the
//! data that they publish for that.
//!
//! - **ETCD-1** requests are executed one at a time, in the order in which they were made;
//! - **ETCD-2** a request that writes is executed only once, even if the connection breaks before its answer arrives;
//! - **ETCD-3** the client gives up its session after four fifths of the lease's time to live, before etcd would end
//!   it. The client measures this time on the boot clock, from the time at which it sent the last answered keep-alive.
//!   It ignores messages that arrive later;
//! - **ETCD-4** `close` leaves no task and no file descriptor behind. If etcd can be reached, it leaves no lease behind
//!   either.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod cards;
pub mod client;
mod dial;
mod errors;
mod grpc;
mod jobs;
mod lease;
mod links;
mod mapping;
mod messages;
mod open;
mod session;
mod tasks;
pub mod tls;
mod watching;
