//! Kinds that have a name outside of Rust: in Python, in metrics.

/// Defines an enum of such kinds, and `ALL`, `name` and `of_name` for it.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// All of them, in order.
            pub const ALL: [Self; [$($name::$variant),+].len()] = [$(Self::$variant),+];

            /// What it is called.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The one that is called so.
            pub fn of_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|each| each.name() == name)
            }
        }
    };
}
