//! The small process between agent and workers that leaves nothing behind.

pub mod protocol;
