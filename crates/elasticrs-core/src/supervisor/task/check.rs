//! Periodic checks of the supervisor. They decide what to do when the nursery (the process that starts the workers)
//! does not report the exits of dead workers. They also reap zombies that this process adopts if it is pid 1, for
//! example in a container without an init program.
//!
//! - **ORPHAN-1** A child that other code waits for is not reaped here, because its exit status would be lost. The
//!   kernel does not tell an adopted child from a child that Python has started in another session. Code that starts a
//!   child waits for it soon after its exit, so only children that are still zombies at a later check are reaped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use elasticrs_nursery::held::{self, HeldProcess};
use elasticrs_nursery::tree::children_of_self;
use elasticrs_sys::process::child_has_ended;
use elasticrs_sys::procfs::{START_TIME, Stat};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getsid};

use crate::supervisor::event::SweepOutcome;
use crate::supervisor::queue::Queue;

/// Time between two checks of the workers, the nursery process, and the process that guards the nursery.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Workers that the last periodic check found dead although their exits had not been reported.
#[derive(Debug, Default)]
pub(super) struct Unreported {
    /// Pids of the workers that the nursery should have reaped.
    dead: Vec<i32>,
    /// Pids of the workers that cannot be reaped yet, because a tracer holds them.
    held: Vec<i32>,
}

/// Result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CheckOutcome {
    pub(super) nursery: Option<NurseryAction>,
    /// Time until the next check.
    pub(super) pause: Duration,
    /// Workers whose exits the supervisor must report itself. The nursery cannot reap these workers, because a tracer
    /// (such as a debugger) still holds them.
    pub(super) held: Vec<(i32, HeldProcess)>,
}

/// Action to take if the nursery does not report the exits of dead workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NurseryAction {
    /// Continue the nursery, which may have been stopped by a signal.
    Resume,
    /// Kill the nursery, because it hangs.
    Kill,
}

impl Unreported {
    /// Decides what to do about dead workers whose exits have not been reported. The decision depends on whether the
    /// workers were already dead at the previous check.
    ///
    /// `held` contains dead workers that a tracer, such as a debugger, has not released. `dead` contains all other dead
    /// workers. `is_starting` is true while a replacement is being started.
    pub(super) fn check(&mut self, dead: Vec<i32>, held: Vec<(i32, HeldProcess)>, is_starting: bool) -> CheckOutcome {
        // Unreported exits usually mean that the nursery hangs. While a replacement is being started, however, the
        // nursery may only be waiting for that start. Do not kill the nursery in that case, because the start has its
        // own deadline.
        let is_overdue = !is_starting && dead.iter().any(|pid| self.dead.contains(pid));
        let action = if is_overdue { NurseryAction::Kill } else { NurseryAction::Resume };
        let nursery = (!dead.is_empty()).then_some(action);
        let pause = if dead.is_empty() && !held.is_empty() { held::LIMIT } else { CHECK_INTERVAL };
        self.dead = dead;
        let before = std::mem::replace(&mut self.held, held.iter().map(|(pid, _)| *pid).collect());
        let held = held.into_iter().filter(|(pid, _)| before.contains(pid)).collect();
        CheckOutcome { nursery, pause, held }
    }
}

/// Reports exited processes that cannot be reaped, because a tracer holds them. Each process is reported only once.
#[derive(Debug)]
pub(super) struct HeldReports {
    queue: Arc<Queue>,
    /// Pids of the processes that were already reported.
    reported: BTreeSet<i32>,
}

impl HeldReports {
    pub(super) fn new(queue: Arc<Queue>) -> Self {
        Self { queue, reported: BTreeSet::new() }
    }

    /// Reports that an exited process is held by a tracer.
    pub(super) fn report(&mut self, pid: i32, message: String) {
        if self.reported.insert(pid) {
            self.queue.degraded(message);
        }
    }

    /// Reports the leftover processes that have exited but cannot be reaped, because a tracer holds them.
    pub(super) fn report_all(&mut self, swept: &SweepOutcome) {
        for &pid in &swept.held {
            self.report(pid, held::told(pid));
        }
    }
}

/// A zombie child: its pid, and its start time, which distinguishes it from a later child with the same pid. The start
/// time is `None` if `/proc` does not show it.
type Zombie = (i32, Option<u64>);

/// Zombie children of this process that the last check found.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    found: BTreeSet<Zombie>,
}

impl Orphans {
    /// Reaps all orphans that were already zombies at the previous call. Does nothing if this process is not pid 1.
    ///
    /// `nursery` is the pid of the current nursery, which other code of the supervisor reaps. `None` if there is no
    /// nursery.
    pub(super) fn reap(&mut self, nursery: Option<i32>) {
        if std::process::id() != 1 {
            return;
        }
        let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let has_zombies = waitid(Id::All, peek).is_ok_and(|status| status.pid().is_some());
        let zombies = if has_zombies { zombies(nursery) } else { BTreeSet::new() };
        for (pid, _) in self.overdue(&zombies) {
            // Ignore errors, because other code may have reaped the child by now.
            let _ = waitid(Id::Pid(Pid::from_raw(pid)), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG);
        }
    }

    /// Returns the zombies that were also found by the previous call, and remembers the others.
    fn overdue(&mut self, zombies: &BTreeSet<Zombie>) -> BTreeSet<Zombie> {
        let overdue: BTreeSet<Zombie> = zombies.intersection(&self.found).copied().collect();
        self.found = zombies.difference(&overdue).copied().collect();
        overdue
    }
}

/// Returns the zombie children that belong to other sessions, except `nursery`. Children in this process's own session
/// are left out, because Python started them.
fn zombies(nursery: Option<i32>) -> BTreeSet<Zombie> {
    let own = getsid(None);
    let is_foreign = |pid: &i32| nursery != Some(*pid) && getsid(Some(Pid::from_raw(*pid))) != own;
    // Ask the kernel, because `/proc` may be missing or show another pid namespace.
    let is_orphan = |pid: &i32| is_foreign(pid) && child_has_ended(*pid) == Some(true);
    let started = |pid: i32| Stat::of(pid).and_then(|stat| stat.field(START_TIME));
    children_of_self().into_iter().filter(is_orphan).map(|pid| (pid, started(pid))).collect()
}

#[cfg(test)]
mod tests {
    use elasticrs_sys::process::WorkerExit;

    use super::*;
    use crate::supervisor::event::Event;
    use crate::supervisor::queue::Next;

    fn held(pid: i32) -> (i32, HeldProcess) {
        (pid, HeldProcess { exit: WorkerExit::Unknown, tracer: 9, told: "a tracer holds it".to_owned() })
    }

    #[test]
    fn a_nursery_that_does_not_report_a_dead_worker_is_resumed_then_killed() {
        let mut unreported = Unreported::default();
        let mut check = |dead: &[i32]| unreported.check(dead.to_vec(), Vec::new(), false).nursery;
        assert_eq!(check(&[]), None);
        assert_eq!(check(&[7]), Some(NurseryAction::Resume));
        assert_eq!(check(&[7, 8]), Some(NurseryAction::Kill));
        assert_eq!(check(&[]), None);
        assert_eq!(check(&[8]), Some(NurseryAction::Resume));
        assert_eq!(check(&[9]), Some(NurseryAction::Resume));
    }

    #[test]
    fn a_nursery_is_not_killed_while_it_starts_a_replacement() {
        let mut unreported = Unreported::default();
        for _ in 0..2 {
            assert_eq!(unreported.check(vec![7], Vec::new(), true).nursery, Some(NurseryAction::Resume));
        }
        assert_eq!(unreported.check(vec![7], Vec::new(), false).nursery, Some(NurseryAction::Kill));
    }

    #[test]
    fn the_exit_of_a_worker_held_by_a_tracer_is_reported_at_the_second_check() {
        let mut unreported = Unreported::default();
        let soon = CheckOutcome { nursery: None, pause: held::LIMIT, held: Vec::new() };
        assert_eq!(unreported.check(Vec::new(), vec![held(7)], false), soon);
        let outcome = unreported.check(vec![8], vec![held(7), held(9)], false);
        assert_eq!((outcome.held, outcome.pause), (vec![held(7)], CHECK_INTERVAL));
    }

    #[test]
    fn a_process_held_by_a_tracer_is_reported_once() {
        let queue = Arc::new(Queue::new().expect("an eventfd"));
        let mut reports = HeldReports::new(Arc::clone(&queue));
        for (pid, message) in [(7, "first"), (7, "again"), (8, "other")] {
            reports.report(pid, message.to_owned());
        }
        for expected in ["first", "other"] {
            let message = expected.to_owned();
            assert_eq!(queue.next(Some(Duration::ZERO)).expect("a poll"), Next::Event(Event::Degraded { message }));
        }
        assert_eq!(queue.next(Some(Duration::ZERO)).expect("a poll"), Next::TimedOut);
    }

    #[test]
    fn only_a_child_that_stays_a_zombie_is_reaped() {
        let mut orphans = Orphans::default();
        assert_eq!(orphans.overdue(&[(7, Some(1)), (8, Some(1))].into()), [].into());
        assert_eq!(
            orphans.overdue(&[(8, Some(1)), (9, Some(1))].into()),
            [(8, Some(1))].into(),
            "other code has waited for 7"
        );
        assert_eq!(orphans.overdue(&[(9, Some(2))].into()), [].into(), "another child has the pid");
        assert_eq!(orphans.overdue(&[(9, Some(2))].into()), [(9, Some(2))].into());
    }
}
