"""How many workers a node can use, without importing torch."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_DRIVER = "/proc/driver/nvidia/gpus"


def cpu_count() -> int:
    """CPUs of the machine, as torchrun counts them; at least 1."""
    return os.cpu_count() or 1


def cuda_device_count(environ: Mapping[str, str], driver: str = _DRIVER, dev: str = "/dev") -> int:
    """CUDA devices that a worker would see.

    Args:
        environ: for ``CUDA_VISIBLE_DEVICES``: as in CUDA itself, the list ends at the first entry that is no
            device.
        driver: the folder in which the NVIDIA driver lists its devices.
        dev: the folder of device nodes, used where the other is not there (containers).
    """
    present = _present(driver, dev)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        is_index = name.isdecimal() and int(name) < present
        is_uuid = name.startswith(("GPU-", "MIG-"))
        if not (is_index or is_uuid):
            break
        count += 1
    return count if present else 0


def _present(driver: str, dev: str) -> int:
    try:
        return len(os.listdir(driver))
    except OSError:
        # Not an NVIDIA machine, or a container that hides /proc/driver.
        pass
    try:
        names = os.listdir(dev)
    except OSError:
        return 0
    return sum(name.startswith("nvidia") and name[6:].isdecimal() for name in names)
