//! The store in which the agents of a job meet.
//!
//! Keys with revisions, transactions, watches that push, and sessions: a session is a lease, and what it leased ends with
//! it. `state`, `watches` and [`leases`] decide, as plain functions; [`server`] and [`client`] carry out.
//! The bytes between them are in [`protocol`] and [`wire`].
//!
//! A server's hub owns keys, watches and leases; a connection's task owns its socket, and shares with the hub only what it has
//! not sent yet. A client's task owns its socket and its deadline; its user owns the list of events. The invariants stand where
//! they are kept: `STATE`, `WATCH`, `LEASE`, `MEM` and `HUB` for the server, `CLIENT`, `ASKED` and `CLOCK` for the client, `WIRE` and `PROTO` for
//! the bytes.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub(crate) mod auth;
pub(crate) mod away;
pub mod client;
pub(crate) mod connect;
mod connection;
#[allow(
    clippy::disallowed_methods,
    reason = "its store has a process of its own and acts on nothing that is not on disk"
)]
pub mod durable;
pub mod events;
pub mod guard;
mod hub;
mod journal;
pub mod leases;
mod memory;
mod offset;
mod outbox;
pub(crate) mod probe;
pub mod protocol;
pub mod scope;
pub mod server;
mod session;
mod state;
pub mod types;
mod unanswered;
mod watches;
pub mod wire;
