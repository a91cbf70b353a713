//! The stores of a job, as servers and clients that run on a thread of somebody else.
//!
//! Everything here is a future that stays on the thread it was made on; [`runtime::Spawn`] says which thread that is: the
//! agent's one runtime thread, or an own one where there is no agent.

pub mod coordination;
mod door;
pub mod runtime;
pub mod worker;
