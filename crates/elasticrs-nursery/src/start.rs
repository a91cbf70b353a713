//! Command-line argument of a nursery.

use std::fmt;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::token::Token;

/// Settings of a nursery. The text form is `TOKEN` or `TOKEN/DESCRIPTORS`. Both parts are decimal numbers, and
/// `DESCRIPTORS` is a limit on file descriptors. A leading `!` marks the settings of a process that guards a nursery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Token by which the nursery's descendants are recognised.
    pub token: Token,
    /// Soft limit on file descriptors for the workers. `None` if the workers get the same limit as the agent.
    pub descriptors: Option<u64>,
    /// True for a process that guards a nursery process instead of starting workers. When the agent is gone, the
    /// guarding process kills all processes that have inherited `token`.
    pub is_sentinel: bool,
}

impl Start {
    /// Parses the output of `Display`. Returns `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let (is_sentinel, text) = text.strip_prefix('!').map_or((false, text), |rest| (true, rest));
        let (token, descriptors) = match text.split_once('/') {
            Some((token, descriptors)) => (token, Some(descriptors.parse().ok()?)),
            None => (text, None),
        };
        Some(Self { token: Token::parse(token)?, descriptors, is_sentinel })
    }

    /// Sets the soft limit on file descriptors that the workers inherit.
    pub fn limit_descriptors(&self) -> nix::Result<()> {
        let Some(soft) = self.descriptors else { return Ok(()) };
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        // Respect the hard limit, because it may have been lowered since the agent sent the soft limit.
        setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard)
    }
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_sentinel { "!" } else { "" })?;
        match self.descriptors {
            Some(descriptors) => write!(f, "{}/{descriptors}", self.token),
            None => self.token.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_argument_of_a_nursery_is_parsed_back_unchanged() {
        let token = Token::random().unwrap();
        for (descriptors, is_sentinel) in [(None, false), (Some(1024), true), (Some(u64::MAX), false), (None, true)] {
            let start = Start { token, descriptors, is_sentinel };
            assert_eq!(Start::parse(&start.to_string()), Some(start));
        }
        for text in ["", "!", "7", "/", "/1024", &format!("{token}/"), &format!("{token}/x")] {
            assert_eq!(Start::parse(text), None, "{text}");
        }
    }
}
