//! What a nursery is doing, as its sentinel sees it, in a page that both share.
//!
//! A nursery that starts a worker runs code of others (`fork` handlers, an exec on a network file system), and may hang there.
//! Then it sees neither the end of its agent nor the deadline of the fence. At the first step of a start it sets a timer, which both share as
//! well, and stops it after the last one. So the sentinel wakes up only if a start takes longer than [`PATIENCE_MS`].
//!
//! The page holds one number: what the nursery does ([`IMPORTS`], [`WAITS`], [`DONE`]), or the number of the step that it
//! is at. Only the nursery writes it, before it sets the timer or stops it; the sentinel stops the timer before it reads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::sys::page::Page;
use crate::sys::timer;

/// A step of a start that takes longer may hang. The end of the agent is followed by the end of everything within 100 ms.
pub const PATIENCE_MS: u16 = 50;

const IMPORTS: u64 = 0;
const WAITS: u64 = 1;
const DONE: u64 = 2;

/// What is shared.
#[derive(Debug)]
pub struct Activity {
    page: Page,
    timer: TimerFd,
    /// The number of the last step (the nursery's side).
    step: u64,
}

/// What the nursery does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// It does not watch its agent yet, but dies with it.
    Imports,
    /// It watches its agent and the fence, and acts by itself.
    Waits,
    /// The step of a start with this number, which differs from all others.
    Starts(u64),
    /// It has ended all that was below it, and ends.
    Done,
}

impl Activity {
    /// Of a nursery that imports.
    ///
    /// # Errors
    /// No descriptor or no memory.
    pub fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        Ok(Self { page: Page::of_our_own(c"nursery-activity")?, timer, step: DONE })
    }

    /// Descriptors of its own for another process: page and timer.
    ///
    /// # Errors
    /// No descriptor.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.page.as_fd().try_clone_to_owned()?, self.timer.as_fd().try_clone_to_owned()?])
    }

    /// The one whose descriptors these are.
    ///
    /// # Errors
    /// They are not; there is no memory. `EMFILE` when they did not all arrive.
    pub fn from_descriptors(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let [page, timer] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::Error::from_raw_os_error(libc::EMFILE))?;
        Ok(Self { page: Page::map(page)?, timer: timer::from_descriptor(timer)?, step: DONE })
    }

    /// The nursery begins the next step of a start.
    pub fn step(&mut self) {
        let is_first = matches!(self.look(), Doing::Waits);
        self.step += 1;
        self.tell(self.step);
        if is_first {
            self.look_later();
        }
    }

    /// The nursery waits; all starts have ended.
    pub fn wait(&mut self) {
        if !matches!(self.look(), Doing::Waits) {
            self.tell(WAITS);
            self.look_no_more();
        }
    }

    /// The nursery has ended all that was below it.
    pub fn end(&self) {
        self.tell(DONE);
    }

    /// What it does.
    pub fn look(&self) -> Doing {
        match self.page.number().load(Ordering::SeqCst) {
            IMPORTS => Doing::Imports,
            WAITS => Doing::Waits,
            DONE => Doing::Done,
            step => Doing::Starts(step),
        }
    }

    /// The same, after the timer has expired; it expires again if a start goes on.
    pub fn look_again(&self) -> Doing {
        self.look_no_more();
        let doing = self.look();
        if matches!(doing, Doing::Starts(_)) {
            self.look_later();
        }
        doing
    }

    /// Readable when [`Self::look_again`] is due.
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    fn tell(&self, number: u64) {
        self.page.number().store(number, Ordering::SeqCst);
    }

    fn look_later(&self) {
        // The only errors are those of a time or a descriptor that is none.
        let _ = self.timer.set(
            Expiration::OneShot(TimeSpec::from(Duration::from_millis(PATIENCE_MS.into()))),
            TimerSetTimeFlags::empty(),
        );
    }

    fn look_no_more(&self) {
        // As above.
        let _ = self.timer.unset();
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn both() -> (Activity, Activity) {
        let nursery = Activity::new().unwrap();
        let fds = nursery.descriptors().unwrap();
        (nursery, Activity::from_descriptors(fds).unwrap())
    }

    fn expires(activity: &Activity) -> bool {
        poll(&mut [PollFd::new(activity.timer(), PollFlags::POLLIN)], PollTimeout::from(10_000_u16)) == Ok(1)
    }

    fn runs(activity: &Activity) -> bool {
        activity.timer.get().unwrap().is_some()
    }

    #[test]
    fn who_watches_is_woken_only_while_a_start_goes_on() {
        let (mut nursery, sentinel) = both();
        assert_eq!(sentinel.look(), Doing::Imports);
        nursery.wait();
        assert_eq!((sentinel.look(), runs(&sentinel)), (Doing::Waits, false));
        nursery.step();
        let first = sentinel.look();
        assert!(matches!(first, Doing::Starts(_)) && runs(&sentinel));
        nursery.step();
        assert!(expires(&sentinel));
        let second = sentinel.look_again();
        assert!(matches!(second, Doing::Starts(_)) && second != first && runs(&sentinel));
        assert!(expires(&sentinel));
        assert_eq!(sentinel.look_again(), second, "it hangs");
        nursery.wait();
        assert_eq!((sentinel.look(), runs(&sentinel)), (Doing::Waits, false));
        nursery.step();
        assert!(!matches!(sentinel.look(), Doing::Waits) && sentinel.look() != second);
        nursery.end();
        assert_eq!((sentinel.look_again(), runs(&sentinel)), (Doing::Done, false));
    }
}
