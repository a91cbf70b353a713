//! Command-line argument of a nursery, and the limit on file descriptors for the nursery and its workers.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::token::Token;

/// Soft limit of this process on file descriptors before [`raise_descriptor_limit`] raised the limit. 0 if the limit
/// was not raised.
static GIVEN: AtomicU64 = AtomicU64::new(0);

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
    pub(crate) fn limit_descriptors(&self) -> nix::Result<()> {
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

/// Raises this process's soft limit on file descriptors to the hard limit if permitted. Returns the resulting soft
/// limit.
///
/// Call this only in a process that runs no other application code, because code that uses `select` breaks with
/// descriptors above 1023. Nurseries that are started later, and their workers, still get the previous limit.
pub fn raise_descriptor_limit() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    // If the limit cannot be raised, keep the current soft limit. Raising the limit fails if `fs.nr_open` was lowered
    // below the hard limit.
    if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        let _ = GIVEN.compare_exchange(0, soft, Ordering::Relaxed, Ordering::Relaxed);
        return hard;
    }
    soft
}

/// Returns the soft limit on file descriptors that applied before [`raise_descriptor_limit`] raised the limit. `None`
/// if the limit was not raised.
pub fn given_descriptor_limit() -> Option<u64> {
    Some(GIVEN.load(Ordering::Relaxed)).filter(|&soft| soft != 0)
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
