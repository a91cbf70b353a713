//! The stores of a job. The caller provides the threads for their servers and clients.
//!
//! The agents use the store [`coordination`], and torch's workers use the store [`worker`]. These two stores share only
//! the code in [`elasticrs_runtime`]. [`etcd`] is a client that uses an existing etcd cluster instead of
//! [`coordination`]. These three modules do not use each other. The clients in [`coordination`] and [`etcd`] both use
//! [`session`], the [`types`] of requests and answers, and `secrets`.
//!
//! Decisions are pure functions, separate from I/O: `coordination::state`, `coordination::leases`, [`worker::map`] and
//! `etcd::mapping` are the modules to read first. The page of each module lists its files and states its invariants.
//!
//! All servers and clients are futures that stay on one thread, which [`elasticrs_runtime::runtime::Spawn`] provides.
//! The client that holds an agent's lease runs on the supervisor's thread. Servers run on other threads. A handle
//! (`WorkerStore`, `Server`, `Client`) may be used from any thread. Sockets, keys and connections are used only by the
//! thread on which they were created.
//!
//! - **STORE-1** closing or dropping a handle stops everything that the handle started. `close` returns when everything
//!   has stopped;
//! - **STORE-2** if a thread exits, the stores on it stop as well. Their handles then report that the store has
//!   stopped, instead of waiting for an answer.

pub mod coordination;
pub mod etcd;
mod secrets;
pub mod session;
pub mod types;
pub mod worker;
