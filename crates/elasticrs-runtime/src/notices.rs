//! A server's notices to the user: about rejected requests, closed connections, and errors.
//!
//! A server creates the notices on its own thread. The server's owner chooses the destination: the agent's events, or a
//! [`List`] that the user reads from time to time.
//!
//! - **NOTICE-1** There are at most [`LINES`] lines in each [`WINDOW`]. Further lines are omitted, and the next line
//!   that is passed on says how many.
//! - **NOTICE-2** A list stores a limited number of lines and drops further ones. When it is read, it also reports the
//!   number of dropped lines.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, io};

use crate::lock;
use crate::threads::WakeFd;

/// Maximum number of lines in each [`WINDOW`]. Further lines are only counted.
pub const LINES: u32 = 10;
/// Time window in which at most [`LINES`] lines are allowed.
pub const WINDOW: Duration = Duration::from_secs(10);
/// Maximum number of lines that are kept until the user fetches them.
const KEPT: usize = 256;

/// Function that receives the lines.
pub type Tell = Box<dyn Fn(String) + Send>;

/// Passes lines to the user at a limited rate. If a peer misbehaves repeatedly, the user sees only a few lines and a
/// count.
pub struct Notices {
    tell: Tell,
    rate: RefCell<Rate>,
}

/// Rate limit with a fixed number of events per window. Further events are only counted.
#[derive(Debug)]
pub struct Rate {
    most: u32,
    window: Duration,
    since: Option<Instant>,
    admitted: u32,
    left_out: u64,
}

impl Notices {
    /// Creates a `Notices` that passes lines to `tell`.
    pub fn new(tell: Tell) -> Self {
        Self { tell, rate: RefCell::new(Rate::new(LINES, WINDOW)) }
    }

    /// Passes the line to the user, or only counts it if the limit is reached.
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
    /// Creates a limit of `most` events per window. A window starts with its first event.
    pub fn new(most: u32, window: Duration) -> Self {
        Self { most, window, since: None, admitted: 0, left_out: 0 }
    }

    /// Admits or rejects an event. If the event is admitted, returns the number of events that were rejected since
    /// the previous admitted one. `None` if the event is rejected.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= self.window) {
            (self.since, self.admitted) = (Some(now), 0);
        }
        if self.admitted == self.most {
            self.left_out += 1;
            return None;
        }
        self.admitted += 1;
        Some(self.take_left_out())
    }

    /// Returns the number of events that were rejected since the last admitted one, and resets this number to zero.
    pub fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

/// A bounded list of lines. Its file descriptor, which is created on request, is readable while the list is not empty.
#[derive(Debug, Default)]
pub struct List {
    inner: Mutex<Inner>,
    wake: OnceLock<WakeFd>,
}

#[derive(Debug, Default)]
struct Inner {
    lines: VecDeque<String>,
    dropped: u64,
}

impl List {
    /// Adds a line. If the list is full, only counts the line.
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

    /// Returns and removes all lines. Never blocks.
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

    /// Returns a descriptor that is readable while [`Self::take`] has lines to return. The descriptor is created on the
    /// first call.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        let inner = lock(&self.inner);
        if let Some(wake) = self.wake.get() {
            return Ok(wake.as_fd());
        }
        let wake = WakeFd::new()?;
        if !inner.lines.is_empty() {
            wake.set();
        }
        // `get_or_init` always stores `wake`, because this thread holds the lock and no other thread can create a
        // descriptor.
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
    fn a_flood_of_notices_is_reduced_to_a_few_lines_and_a_count() {
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
    fn an_unread_notice_list_counts_the_notices_that_it_drops() {
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
    fn a_descriptor_requested_late_is_readable_if_notices_are_pending() {
        let list = List::default();
        list.add("early".into());
        assert!(is_readable(&list));
        assert_eq!(list.take(), ["early"]);
        assert!(!is_readable(&list));
    }
}
