//! Expiration timers of workers: what they ask for through a FIFO, and when that is due.
//!
//! A worker writes a line to the FIFO when it enters a block that may hang, and another one when it leaves it. The lines
//! are those of `torch.distributed.elastic.timer.FileTimerClient`. What is here is pure, apart from [`fifo`]: [`lines`]
//! cuts bytes into lines, [`record`] reads them, [`table`] keeps the deadlines, [`complaints`] counts what was refused.
//! The supervisor's runtime thread owns one of each, binds the records to processes, and reaps.
//!
//! Invariants, cited by the tests:
//!
//! - **TIM-1** a timer is due when its span of *monotonic* time has passed since its record was read (or since it was
//!   asked for, where the record says so), and time in which the group is suspended does not count;
//! - **TIM-2** whatever was written before a deadline counts before it: the FIFO is read empty before anybody is reaped;
//! - **TIM-3** nobody is ever signalled but workers of the running group and their descendants, and those through
//!   a pidfd that was opened when their first record was read;
//! - **TIM-4** no bytes, in no amount, do more than be counted and complained of: memory is bounded by constants;
//! - **TIM-5** the timers of a process end with it.
//!
//! Heartbeats are the other half: a worker leaves them in a page of memory ([`pages`]), and [`hang`] says who gave none
//! for too long.

pub mod complaints;
pub mod fifo;
pub mod hang;
pub mod lines;
pub mod pages;
pub mod record;
pub mod table;
