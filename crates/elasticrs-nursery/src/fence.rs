//! The fence deadline: the time at which the nursery kills all processes of the job on this node. The deadline is in a
//! page of memory that the agent and the nursery share.
//!
//! The other agents consider this agent dead when its lease expires, so its workers must be dead before that. With
//! every renewal of the lease, the agent moves the deadline by an atomic write to the page, which needs neither a
//! system call nor a message. The agent and the nursery also share a timer, which may still be set for an earlier
//! deadline. When the timer expires, the nursery reads the page and sets the timer for the current deadline. The
//! nursery therefore wakes up only about once per lease, and enforces the deadline even while the agent is stopped.
//!
//! The page holds one number. Its low 60 bits are 0 (no deadline), `PASSED`, or the deadline in nanoseconds on
//! `CLOCK_BOOTTIME`. Its high 4 bits are the number of the nursery that enforces the deadline, the holder.
//!
//! 1. Only a process that checks the deadline writes `PASSED`. The nursery usually makes this check. While the nursery
//!    cannot, the sentinel or the agent does. `PASSED` replaces the expired deadline in a compare-and-swap. A renewal
//!    before this write takes effect, and a renewal after it is reported as too late.
//! 2. The timer is never set for a later time than the deadline. A process writes or reads the page before it sets the
//!    timer. After setting the timer, the nursery reads the page again, because the agent may have moved the deadline
//!    and set the timer in between.
//! 3. Only the holder and the agent write `PASSED`. A nursery that was replaced may still be running for a moment. If
//!    such a nursery wrote `PASSED`, the holder would not notice that the deadline has passed, and its workers would
//!    continue to run.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use elasticrs_sys::clock::{boot_now, timer_of};
use elasticrs_sys::page::Page;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

const NONE: u64 = 0;
/// Value that marks a deadline as passed. Read as a time, it is one nanosecond after boot, so it is always in the past.
const PASSED: u64 = 1;
const HOLDER_SHIFT: u32 = 60;
/// Mask of the bits that contain the deadline. They can express times up to 36 years after boot.
const DEADLINE: u64 = (1 << HOLDER_SHIFT) - 1;

/// Number, from 0 to 15, of a nursery process that enforces the deadline for killing the workers.
///
/// A number is reused after 16 nursery processes. This is safe, because the agent has killed the earlier process by
/// then.
pub(crate) type Holder = u8;

/// The fence deadline and its timer.
#[derive(Debug)]
pub struct Fence {
    deadline: Deadline,
    timer: TimerFd,
    /// Number of this nursery. `None` in the agent.
    holder: Option<Holder>,
}

/// Result of checking the fence deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceState {
    /// There is no deadline.
    Unset,
    /// The deadline has not passed yet. Contains the deadline in nanoseconds on `CLOCK_BOOTTIME`.
    At(u64),
    /// The deadline has passed.
    Passed {
        /// True only for the call that marked the deadline as passed.
        first: bool,
    },
    /// Another nursery process now enforces the deadline. The field is the deadline in nanoseconds on `CLOCK_BOOTTIME`,
    /// or `None` if no deadline is pending.
    HandedOver(Option<u64>),
}

impl Fence {
    /// Creates a fence without a deadline.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor or memory is available.
    pub fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        Ok(Self {
            deadline: Deadline { page: Page::of_our_own(c"elasticrs-fence")? },
            timer: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?,
            holder: None,
        })
    }

    /// Duplicates the descriptors of the shared memory page and the timer, so that they can be sent to another process.
    ///
    /// # Errors
    ///
    /// Fails if no file descriptor is available.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.deadline.page.as_fd().try_clone_to_owned()?, self.timer.as_fd().try_clone_to_owned()?])
    }

    /// Maps the page and takes ownership of the timer. The descriptors come from another process, which called
    /// [`Self::descriptors`]. `holder` is the number of this nursery.
    ///
    /// # Errors
    /// The descriptors are not a page and a timer, or no memory is available. `EMFILE` if some descriptors did not
    /// arrive, because this process has reached its limit on open files.
    pub(crate) fn from_descriptors(fds: Vec<OwnedFd>, holder: Holder) -> io::Result<Self> {
        let [page, timer] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| io::Error::from_raw_os_error(libc::EMFILE))?;
        Ok(Self {
            deadline: Deadline { page: Page::map_our_own(page)? },
            timer: timer_of(timer)?,
            holder: Some(holder),
        })
    }

    /// Returns the number, from 0 to 15, of the nursery process that kills the workers at the deadline.
    pub fn holder(&self) -> Holder {
        holder_of(self.deadline.page.number().load(Ordering::SeqCst))
    }

    /// Makes the next nursery process responsible for killing the workers at the deadline. Called by the agent. If the
    /// deadline is already marked as passed, returns `false` and changes nothing. The current nursery process must then
    /// still report it.
    pub fn hand_over(&self) -> bool {
        self.deadline.hand_over()
    }

    /// Sets or removes the deadline. Called by the agent. Returns `false` if the previous deadline had already been
    /// marked as passed.
    ///
    /// # Panics
    ///
    /// Never panics, because every number of nanoseconds is a valid time for a timer.
    pub fn set(&self, boot_ns: Option<u64>) -> bool {
        let moved = self.deadline.set(boot_ns);
        if let Some(at) = moved.timer {
            self.set_timer(at).expect("a valid timer and a valid time");
        }
        !moved.too_late
    }

    /// Checks whether the deadline has passed, and sets the timer for the current deadline. Usually called by the
    /// nursery process.
    ///
    /// The caller does not have to read the timer, because this call also resets a timer that has expired.
    ///
    /// # Errors
    ///
    /// Fails if the timer cannot be set or stopped, which is not expected to happen.
    pub fn look(&self) -> io::Result<FenceState> {
        settle(
            || self.deadline.look(boot_now(), self.holder),
            |look| match look {
                FenceState::At(at) | FenceState::HandedOver(Some(at)) => self.set_timer(at),
                FenceState::Unset | FenceState::Passed { .. } => self.timer.unset(),
                FenceState::HandedOver(None) => Ok(()),
            },
        )
        .map_err(io::Error::from)
    }

    /// Returns true if the deadline has passed. Unlike [`Self::look`], does not mark the deadline as passed and does
    /// not set the timer.
    pub(crate) fn has_passed(&self) -> bool {
        let deadline = self.deadline.page.number().load(Ordering::SeqCst) & DEADLINE;
        deadline != NONE && deadline <= boot_now()
    }

    /// Returns the timer's descriptor. When it becomes readable, call [`Self::look`].
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    fn set_timer(&self, at: u64) -> nix::Result<()> {
        let at = TimeSpec::from(Duration::from_nanos(at));
        self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)
    }
}

/// Reads the deadline with `look` and sets the timer accordingly. Then reads the deadline again, and repeats both steps
/// if the deadline has changed.
fn settle<E>(look: impl Fn() -> FenceState, set_timer: impl Fn(FenceState) -> Result<(), E>) -> Result<FenceState, E> {
    let mut found = look();
    loop {
        set_timer(found)?;
        match (found, look()) {
            // The first call to `look` marked the deadline as passed, so only its result has `first: true`.
            (FenceState::Passed { .. }, FenceState::Passed { first: false }) => return Ok(found),
            (found, same) if same == found => return Ok(found),
            (_, other) => found = other,
        }
    }
}

/// The deadline for killing the workers, stored in memory that the agent and the nursery process share.
#[derive(Debug)]
struct Deadline {
    page: Page,
}

/// Result of changing the fence deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moved {
    /// True if the previous deadline had already been marked as passed.
    too_late: bool,
    /// Time to set the timer to. `None` if there is no deadline, or if the timer is already set to this time or an
    /// earlier one.
    timer: Option<u64>,
}

fn holder_of(number: u64) -> Holder {
    (number >> HOLDER_SHIFT) as Holder
}

impl Deadline {
    fn set(&self, boot_ns: Option<u64>) -> Moved {
        let new = boot_ns.map_or(NONE, |ns| ns.clamp(PASSED + 1, DEADLINE));
        let update = |number| Some(number & !DEADLINE | new);
        let (Ok(before) | Err(before)) = self.page.number().fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
        let before = before & DEADLINE;
        let has_timer = before > PASSED && before <= new;
        Moved { too_late: before == PASSED, timer: (new != NONE && !has_timer).then_some(new) }
    }

    fn hand_over(&self) -> bool {
        // Use a wrapping addition, because nursery number 15 is followed by number 0.
        let update = |number: u64| (number & DEADLINE != PASSED).then_some(number.wrapping_add(1 << HOLDER_SHIFT));
        self.page.number().fetch_update(Ordering::SeqCst, Ordering::SeqCst, update).is_ok()
    }

    fn look(&self, boot_now: u64, holder: Option<Holder>) -> FenceState {
        let number = self.page.number();
        loop {
            let found = number.load(Ordering::SeqCst);
            let deadline = found & DEADLINE;
            if holder.is_some_and(|holder| holder != holder_of(found)) {
                return FenceState::HandedOver((deadline > PASSED).then_some(deadline));
            }
            match deadline {
                NONE => return FenceState::Unset,
                PASSED => return FenceState::Passed { first: false },
                deadline if deadline > boot_now => return FenceState::At(deadline),
                _ => {
                    let passed = found & !DEADLINE | PASSED;
                    if number.compare_exchange(found, passed, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                        return FenceState::Passed { first: true };
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
        /// Set the deadline to the current time plus this number of nanoseconds. `None` removes the deadline.
        Set(Option<i64>),
        /// Advance the clock by this number of nanoseconds.
        Wait(u64),
        /// Transfer the deadline for killing workers to a new nursery process, while the earlier processes still run.
        HandOver,
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (-5..40_i64).prop_map(|delta| Step::Set(Some(delta))),
            1 => Just(Step::Set(None)),
            4 => (0..30_u64).prop_map(Step::Wait),
            1 => Just(Step::HandOver),
        ]
    }

    /// Simulated timer. When it expires, each simulated nursery checks whether the workers must be killed.
    struct Timer {
        deadline: Deadline,
        /// Numbers (0 to 15) of the simulated nursery processes that check the deadline, oldest process first.
        nurseries: Vec<Holder>,
        at: Option<u64>,
        looks: u32,
        passed: u32,
    }

    impl Timer {
        fn look(&mut self, now: u64) {
            self.looks += 1;
            for nursery in std::mem::take(&mut self.nurseries) {
                self.look_by(nursery, now);
            }
        }

        fn look_by(&mut self, nursery: Holder, now: u64) {
            let look = self.deadline.look(now, Some(nursery));
            match look {
                FenceState::HandedOver(at) => self.at = at.or(self.at),
                FenceState::At(at) => self.at = Some(at),
                FenceState::Passed { .. } | FenceState::Unset => self.at = None,
            }
            self.passed += u32::from(look == FenceState::Passed { first: true });
            if !matches!(look, FenceState::HandedOver(_)) {
                self.nurseries.push(nursery);
            }
        }
    }

    fn both() -> (Deadline, Timer) {
        let agent = Deadline { page: Page::of_our_own(c"elasticrs-fence").unwrap() };
        let page = agent.page.as_fd().try_clone_to_owned().unwrap();
        let deadline = Deadline { page: Page::map_our_own(page).unwrap() };
        (agent, Timer { deadline, nurseries: vec![0], at: None, looks: 0, passed: 0 })
    }

    proptest! {
        #[test]
        fn the_fence_deadline_passes_once_and_exactly_at_its_time(steps in prop::collection::vec(any_step(), 0..60)) {
            let (agent, mut nursery) = both();
            let mut now = 1_000_u64;
            let mut expected: Option<u64> = None;
            let mut passed = 0;
            for step in steps {
                match step {
                    Step::Set(delta) => {
                        let new = delta.map(|delta| now.checked_add_signed(delta).unwrap());
                        let was_passed = agent.page.number().load(Ordering::Relaxed) & DEADLINE == PASSED;
                        let moved = agent.set(new);
                        prop_assert_eq!(moved.too_late, was_passed);
                        nursery.at = moved.timer.or(nursery.at);
                        expected = new;
                    }
                    Step::Wait(time) => now += time,
                    Step::HandOver => {
                        let is_passed = agent.page.number().load(Ordering::Relaxed) & DEADLINE == PASSED;
                        prop_assert_eq!(agent.hand_over(), !is_passed);
                        if !is_passed {
                            let next = holder_of(agent.page.number().load(Ordering::Relaxed));
                            nursery.look_by(next, now);
                        }
                    }
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
    fn a_deadline_renewed_in_time_is_checked_once_per_lease() {
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
    fn a_late_renewal_is_reported_and_starts_a_new_lease() {
        let (deadline, _) = both();
        assert_eq!(deadline.set(Some(100)), Moved { too_late: false, timer: Some(100) });
        assert_eq!(deadline.set(Some(200)), Moved { too_late: false, timer: None });
        assert_eq!(deadline.look(150, Some(0)), FenceState::At(200));
        assert_eq!(deadline.look(200, Some(0)), FenceState::Passed { first: true });
        assert_eq!(deadline.look(201, Some(0)), FenceState::Passed { first: false });
        assert_eq!(deadline.set(Some(300)), Moved { too_late: true, timer: Some(300) });
        assert_eq!(deadline.look(202, Some(0)), FenceState::At(300));
        assert_eq!(deadline.set(Some(250)), Moved { too_late: false, timer: Some(250) }, "nearer than the timer");
        assert_eq!(deadline.set(None), Moved { too_late: false, timer: None });
        assert_eq!(deadline.look(400, Some(0)), FenceState::Unset);
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
    fn a_check_silences_the_timer_until_the_deadline() {
        let agent = Fence::new().unwrap();
        let nursery = Fence::from_descriptors(agent.descriptors().unwrap(), agent.holder()).unwrap();
        assert_eq!(nursery.look().unwrap(), FenceState::Unset);
        let (near, far) = (boot_now() + 1_000_000, boot_now() + 3_600_000_000_000);
        assert!(agent.set(Some(near)) && agent.set(Some(far)));
        until_readable(&nursery);
        assert_eq!(nursery.look().unwrap(), FenceState::At(far));
        assert!(!is_readable(&nursery), "it would be looked at again and again");
        assert_eq!(left(&nursery).map(|left| left > Duration::from_secs(3000)), Some(true));
        assert!(agent.set(Some(near)));
        until_readable(&nursery);
        assert_eq!(nursery.look().unwrap(), FenceState::Passed { first: true });
        assert_eq!(nursery.look().unwrap(), FenceState::Passed { first: false });
        assert!(!is_readable(&nursery));
        assert!(!agent.set(None));
        assert_eq!((nursery.look().unwrap(), left(&nursery)), (FenceState::Unset, None));
    }

    fn left(fence: &Fence) -> Option<Duration> {
        match fence.timer.get().unwrap()? {
            Expiration::OneShot(left) => Some(left.into()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_deadline_moved_earlier_during_a_check_is_not_overwritten() {
        let (agent, nursery) = both();
        let timer = Cell::new(None);
        agent.set(Some(300));
        let nearer = Cell::new(Some(200));
        let set_timer = |look| {
            if let Some(nearer) = nearer.take() {
                // Let the agent move the deadline after the nursery process has read it, but before the nursery process
                // sets the timer.
                timer.set(agent.set(Some(nearer)).timer.map(FenceState::At));
            }
            timer.set(Some(look));
            Ok::<_, ()>(())
        };
        assert_eq!(settle(|| nursery.deadline.look(100, Some(0)), set_timer), Ok(FenceState::At(200)));
        assert_eq!(timer.get(), Some(FenceState::At(200)));
    }
}
