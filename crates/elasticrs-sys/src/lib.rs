//! Safe wrappers for the kernel interfaces that the other crates use. This crate is the lowest layer. The nursery is
//! built from it, so it depends on no other crate of the project and on no async runtime, and starts no background
//! threads.
//!
//! All `unsafe` code of the project is here, except one call to tokio in `elasticrs-runtime` (`readiness.rs`) and the
//! crates for tests (`elasticrs-fake-nvml` and `elasticrs-testkit`). The modules wrap system calls that nix does not
//! provide, or does not provide in the required form. Their functions are safe to call. Each wrapper names the kernel
//! version that it requires. The minimum is Linux 5.4, and newer features are probed by [`features`].
//!
//! | modules | contents |
//! | --- | --- |
//! | [`spawn`], [`fork`] | start processes: from a program, as a helper, as a fork |
//! | [`stage`], [`shown`] | a new process: the stage of its start, its arguments and environment in `/proc` |
//! | [`wait`], [`exit`], [`pidfd`] | reap and signal processes; how they exited |
//! | [`signal`], [`stop`] | numbers, names and dispositions of signals; a process that stops itself |
//! | [`procfs`], [`stat`] | read `/proc` |
//! | [`fds`], [`socket`], [`poll`] | file descriptors: take over, duplicate, pass on, wait for |
//! | [`page`], [`collapse`] | memory: shared with other processes, in huge pages |
//! | [`resources`] | memory, priority and limits of processes |
//! | [`clock`] | the kernel's clocks, and timers on them |
//! | [`named_enum`] | enums whose variants have names |

pub mod clock;
pub mod collapse;
pub mod exit;
pub mod fds;
pub mod features;
pub mod fork;
mod named;
pub mod page;
pub mod pidfd;
pub mod poll;
pub mod procfs;
pub mod resources;
pub mod shown;
pub mod signal;
pub mod socket;
pub mod spawn;
pub mod stage;
pub mod stat;
pub mod stop;
pub mod wait;
