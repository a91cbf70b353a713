//! Expiration timers: workers set them through a FIFO, and the agent acts when they expire.
//!
//! A worker writes a line to the FIFO when it enters a block that may hang, and another line when it leaves the block.
//! The format is that of `torch.distributed.elastic.timer.FileTimerClient`. All code except [`fifo`] is pure: [`lines`]
//! splits bytes into lines, [`record`] parses them, [`table`] keeps the deadlines, and [`complaints`] counts rejected
//! records. The supervisor's runtime thread owns one of each, matches records to processes, and kills processes whose
//! timer has expired.
//!
//! Invariants, cited by the tests:
//!
//! - **TIM-1** A timer expires when its duration has passed on the *monotonic* clock since its record was read, or
//!   since it was requested if the record contains that time. Time for which the group is suspended does not count.
//! - **TIM-2** A record that was written before a deadline counts before it, because the FIFO is read empty before any
//!   process is killed.
//! - **TIM-3** Only workers of the running group and their descendants are ever signalled, through a pidfd that was
//!   opened when their first record was read.
//! - **TIM-4** Invalid input, in any amount, is only counted and reported. Memory is bounded by constants.
//! - **TIM-5** The timers of a process are removed when it exits.
//!
//! Heartbeats are the other part: a worker stores them in a page of memory ([`pages`]), and [`hang`] finds the workers
//! that missed their heartbeat deadline.

pub mod complaints;
pub mod fifo;
pub mod hang;
pub mod lines;
pub mod pages;
pub mod record;
pub mod table;
