//! Expiration timers of workers, and detection of workers that hang. Workers set timers through a FIFO, and the agent
//! acts when a timer expires.
//!
//! A worker writes a line to the FIFO when it enters a block that may hang, and another line when it leaves the block.
//! The format is that of `torch.distributed.elastic.timer.FileTimerClient`. All code for timers except [`fifo`] is
//! pure: [`lines`] splits bytes into lines, [`record`] parses them, [`table`] keeps the deadlines, and [`complaints`]
//! counts rejected records. The supervisor's runtime thread owns one of each except the FIFO, for which it has a
//! descriptor. It finds the process of each record, and signals processes whose timer has expired. The thread that calls
//! the supervisor creates and removes the FIFO, because that blocks if the file system hangs.
//!
//! Invariants, cited by the tests:
//!
//! - **TIM-1** A timer expires when its duration has passed on the *monotonic* clock since its record was read, or
//!   since the timer was requested if the record contains that time. Time for which the group is suspended does not
//!   count.
//! - **TIM-2** A record that was written before a deadline takes effect before it, because the FIFO is read until it is
//!   empty before any process is killed.
//! - **TIM-3** Only workers of the running group and their descendants are ever signalled, through a pidfd that was
//!   opened when their first record was read.
//! - **TIM-4** Invalid input is only counted and reported, however much there is. Memory use is bounded by constants.
//! - **TIM-5** The timers of a process are removed when it exits.
//!
//! To detect hangs, a worker stores heartbeats in a page of memory ([`pages`]), and [`hang`] finds the workers that
//! missed their heartbeat deadline.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod complaints;
#[allow(clippy::disallowed_methods, reason = "runs on the caller's thread")]
pub mod fifo;
pub mod hang;
pub mod lines;
pub mod pages;
pub mod record;
pub mod table;
