//! The current activity of a nursery. The nursery writes it to a page of memory that its sentinel can read.
//!
//! A nursery that starts a worker runs third-party code (`fork` handlers) and system calls that can block, such as
//! `exec` on a network file system. A nursery that hangs in such code notices neither the death of its agent nor the
//! fence deadline. The nursery and its sentinel therefore share a timer, which the nursery sets before the first step
//! of a start and stops after the last step. As a result, the sentinel wakes up only if a start takes longer than
//! [`PATIENCE_MS`].
//!
//! The page holds one number: an activity (`IMPORTS`, `WAITS`, `DONE`), or the number of the current step of a
//! start. Only the nursery writes the page, before it sets or stops the timer. The sentinel stops the timer before it
//! reads the page.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use elasticrs_sys::clock::timer_of;
use elasticrs_sys::page::Page;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// Milliseconds after which a step of starting a worker is considered hung. The limit is short, because a hang must be
/// detected and all processes must be killed within 100 ms of the agent's death.
pub(crate) const PATIENCE_MS: u16 = 50;

const IMPORTS: u64 = 0;
const WAITS: u64 = 1;
const DONE: u64 = 2;

/// Shared page and timer through which a nursery reports its activity to its sentinel (the process that guards
/// it).
#[derive(Debug)]
pub struct ActivityPage {
    page: Page,
    timer: TimerFd,
    /// Number of the most recent step in starting a worker, such as `fork`. Used only by the nursery process.
    ///
    /// The number increases with each step. If it is unchanged at the next check, the nursery is considered hung.
    step: u64,
}

/// Activity of a nursery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// The nursery is importing modules. It does not watch its agent yet, but the kernel kills the nursery when the
    /// agent dies.
    Imports,
    /// The nursery process is waiting for requests. The process that guards it does not have to intervene, because the
    /// nursery itself kills the workers if the agent dies or its lease expires.
    Waits,
    /// The nursery is starting a worker. The field is a number that increases with each step, such as `fork`.
    Starts(u64),
    /// The nursery has killed all of its descendants and is about to exit.
    Done,
}

impl ActivityPage {
    /// Creates the shared memory page and the timer for a nursery process that is importing modules.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor or memory is available.
    pub fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        Ok(Self { page: Page::of_our_own(c"nursery-activity")?, timer, step: DONE })
    }

    /// Duplicates the descriptors of the shared memory page and the timer, so that they can be sent to another process.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is available.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.page.as_fd().try_clone_to_owned()?, self.timer.as_fd().try_clone_to_owned()?])
    }

    /// Maps the shared memory page and takes ownership of the timer, from descriptors that another process has sent.
    /// See [`Self::descriptors`].
    ///
    /// # Errors
    ///
    /// Fails if the descriptors are not a shared memory page and a timer, or if no memory is available.
    ///
    /// Returns `EMFILE` if a descriptor is missing, because the limit on open files was reached when the descriptors
    /// were received.
    pub(crate) fn from_descriptors(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let [page, timer] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::Error::from_raw_os_error(libc::EMFILE))?;
        Ok(Self { page: Page::map_our_own(page)?, timer: timer_of(timer)?, step: DONE })
    }

    /// Records that the next step of starting a worker has begun.
    pub fn step(&mut self) {
        let is_first = matches!(self.look(), Doing::Waits);
        self.step += 1;
        self.tell(self.step);
        if is_first {
            self.look_later();
        }
    }

    /// Records that the nursery has finished all starts and is waiting for requests.
    pub fn wait(&mut self) {
        if !matches!(self.look(), Doing::Waits) {
            self.tell(WAITS);
            self.look_no_more();
        }
    }

    /// Records that the nursery has killed all of its descendants.
    pub fn end(&self) {
        self.tell(DONE);
    }

    /// Returns the nursery's activity.
    pub fn look(&self) -> Doing {
        match self.page.number().load(Ordering::SeqCst) {
            IMPORTS => Doing::Imports,
            WAITS => Doing::Waits,
            DONE => Doing::Done,
            step => Doing::Starts(step),
        }
    }

    /// Called when the timer has expired. Returns what the nursery is currently doing. Restarts the timer if the
    /// nursery is starting a worker.
    pub(crate) fn look_again(&self) -> Doing {
        self.look_no_more();
        let doing = self.look();
        if matches!(doing, Doing::Starts(_)) {
            self.look_later();
        }
        doing
    }

    /// Returns the timer's descriptor. When it becomes readable, call [`Self::look_again`].
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    fn tell(&self, number: u64) {
        self.page.number().store(number, Ordering::SeqCst);
    }

    fn look_later(&self) {
        // Ignore the result, because setting a timer fails only if the time or the descriptor is invalid.
        let _ = self.timer.set(
            Expiration::OneShot(TimeSpec::from(Duration::from_millis(PATIENCE_MS.into()))),
            TimerSetTimeFlags::empty(),
        );
    }

    fn look_no_more(&self) {
        // Ignore the result, because stopping a valid timer cannot fail.
        let _ = self.timer.unset();
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn both() -> (ActivityPage, ActivityPage) {
        let nursery = ActivityPage::new().unwrap();
        let fds = nursery.descriptors().unwrap();
        (nursery, ActivityPage::from_descriptors(fds).unwrap())
    }

    fn expires(activity: &ActivityPage) -> bool {
        poll(&mut [PollFd::new(activity.timer(), PollFlags::POLLIN)], PollTimeout::from(10_000_u16)) == Ok(1)
    }

    fn runs(activity: &ActivityPage) -> bool {
        activity.timer.get().unwrap().is_some()
    }

    #[test]
    fn the_sentinel_is_woken_only_while_a_start_is_in_progress() {
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
