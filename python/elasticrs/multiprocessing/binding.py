"""Choose the CPUs to bind workers to, based on the options of the Python API."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticrs.host.numa import NumaOptions

_log = logging.getLogger("elasticrs.agent")


def cpus_of_options(options: NumaOptions | None, nproc: int) -> list[list[int]] | None:
    """Return the CPUs for each worker, indexed by local rank. Return ``None`` if workers are not bound to
    CPUs.

    Raises:
        ValueError, OSError: the workers cannot be bound, and the options require that they are.
    """
    if options is None:
        return None
    from elasticrs.host.numa import cpus_by_local_rank

    try:
        # Pass the value instead of the enum member, because torch's enum is a different class with the same
        # values.
        return cpus_by_local_rank(options.affinity_mode.value, nproc, os.environ)
    except (ValueError, OSError) as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        _log.warning("workers are not bound to CPUs: %s", error)
        return None
