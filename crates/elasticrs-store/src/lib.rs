//! The stores of a job. Their servers and clients run on threads that the caller provides.
//!
//! Agents meet in the store [`coordination`], and torch's workers use the store [`worker`]. The two share only the code
//! in [`elasticrs_runtime`]. [`etcd`] is a client that uses the site's etcd instead of [`coordination`].
//!
//! All servers and clients are futures that stay on one thread, which is given by
//! [`elasticrs_runtime::runtime::Spawn`]. Servers run on a thread apart from the supervision of workers. The client
//! that holds an agent's lease runs on the supervisor's thread. A handle (`WorkerStore`, `Server`, `Client`) may be
//! used from any thread. Sockets, keys and connections are used only by the thread on which they were created.
//!
//! - **STORE-1** Closing or dropping a handle stops everything that it started. `close` returns when that is done.
//! - **STORE-2** If a thread ends, its stores end as well. Their handles then report that instead of waiting for it.

pub mod coordination;
pub mod etcd;
mod handle;
mod watched;
pub mod worker;
