//! The token: a number that identifies all descendants of a nursery.
//!
//! The token is stored in the soft limit of `RLIMIT_RTTIME`, as 2⁶² plus a random number of microseconds. This limit,
//! 146,000 years of uninterrupted real-time computing, has no effect in practice. Every descendant inherits the limit.
//! Any process can read the limit in `/proc/PID/limits`, even if the descendant was started with `env -i` or is not
//! dumpable.
//!
//! A process that is meant to outlive its job leaves its session and resets the limit to `unlimited` (`ulimit -S -R
//! unlimited` in bash).

use std::fs;
use std::io::{self, Read};

use elasticrs_sys::procfs;
use elasticrs_sys::resources;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const BASE: u64 = 1 << 62;

/// Token of a nursery: a random number that no other nursery on this machine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token(u64);

impl Token {
    /// Creates a random token.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 8];
        fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        // Exclude the highest values, because a limit with all bits set means "unlimited".
        Ok(Self(BASE + (u64::from_le_bytes(bytes) >> 3)))
    }

    /// Parses the output of `Display`. `None` if the text is not a token.
    pub fn parse(text: &str) -> Option<Self> {
        text.parse().ok().and_then(Self::from_limit)
    }

    /// Returns the token that is stored in a resource limit. `None` if the limit contains no token.
    fn from_limit(limit: u64) -> Option<Self> {
        (BASE..BASE + (1 << 61)).contains(&limit).then_some(Self(limit))
    }

    /// Stores the token in the soft limit of `RLIMIT_RTTIME`. The token identifies all descendants of this process,
    /// because child processes inherit resource limits. Fails with `EINVAL` if the hard limit is lower than the token.
    pub fn apply(self) -> nix::Result<()> {
        let (_, hard) = getrlimit(Resource::RLIMIT_RTTIME)?;
        setrlimit(Resource::RLIMIT_RTTIME, self.0, hard)
    }

    /// Returns the token of a process, which identifies the nursery that the process descends from. `None` if the
    /// process has no token or is gone.
    pub fn of(pid: i32) -> Option<Self> {
        soft_limit(pid).and_then(Self::from_limit)
    }

    /// Returns true if the process has no token that identifies it as a descendant of a nursery. Returns false if it
    /// has a token, is gone, or may not be inspected.
    pub fn is_reset(pid: i32) -> bool {
        soft_limit(pid).is_some_and(|limit| Self::from_limit(limit).is_none())
    }
}

/// Returns the soft limit for `RLIMIT_RTTIME` of a process. Descendants of a nursery inherit a limit that identifies
/// the nursery. `None` if the process is gone or may not be inspected.
fn soft_limit(pid: i32) -> Option<u64> {
    if procfs::is_own() {
        in_limits(&procfs::read(pid, "limits")?)
    } else {
        resources::soft_limit(pid, Resource::RLIMIT_RTTIME).ok()
    }
}

fn in_limits(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max realtime timeout"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        limit => limit.parse().ok(),
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_unique_and_are_parsed_back_unchanged() {
        let (a, b) = (Token::random().unwrap(), Token::random().unwrap());
        assert_ne!(a, b);
        assert_eq!(Token::parse(&a.to_string()), Some(a));
    }

    #[test]
    fn a_resource_limit_set_by_other_code_is_not_a_token() {
        let line = |soft: &str| format!("Limit  Soft\nMax realtime timeout      {soft}  unlimited   us        \n");
        let token = |limits: &str| in_limits(limits).and_then(Token::from_limit);
        assert_eq!(token(&line("unlimited")), None);
        assert_eq!(token(&line("200000")), None);
        assert_eq!(token(&line("4611686018427387911")), Some(Token(BASE + 7)));
        assert_eq!(in_limits("Max cpu time  unlimited"), None);
    }

    #[test]
    fn an_applied_token_can_be_read_by_pid() {
        let token = Token::random().unwrap();
        token.apply().unwrap();
        let own = std::process::id().cast_signed();
        assert_eq!((Token::of(own), Token::is_reset(own)), (Some(token), false));
        assert_eq!(resources::soft_limit(own, Resource::RLIMIT_RTTIME), Ok(token.0));
        assert_eq!((Token::of(-1), Token::is_reset(-1), Token::is_reset(1)), (None, false, true));
    }
}
