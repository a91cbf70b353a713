//! What a nursery is told on its command line.

use std::fmt;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::token::Token;

/// One argument: `TOKEN` or `TOKEN/DESCRIPTORS`, in decimal; a sentinel's begins with `!`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// What marks all that will descend from it.
    pub token: Token,
    /// The soft limit of descriptors of its workers, where the agent has another one itself.
    pub descriptors: Option<u64>,
    /// It has no workers. When its agent is gone, it ends whatever carries the token.
    pub is_sentinel: bool,
}

impl Start {
    /// Reads what `Display` wrote; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let (is_sentinel, text) = text.strip_prefix('!').map_or((false, text), |rest| (true, rest));
        let (token, descriptors) = match text.split_once('/') {
            Some((token, descriptors)) => (token, Some(descriptors.parse().ok()?)),
            None => (text, None),
        };
        Some(Self { token: Token::parse(token)?, descriptors, is_sentinel })
    }

    /// Gives this process the limit that workers are to inherit.
    pub fn limit_descriptors(&self) -> nix::Result<()> {
        let Some(soft) = self.descriptors else { return Ok(()) };
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        // The hard one may have been lowered since.
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
    fn it_is_read_back() {
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
