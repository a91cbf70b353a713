//! Reaps the zombies that this process adopts as pid 1, for example in a container without an init program.
//!
//! - **ORPHAN-1** A child that other code waits for is not reaped here, because its exit status would be lost. The
//!   kernel does not tell an adopted child from a child that Python has started in another session. Code that starts a
//!   child waits for it soon after its exit, so only children that are still zombies at a later check are reaped.

use std::collections::BTreeSet;
use std::process;

use elasticrs_nursery::tree::children_of_self;
use elasticrs_sys::process::child_has_ended;
use elasticrs_sys::procfs::{START_TIME, Stat};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getsid};

/// A zombie child. The start time distinguishes it from a later child with the same pid. `None` if `/proc` does not
/// show it.
type Zombie = (i32, Option<u64>);

/// Zombie children that the last check found.
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
        if process::id() != 1 {
            return;
        }
        let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let has_zombies = waitid(Id::All, peek).is_ok_and(|status| status.pid().is_some());
        let zombies = if has_zombies { zombies(nursery) } else { BTreeSet::new() };
        for (pid, _) in self.overdue(&zombies) {
            // Ignore the result, because other code may have waited for the child by now.
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
    use super::*;

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
