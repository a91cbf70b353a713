"""Facts about NVIDIA's driver that need no library, so that every launch can ask for them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICE = "/dev/nvidiactl"
"""Device that exists if NVIDIA's driver is loaded and this process may use its GPUs."""

MEMORY_LIMIT = 50.0
"""Seconds to wait for the device memory of dead workers, before workers start again."""


def are_gpus_visible(environ: Mapping[str, str]) -> bool:
    """Return true if workers with these environment variables may use NVIDIA GPUs."""
    return os.path.exists(DEVICE) and environ.get("CUDA_VISIBLE_DEVICES") not in {"", "-1"}
