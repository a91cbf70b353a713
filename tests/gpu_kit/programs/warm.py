"""Use the device in a worker forked from a warm nursery, which has imported torch. Then wait until the kit
kills a worker.
"""

import sys

is_warm = "torch" in sys.modules

import os  # noqa: E402
import signal  # noqa: E402

import torch  # noqa: E402
from kit import ATTEMPT, DEVICE, choose_device, report  # noqa: E402

was_initialized = torch.cuda.is_initialized()
descriptors = f"/proc/{os.getppid()}/fd"
opened_by_parent = [os.readlink(f"{descriptors}/{name}") for name in os.listdir(descriptors)]
choose_device()
report(
    "used",
    is_warm=is_warm,
    was_initialized=was_initialized,
    parent_uses_gpu=any(path.startswith("/dev/nvidia") for path in opened_by_parent),
    total=torch.ones(3, device=DEVICE).sum().item(),
)
if ATTEMPT == 0:
    signal.pause()
