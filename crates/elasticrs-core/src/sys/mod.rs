//! Thin wrappers of system calls that nix does not have, or not in the form that is needed here.
//!
//! Everything `unsafe` of the project is in this module. Each wrapper names the kernel that it needs; the floor of the
//! project is Linux 5.4, what is newer is probed by [`features`].

pub mod collapse;
#[cfg(feature = "agent")]
pub mod command;
#[cfg(feature = "agent")]
pub mod duplicate;
pub mod fds;
pub mod features;
pub mod fork;
#[cfg(feature = "agent")]
pub mod heap;
pub mod page;
pub mod pidfd;
#[cfg(feature = "agent")]
pub mod poll;
pub mod priority;
#[cfg(feature = "agent")]
pub mod readiness;
pub mod rlimit;
pub mod shown;
pub mod signals;
pub mod socket;
pub mod spawn;
pub mod stage;
#[cfg(feature = "agent")]
pub mod stop;
pub mod timer;
pub mod wait;
