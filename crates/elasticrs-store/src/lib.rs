//! The stores of a job, as servers and clients that run on a thread of somebody else.
//!
//! [`coordination`] is the one in which the agents meet, [`worker`] the one that torch's workers use. They share what is in
//! [`elasticrs_runtime`], nothing else. [`etcd`] is a client of a site's etcd in place of the former.
//!
//! Everything here is a future that stays on the thread it was made on; [`elasticrs_runtime::runtime::Spawn`] says which
//! thread that is. Servers have one of their own, apart from the supervision of workers; the client that holds an agent's
//! lease is on that of the supervisor. A handle (`WorkerStore`, `Server`, `Client`) belongs to whoever made it and may be
//! used from any thread; sockets, keys and connections belong to the thread alone.
//!
//! - **STORE-1** a handle that is closed or dropped ends all that it started; `close` returns when it has ended;
//! - **STORE-2** a thread that ends takes the stores on it along, and their handles say so instead of waiting for it.

pub mod coordination;
pub mod etcd;
mod handle;
mod watched;
pub mod worker;
