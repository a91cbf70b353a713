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
//! | [`process`] | reap and signal processes; how they exited |
//! | [`signal`], [`stop`] | numbers, names and dispositions of signals; a process that stops itself |
//! | [`procfs`] | read `/proc` |
//! | [`fds`], [`socket`] | file descriptors: take over, duplicate, pass on, wait for |
//! | [`page`], [`copy`] | memory that is shared with other processes; copies of memory with their checksum |
//! | [`resources`] | memory (heap, huge pages), priority and limits of processes |
//! | [`clock`] | the kernel's clocks, and timers on them |
//! | [`named_enum`] | enums whose variants have names |

/// Defines an enum with named variants and with the members `ALL`, `name` and `of_name`. The names are used outside of
/// Rust, for example in Python, in metrics or in messages.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        $vis enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// All variants, in the order of their declaration.
            pub const ALL: [Self; [$($name::$variant),+].len()] = [$(Self::$variant),+];

            /// Returns the name of this variant.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// Returns the variant with this name. `None` if no variant has it.
            pub fn of_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|each| each.name() == name)
            }
        }
    };
}

pub mod clock;
pub mod copy;
pub mod fds;
pub mod features;
pub mod fork;
pub mod page;
pub mod process;
pub mod procfs;
pub mod resources;
pub mod shown;
pub mod signal;
pub mod socket;
pub mod spawn;
pub mod stage;
pub mod stop;
