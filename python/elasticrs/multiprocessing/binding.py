"""The CPUs of workers, from the options of the Python API."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticrs.numa import NumaOptions


def cpus_of_options(options: NumaOptions | None, nproc: int) -> list[list[int]] | None:
    """Return the CPUs of each worker by local rank; ``None`` when they are not bound.

    Raises:
        ValueError, OSError: they cannot be bound, and the options do not say to go on without.
    """
    if options is None:
        return None
    from elasticrs.numa import cpus_by_local_rank

    try:
        # Torch's modes are another enum with the same values.
        return cpus_by_local_rank(options.affinity_mode.value, nproc, os.environ)
    except (ValueError, OSError) as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        warnings.warn(f"workers are not bound to CPUs: {error}", RuntimeWarning, stacklevel=4)
        return None
