//! Signal numbers and their names.

use serde::{Deserialize, Serialize};

/// A valid signal number, including real-time signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signal(i32);

impl Signal {
    /// SIGCONT.
    pub const CONT: Self = Self(libc::SIGCONT);
    /// SIGKILL.
    pub const KILL: Self = Self(libc::SIGKILL);
    /// SIGSTOP.
    pub const STOP: Self = Self(libc::SIGSTOP);
    /// SIGTERM.
    pub const TERM: Self = Self(libc::SIGTERM);

    /// Creates a signal from its number. `None` unless `1 <= number <= SIGRTMAX`.
    pub fn new(number: i32) -> Option<Self> {
        (1..=libc::SIGRTMAX()).contains(&number).then_some(Self(number))
    }

    /// Returns the signal number that the kernel uses.
    pub const fn number(self) -> i32 {
        self.0
    }
}

impl std::fmt::Display for Signal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match nix::sys::signal::Signal::try_from(self.0) {
            Ok(signal) => f.write_str(signal.as_str()),
            Err(_) => write!(f, "SIG{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_real_signals_are_accepted() {
        assert_eq!(Signal::new(0), None);
        assert_eq!(Signal::new(-9), None);
        assert_eq!(Signal::new(65), None);
        assert_eq!(Signal::new(15), Some(Signal::TERM));
    }

    #[test]
    fn names_are_the_usual_ones() {
        assert_eq!(Signal::TERM.to_string(), "SIGTERM");
        assert_eq!(Signal(40).to_string(), "SIG40");
    }
}
