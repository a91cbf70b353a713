//! Client for etcd v3 as an alternative to the coordination store, for sites that run etcd. The clients of both stores
//! accept the same requests and report the same events.
//!
//! `mapping` translates requests and answers, and `watching` tracks which events a watch has received; both consist of
//! pure functions. `grpc` makes calls to one member, and
//! `errors` identifies the errors that etcd sends. `dial` and [`tls`] connect to a member, and `open` opens a
//! session. `session` and `jobs` execute requests, which wait in `tasks`. `messages` has the part of etcd's API that is
//! used. `retries` limits how long a failing request is retried. Through `links`, sessions detect each other's end, and
//! `cards` has the data that they publish for that.
//!
//! - **ETCD-1** requests are executed one at a time, in the order in which they were made;
//! - **ETCD-2** a request that writes is executed only once, even if the connection breaks before its answer arrives;
//! - **ETCD-3** the client ends its session after four fifths of the lease, before etcd would end it. This time is
//!   measured on the boot clock, from the moment at which the client sent the last answered keep-alive. Messages that
//!   arrive later are ignored;
//! - **ETCD-4** `close` leaves no task and no file descriptor behind and, if etcd can be reached, no lease.

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
mod options;
mod probe;
mod retries;
mod session;
mod tasks;
pub mod tls;
mod watching;
