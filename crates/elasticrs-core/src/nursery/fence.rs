//! The deadline at which everything is killed, in a page that agent and nursery share.
//!
//! A lease that is not renewed ends, and what it stood for must have ended before. The agent moves the deadline with
//! every renewal, without a system call or a message. A timer, which both share as well, is set for an earlier deadline;
//! when it expires, the nursery looks, and sets it for the present one. So the nursery wakes up about once in a lease, and
//! needs nothing of an agent that is stopped.
//!
//! The page holds one number: 0 (no deadline), [`PASSED`], or nanoseconds on `CLOCK_BOOTTIME`.
//!
//! 1. Only who looks writes `PASSED` (the nursery; the agent while that waits for a start), by an exchange with the deadline that it found to have come. So a renewal either
//!    comes before it, and counts, or after, and says that it was too late.
//! 2. The timer is never set for later than the deadline. Whoever sets it has written or read the page before, and the
//!    nursery reads the page again afterwards, since it may have overwritten what the agent has set meanwhile.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use elasticrs_runtime::clock::boot_now;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::sys::page::Page;
use crate::sys::timer;

const NONE: u64 = 0;
/// Also a deadline: the first nanosecond after boot.
const PASSED: u64 = 1;

/// The deadline and its timer.
#[derive(Debug)]
pub struct Fence {
    deadline: Deadline,
    timer: TimerFd,
}

/// What the nursery found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// There is no deadline.
    Unset,
    /// It has not come yet.
    At(u64),
    /// It has come.
    Passed {
        /// This look is the one that found it.
        first: bool,
    },
}

impl Fence {
    /// Without a deadline.
    ///
    /// # Errors
    /// No descriptor or no memory.
    pub fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        Ok(Self {
            deadline: Deadline { page: Page::of_our_own(c"elasticrs-fence")? },
            timer: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?,
        })
    }

    /// Descriptors of its own for another process: page and timer.
    ///
    /// # Errors
    /// No descriptor.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.deadline.page.as_fd().try_clone_to_owned()?, self.timer.as_fd().try_clone_to_owned()?])
    }

    /// The one whose descriptors these are.
    ///
    /// # Errors
    /// They are not; there is no memory. `EMFILE` when they did not all arrive.
    pub fn from_descriptors(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let [page, timer] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::Error::from_raw_os_error(libc::EMFILE))?;
        Ok(Self { deadline: Deadline { page: Page::map(page)? }, timer: timer::from_descriptor(timer)? })
    }

    /// Sets the deadline, or takes it back (the agent's side); `false` when the one before had passed.
    ///
    /// # Panics
    /// Never: any number of nanoseconds is a time that a timer takes.
    pub fn set(&self, boot_ns: Option<u64>) -> bool {
        let moved = self.deadline.set(boot_ns);
        if let Some(at) = moved.timer {
            self.set_timer(at).expect("a valid timer and a valid time");
        }
        !moved.too_late
    }

    /// Compares the deadline with the time, and sets the timer for it (the nursery's side, mostly). The timer's descriptor is
    /// unreadable afterwards, and needs no reading, since setting or stopping it has that effect.
    ///
    /// # Errors
    /// None that is known.
    pub fn look(&self) -> io::Result<Look> {
        settle(
            || self.deadline.look(boot_now()),
            |look| match look {
                Look::At(at) => self.set_timer(at),
                Look::Unset | Look::Passed { .. } => self.timer.unset(),
            },
        )
        .map_err(io::Error::from)
    }

    /// True if the deadline has come, for somebody who does not act before others that look.
    pub fn has_passed(&self) -> bool {
        let deadline = self.deadline.page.number().load(Ordering::SeqCst);
        deadline != NONE && deadline <= boot_now()
    }

    /// Readable when [`Self::look`] is due.
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    fn set_timer(&self, at: u64) -> nix::Result<()> {
        let at = TimeSpec::from(Duration::from_nanos(at));
        self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)
    }
}

/// Looks, and sets the timer for what was found, until nobody has changed that meanwhile.
fn settle<E>(look: impl Fn() -> Look, set_timer: impl Fn(Look) -> Result<(), E>) -> Result<Look, E> {
    let mut found = look();
    loop {
        set_timer(found)?;
        match (found, look()) {
            // The first look has written it.
            (Look::Passed { .. }, Look::Passed { first: false }) => return Ok(found),
            (found, same) if same == found => return Ok(found),
            (_, other) => found = other,
        }
    }
}

/// The number in the page.
#[derive(Debug)]
struct Deadline {
    page: Page,
}

/// What follows from a change of the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moved {
    /// The deadline before had passed already.
    too_late: bool,
    /// The timer may be later than this, or not run at all.
    timer: Option<u64>,
}

impl Deadline {
    fn set(&self, boot_ns: Option<u64>) -> Moved {
        let new = boot_ns.map_or(NONE, |ns| ns.max(PASSED + 1));
        let before = self.page.number().swap(new, Ordering::SeqCst);
        let has_timer = before > PASSED && before <= new;
        Moved { too_late: before == PASSED, timer: (new != NONE && !has_timer).then_some(new) }
    }

    fn look(&self, boot_now: u64) -> Look {
        let number = self.page.number();
        loop {
            match number.load(Ordering::SeqCst) {
                NONE => return Look::Unset,
                PASSED => return Look::Passed { first: false },
                deadline if deadline > boot_now => return Look::At(deadline),
                come => {
                    if number.compare_exchange(come, PASSED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                        return Look::Passed { first: true };
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// Relative to the present.
        Set(Option<i64>),
        /// Time goes by.
        Wait(u64),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (-5..40_i64).prop_map(|delta| Step::Set(Some(delta))),
            1 => Just(Step::Set(None)),
            4 => (0..30_u64).prop_map(Step::Wait),
        ]
    }

    /// A timer, and what its expiry does.
    struct Timer {
        deadline: Deadline,
        at: Option<u64>,
        looks: u32,
        passed: u32,
    }

    impl Timer {
        fn look(&mut self, now: u64) {
            self.looks += 1;
            self.at = match self.deadline.look(now) {
                Look::At(at) => Some(at),
                Look::Passed { first } => {
                    self.passed += u32::from(first);
                    None
                }
                Look::Unset => None,
            };
        }
    }

    fn both() -> (Deadline, Timer) {
        let agent = Deadline { page: Page::of_our_own(c"elasticrs-fence").unwrap() };
        let page = agent.page.as_fd().try_clone_to_owned().unwrap();
        let deadline = Deadline { page: Page::map(page).unwrap() };
        (agent, Timer { deadline, at: None, looks: 0, passed: 0 })
    }

    proptest! {
        #[test]
        fn it_passes_exactly_when_the_time_has_come(steps in prop::collection::vec(any_step(), 0..60)) {
            let (agent, mut nursery) = both();
            let mut now = 1_000_u64;
            let mut expected: Option<u64> = None;
            let mut passed = 0;
            for step in steps {
                match step {
                    Step::Set(delta) => {
                        let new = delta.map(|delta| now.checked_add_signed(delta).unwrap());
                        let was_passed = agent.page.number().load(Ordering::Relaxed) == PASSED;
                        let moved = agent.set(new);
                        prop_assert_eq!(moved.too_late, was_passed);
                        nursery.at = moved.timer.or(nursery.at);
                        expected = new;
                    }
                    Step::Wait(time) => now += time,
                }
                while nursery.at.is_some_and(|at| at <= now) {
                    nursery.look(now);
                }
                if expected.is_some_and(|at| at <= now) {
                    expected = None;
                    passed += 1;
                }
                prop_assert_eq!(nursery.passed, passed);
            }
        }
    }

    #[test]
    fn a_deadline_that_is_moved_in_time_costs_one_look_in_a_lease() {
        let (lease, step) = (5_000, 1_000);
        let (deadline, mut nursery) = both();
        let mut set = 0;
        for now in (10_000..10_000 + 100 * lease).step_by(usize::try_from(step).unwrap()) {
            let moved = deadline.set(Some(now + lease));
            if moved.timer.is_some() {
                set += 1;
                nursery.at = moved.timer;
            }
            while nursery.at.is_some_and(|at| at <= now) {
                nursery.look(now);
            }
        }
        assert_eq!((set, nursery.passed), (1, 0));
        assert!(nursery.looks <= 101, "{}", nursery.looks);
    }

    #[test]
    fn a_renewal_that_comes_too_late_says_so_and_the_next_lease_begins() {
        let (deadline, _) = both();
        assert_eq!(deadline.set(Some(100)), Moved { too_late: false, timer: Some(100) });
        assert_eq!(deadline.set(Some(200)), Moved { too_late: false, timer: None });
        assert_eq!(deadline.look(150), Look::At(200));
        assert_eq!(deadline.look(200), Look::Passed { first: true });
        assert_eq!(deadline.look(201), Look::Passed { first: false });
        assert_eq!(deadline.set(Some(300)), Moved { too_late: true, timer: Some(300) });
        assert_eq!(deadline.look(202), Look::At(300));
        assert_eq!(deadline.set(Some(250)), Moved { too_late: false, timer: Some(250) }, "nearer than the timer");
        assert_eq!(deadline.set(None), Moved { too_late: false, timer: None });
        assert_eq!(deadline.look(400), Look::Unset);
    }

    fn is_readable(fence: &Fence) -> bool {
        let mut polled = [PollFd::new(fence.timer(), PollFlags::POLLIN)];
        poll(&mut polled, PollTimeout::ZERO).unwrap() > 0
    }

    fn until_readable(fence: &Fence) {
        let mut polled = [PollFd::new(fence.timer(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut polled, PollTimeout::from(10_000_u16)), Ok(1));
    }

    #[test]
    fn a_look_quiets_the_timer_until_the_deadline() {
        let agent = Fence::new().unwrap();
        let nursery = Fence::from_descriptors(agent.descriptors().unwrap()).unwrap();
        assert_eq!(nursery.look().unwrap(), Look::Unset);
        let (near, far) = (boot_now() + 1_000_000, boot_now() + 3_600_000_000_000);
        assert!(agent.set(Some(near)) && agent.set(Some(far)));
        until_readable(&nursery);
        assert_eq!(nursery.look().unwrap(), Look::At(far));
        assert!(!is_readable(&nursery), "it would be looked at again and again");
        assert_eq!(left(&nursery).map(|left| left > Duration::from_secs(3000)), Some(true));
        assert!(agent.set(Some(near)));
        until_readable(&nursery);
        assert_eq!(nursery.look().unwrap(), Look::Passed { first: true });
        assert_eq!(nursery.look().unwrap(), Look::Passed { first: false });
        assert!(!is_readable(&nursery));
        assert!(!agent.set(None));
        assert_eq!((nursery.look().unwrap(), left(&nursery)), (Look::Unset, None));
    }

    fn left(fence: &Fence) -> Option<Duration> {
        match fence.timer.get().unwrap()? {
            Expiration::OneShot(left) => Some(left.into()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_deadline_that_comes_nearer_during_a_look_is_not_overwritten() {
        let (agent, nursery) = both();
        let timer = Cell::new(None);
        agent.set(Some(300));
        let nearer = Cell::new(Some(200));
        let set_timer = |look| {
            if let Some(nearer) = nearer.take() {
                // The agent's call comes between the nursery's look and its own.
                timer.set(agent.set(Some(nearer)).timer.map(Look::At));
            }
            timer.set(Some(look));
            Ok::<_, ()>(())
        };
        assert_eq!(settle(|| nursery.deadline.look(100), set_timer), Ok(Look::At(200)));
        assert_eq!(timer.get(), Some(Look::At(200)));
    }
}
