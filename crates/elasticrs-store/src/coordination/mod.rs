//! The store in which the agents of a job meet.
//!
//! Keys with revisions, transactions, watches that push, and sessions: a session is a connection, and what it leased
//! ends with it. [`state`], [`watches`] and [`leases`] decide, as plain functions; [`server`] and [`client`] carry out.
//! The bytes between them are in [`protocol`] and [`wire`].

pub mod auth;
pub mod client;
pub mod clock;
mod connect;
mod connection;
pub mod events;
pub mod guard;
mod hub;
pub mod leases;
mod outbox;
mod probe;
pub mod protocol;
pub mod server;
mod session;
pub mod state;
pub mod types;
pub mod watches;
pub mod wire;
