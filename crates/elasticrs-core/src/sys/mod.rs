//! Thin wrappers for system calls that nix does not provide, or does not provide in the required form.
//!
//! All `unsafe` code of this crate is in this module. Each wrapper names the kernel version that it requires. The
//! minimum is Linux 5.4, and newer features are probed by [`features`].

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
