//! The coordination store, through which the agents of a job coordinate.
//!
//! The store has keys with revisions, transactions, watches that push changes to clients, and sessions. A session has a
//! lease. When a session ends, the store deletes the keys that are attached to its lease. The pure functions of
//! `state`, `watches` and [`leases`] make the decisions; [`server`] and [`client`] do the I/O. [`protocol`] and
//! [`wire`] define the messages between them. On the server, `connection`, `hub` and `outbox` serve the clients,
//! `turns` shares the server's thread among their connections, `unproven` limits connections that have not completed
//! the handshake, and `journal` and [`durable`] keep the state on disk. On the client, `session` and `unanswered`
//! implement [`crate::session`] for this store. [`access`] checks tokens, and restricts a session to a key prefix.
//! `relay` forwards the connections of workers to the workers' store.
//!
//! A server's hub owns the keys, watches and leases. A connection's task owns its socket and shares only its unsent
//! messages with the hub. A client's task owns its socket and its deadline, and the client's user owns the list of
//! events. Each module lists its invariants: `STATE`, `WATCH`, `LEASE`, `MEM`, `HUB`, `TURN`, `DOOR` and `RELAY` for
//! the server, `CLIENT` and `ASKED` for the client, `WIRE` and `PROTO` for the messages.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod access;
pub mod client;
mod connect;
mod connection;
#[allow(
    clippy::disallowed_methods,
    reason = "its store has a process of its own and acts on nothing that is not on disk"
)]
pub mod durable;
mod hub;
mod journal;
pub mod leases;
mod outbox;
pub mod protocol;
pub mod relay;
pub mod server;
mod session;
mod state;
mod turns;
mod unanswered;
mod unproven;
mod watches;
pub mod wire;
