//! The mechanisms of elasticrs: processes, signals, and logs, without Python.
//!
//! # Theory of operation
//!
//! Three processes take part. The *agent* (a Python program that loads this crate through `elasticrs._core`) decides.
//! Its *nursery* ([`nursery`]) is a small single-threaded process that is the parent of all workers: it spawns them,
//! reaps them, and, being a child subreaper, can prove that nothing of an attempt is left. The *workers* are the
//! user's training processes.
//!
//! In the agent, one runtime thread ([`supervisor`]) talks to the nursery, executes the stop policy of the group, and
//! puts typed events into a queue; a second thread writes to the console ([`logs`]). Python pulls the events.
//! Decisions ([`supervisor`]'s state machine, [`logs`]'s line splitter) are pure and apart from the effects.
//!
//! Without the feature `agent` only what the nursery needs is built.
#![deny(unsafe_code)]

pub mod exit;
#[cfg(feature = "agent")]
pub mod limits;
#[cfg(feature = "agent")]
pub mod logs;
pub mod nursery;
pub mod procfs;
pub mod signal;
pub mod spec;
pub mod stat;
#[cfg(feature = "agent")]
pub mod supervisor;
#[expect(unsafe_code, reason = "the one place for it; every block carries its SAFETY")]
pub mod sys;
#[cfg(feature = "agent")]
pub mod timer;
