//! Enums whose variants have names that are used outside of Rust, for example in Python, in metrics or in messages.

/// Defines an enum with named variants and with the members `ALL`, `name` and `of_name`.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

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
