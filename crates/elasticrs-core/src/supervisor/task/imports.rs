//! Handles the loss of a nursery during its module imports.

use elasticrs_nursery::launch::Import as Terms;
use elasticrs_nursery::report::{self, ImportFailure};

use super::images::Images;
use super::retired::Retired;
use crate::supervisor::event::NurseryExit;
use crate::supervisor::nursery_io::{Guard, Import, Nursery};

/// Cleans up the processes of a nursery that died during its imports. If a module killed the nursery, starts another
/// nursery for the remaining modules. Returns `None` if no nursery was started.
pub(super) fn import_rest(
    import: Import,
    sentinel: Option<Guard>,
    exit: NurseryExit,
    is_background: bool,
    images: &Images,
    retired: &mut Retired,
) -> Option<Nursery> {
    let Import { warm, since, failure, is_unguarded } = import;
    if let Some(Guard { sentinel, .. }) = sentinel {
        retired.add_sentinel(*sentinel);
    }
    if is_unguarded {
        report::fail(&warm.report, "the process that guards the import was lost");
    } else if !exit.hung
        && report::blame(&warm.report, since, failure.unwrap_or(ImportFailure::Exited(exit.exit)))
        && let Ok(nursery) = images.launch(&Terms { since: Some(since), is_background })
    {
        if nursery.import.is_some() {
            return Some(nursery);
        }
        retired.add_nursery(nursery);
    }
    None
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
