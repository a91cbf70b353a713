//! Expiration timers of workers, and detection of workers that hang.
//!
//! A worker sets a timer through a FIFO, and the agent acts when the timer expires. The worker writes a line to the
//! FIFO when it enters a block that may hang, and another line when it leaves the block. The format is that of
//! `torch.distributed.elastic.timer.FileTimerClient`.
//!
//! The supervisor's runtime thread reads the FIFO, finds the process of each record, and signals processes whose timer
//! has expired. All code for timers except [`fifo`] is pure: [`record`] splits bytes into lines,
//! parses them and counts rejected records, and [`table`] keeps the deadlines. The FIFO is created and removed on the
//! thread that calls the supervisor, because these operations block if the file system hangs.
//!
//! Invariants, cited by the tests:
//!
//! - **TIM-1** A timer expires when its duration has passed on the *monotonic* clock. The duration starts when the
//!   worker requests the timer or, if the record does not contain the monotonic deadline, when the record is read. Time
//!   for which the group is suspended does not count.
//! - **TIM-2** A record that was written before a deadline takes effect before the deadline is enforced, because the
//!   FIFO is read until it is empty before any process is killed.
//! - **TIM-3** Only workers of the running group and their descendants are ever signalled, through a pidfd that was
//!   opened when their first record was read.
//! - **TIM-4** Invalid input, however much, is only counted and reported. Memory use is bounded by constants.
//! - **TIM-5** The timers of a process are removed when it exits.
//!
//! To detect hangs, a worker stores heartbeats in a page of memory ([`pages`]), and [`hang`] finds the workers that
//! missed their heartbeat deadline.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

#[allow(clippy::disallowed_methods, reason = "runs on the caller's thread")]
pub mod fifo;
pub mod hang;
pub mod pages;
pub mod record;
pub mod table;
