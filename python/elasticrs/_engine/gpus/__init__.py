"""Devices of a machine: their number, their health, and the processor cores near them (NUMA)."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICE = "/dev/nvidiactl"
"""Path that exists if NVIDIA's driver is loaded and this process may use its GPUs."""

MEMORY_LIMIT = 50.0
"""Maximum seconds for which a restart waits until the device memory of dead workers is free."""


def are_gpus_visible(environ: Mapping[str, str]) -> bool:
    """Return true if NVIDIA GPUs are present and not hidden. No library is loaded, which would take long."""
    return os.path.exists(DEVICE) and environ.get("CUDA_VISIBLE_DEVICES") not in {"", "-1"}
