//! etcd v3 in place of our own store: the same requests, the same events, for agents of a site that has one.
//!
//! [`mapping`] says what requests and answers mean, [`watching`] what a watch has been told of: plain functions. [`grpc`]
//! speaks with one member, [`dial`], [`tls`] and [`open`] lead there, [`jobs`] and [`session`] carry out. [`messages`] is the
//! part of etcd's API that is used. [`retries`] says how long a request may fail. By [`links`] sessions look after each other; [`cards`] is what they show.
//!
//! - **ETCD-1** requests are carried out one after the other, in the order in which they were made;
//! - **ETCD-2** a request is carried out once, also when the connection breaks before its answer has come;
//! - **ETCD-3** the session is given up a fifth of its lease before etcd would end it, counted on the boot clock from the
//!   sending of the last answered keep-alive; whatever arrives after that moment is not looked at;
//! - **ETCD-4** nothing is left behind by `close`: no task, no descriptor, and, where etcd can be reached, no lease.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod cards;
pub mod client;
mod dial;
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
pub mod tls;
mod watching;
