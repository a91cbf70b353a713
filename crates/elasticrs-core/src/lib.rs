//! The Python-independent core of elasticrs: processes, signals, and logs.
//!
//! # Theory of operation
//!
//! Three kinds of processes are involved. The *agent* (a Python program that loads this crate through
//! `elasticrs._core`) makes the decisions. Its *nursery* ([`nursery`]) is a small single-threaded process that spawns
//! and reaps all workers. Because the nursery is a child subreaper, it can prove that no process of an attempt is left.
//! The *workers* are the user's training processes.
//!
//! In the agent, one runtime thread ([`supervisor`]) communicates with the nursery, carries out the group's stop
//! policy, and queues typed events, which Python fetches. A second thread writes to the console ([`logs`]). Decision
//! logic, such as the state machine of [`supervisor`] and the line splitter of [`logs`], is pure and separate from side
//! effects.
//!
//! Without the `agent` feature, only the code that the nursery needs is built.
#![deny(unsafe_code)]

#[cfg(feature = "agent")]
pub mod limits;
#[cfg(feature = "agent")]
pub mod logs;
pub mod nursery;
pub mod spec;
#[cfg(feature = "agent")]
pub mod supervisor;
#[cfg(feature = "agent")]
pub mod timer;

pub use elasticrs_sys::{exit, procfs, signal, stat};

/// The wrappers of system calls.
pub mod sys {
    pub use elasticrs_sys::*;
}
