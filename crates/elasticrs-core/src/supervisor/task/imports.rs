//! Handles the loss of a nursery during its module imports.

use elasticrs_nursery::report::{self, ImportFailure};

use super::retired::Retired;
use crate::supervisor::event::NurseryExit;
use crate::supervisor::nursery_io::{Guard, Import, Nursery};

/// Cleans up after a nursery that died during its imports. If a module killed the nursery, returns the offset of its
/// records in the report file, for another nursery, which imports the remaining modules. Otherwise returns `None`.
pub(super) fn rest(import: Import, sentinel: Option<Guard>, exit: NurseryExit, retired: &mut Retired) -> Option<u64> {
    let Import { warm, since, failure, is_unguarded, .. } = import;
    if let Some(Guard { sentinel, .. }) = sentinel {
        retired.add_sentinel(*sentinel);
    }
    if is_unguarded {
        report::fail(&warm.report, "the process that guards the import was lost");
        return None;
    }
    let failure = failure.unwrap_or(ImportFailure::Exited(exit.exit));
    let can_go_on = !exit.hung && report::blame(&warm.report, since, failure);
    can_go_on.then_some(since)
}

/// Kills a nursery that speaks another protocol version. The job then continues with a nursery that does not preload
/// modules. Only a nursery that preloads modules can use another version, because it runs an installed program, which
/// may have been replaced since this process started.
pub(super) fn refuse(nursery: &mut Nursery) {
    if let Some(import) = &nursery.import {
        report::fail(
            &import.warm.report,
            "another build of elasticrs was installed while this job was running; start the job again to use --warm",
        );
    }
    nursery.kill();
}
