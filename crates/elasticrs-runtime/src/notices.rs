//! Lines for the user: what a server refuses, closes or cannot do.
//!
//! A server says them on its own thread; where they go is its owner's choice: to the agent's events, or to a [`List`] that
//! somebody asks from time to time.
//!
//! - **NOTICE-1** at most [`LINES`] lines in each [`WINDOW`]; the next one says how many were left out;
//! - **NOTICE-2** a list that nobody asks is bounded, too, and says how many it has dropped.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::lock;
use crate::wake::Wake;

/// So many lines in each [`WINDOW`]; the others are counted.
pub const LINES: u32 = 10;
/// See [`LINES`].
pub const WINDOW: Duration = Duration::from_secs(10);
/// So many are kept for a user who does not ask.
const KEPT: usize = 256;

/// Where lines go.
pub type Tell = Box<dyn Fn(String) + Send>;

/// Passes lines on. A peer that misbehaves in a loop costs a few lines and a number.
pub struct Notices {
    tell: Tell,
    rate: RefCell<Rate>,
}

/// At most so many in each window; the others are counted.
#[derive(Debug)]
pub struct Rate {
    most: u32,
    window: Duration,
    since: Option<Instant>,
    told: u32,
    left_out: u64,
}

impl Notices {
    /// To `tell`, at a bounded rate.
    pub fn new(tell: Tell) -> Self {
        Self { tell, rate: RefCell::new(Rate::new(LINES, WINDOW)) }
    }

    /// One line, or one more that is counted.
    pub fn say(&self, line: String) {
        self.say_at(line, Instant::now());
    }

    fn say_at(&self, line: String, now: Instant) {
        let Some(left_out) = self.rate.borrow_mut().admit(now) else { return };
        (self.tell)(match left_out {
            0 => line,
            left_out => format!("{line} ({left_out} similar messages left out)"),
        });
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notices").field("rate", &self.rate).finish_non_exhaustive()
    }
}

impl Rate {
    /// So many in each window, which begins with the first of them.
    pub fn new(most: u32, window: Duration) -> Self {
        Self { most, window, since: None, told: 0, left_out: 0 }
    }

    /// Whether there is room for one, and then how many before it were left out.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= self.window) {
            (self.since, self.told) = (Some(now), 0);
        }
        if self.told == self.most {
            self.left_out += 1;
            return None;
        }
        self.told += 1;
        Some(self.take_left_out())
    }

    /// How many were left out since the last one that was admitted.
    pub fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

/// A bounded list of lines, with a descriptor that is readable while it is not empty, for those who want one.
#[derive(Debug, Default)]
pub struct List {
    inner: Mutex<Inner>,
    wake: OnceLock<Wake>,
}

#[derive(Debug, Default)]
struct Inner {
    lines: VecDeque<String>,
    dropped: u64,
}

impl List {
    /// Adds a line; beyond the limit they are only counted.
    pub fn add(&self, line: String) {
        let mut inner = lock(&self.inner);
        if inner.lines.len() < KEPT {
            inner.lines.push_back(line);
        } else {
            inner.dropped += 1;
        }
        if let Some(wake) = self.wake.get() {
            wake.set();
        }
    }

    /// All lines; never blocks.
    pub fn take(&self) -> Vec<String> {
        let mut inner = lock(&self.inner);
        if let Some(wake) = self.wake.get() {
            wake.clear();
        }
        let Inner { mut lines, dropped } = std::mem::take(&mut *inner);
        if dropped > 0 {
            lines.push_back(format!("{dropped} more notices were dropped"));
        }
        lines.into()
    }

    /// Readable while [`Self::take`] has something; made when it is first asked for.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        let inner = lock(&self.inner);
        if let Some(wake) = self.wake.get() {
            return Ok(wake.as_fd());
        }
        let wake = Wake::new()?;
        if !inner.lines.is_empty() {
            wake.set();
        }
        // Under the lock: nobody else makes one meanwhile.
        Ok(self.wake.get_or_init(|| wake).as_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn is_readable(list: &List) -> bool {
        poll(&mut [PollFd::new(list.fd().unwrap(), PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn a_flood_costs_a_few_lines_and_a_number() {
        let list = Arc::new(List::default());
        let notices = {
            let list = Arc::clone(&list);
            Notices::new(Box::new(move |line| list.add(line)))
        };
        let start = Instant::now();
        for number in 0..100 {
            notices.say_at(format!("{number}"), start);
        }
        assert_eq!(list.take().len(), 10);
        notices.say_at("later".into(), start + WINDOW);
        notices.say_at("last".into(), start + WINDOW);
        assert_eq!(list.take(), ["later (90 similar messages left out)", "last"]);
    }

    #[test]
    fn a_list_that_nobody_asks_counts_what_it_drops() {
        let list = List::default();
        assert!(!is_readable(&list));
        for number in 0..KEPT + 3 {
            list.add(number.to_string());
        }
        assert!(is_readable(&list));
        let taken = list.take();
        assert_eq!(
            (taken.len(), taken[0].as_str(), taken[KEPT].as_str()),
            (KEPT + 1, "0", "3 more notices were dropped")
        );
        assert!(list.take().is_empty());
    }

    #[test]
    fn a_descriptor_that_is_asked_for_late_tells_of_what_is_there() {
        let list = List::default();
        list.add("early".into());
        assert!(is_readable(&list));
        assert_eq!(list.take(), ["early"]);
        assert!(!is_readable(&list));
    }
}
