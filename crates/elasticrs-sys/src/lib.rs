//! Thin wrappers for system calls that nix does not provide, or does not provide in the required form, and the parts of
//! `/proc` and of the kernel's data that they return.
//!
//! All `unsafe` code is in this crate. Each wrapper names the kernel version that it requires. The minimum is Linux
//! 5.4, and newer features are probed by [`features`].

pub mod clock;
pub mod collapse;
pub mod command;
pub mod duplicate;
pub mod exit;
pub mod fds;
pub mod features;
pub mod fork;
pub mod heap;
pub mod page;
pub mod pidfd;
pub mod poll;
pub mod priority;
pub mod procfs;
pub mod rlimit;
pub mod shown;
pub mod signal;
pub mod socket;
pub mod spawn;
pub mod stage;
pub mod stat;
pub mod stop;
pub mod timer;
pub mod wait;
