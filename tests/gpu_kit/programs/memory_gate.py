"""Hold device memory until SIGKILL. After the restart, report the free memory.

On a CPU, play a driver that frees the memory of a dead process slowly.
"""

import os
import signal
from pathlib import Path

import torch
from kit import ATTEMPT, DEVICE, ON_GPU, choose_device, free_memory, report, wait_for_calls, write_driver_file

choose_device()
free = free_memory()
if ATTEMPT == 0:
    if ON_GPU:
        held = torch.ones(4 << 30, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
    else:
        # Wait until the watcher has read how much memory other processes use.
        wait_for_calls("nvmlDeviceGetComputeRunningProcesses_v3", 1)
        write_driver_file("gpu0/memory", f"{4 << 30} 5")
    report("holds", free=free)
    signal.pause()
else:
    held = 0 if ON_GPU else int(Path(os.environ["FAKE_NVML"], "gpu0/memory").read_text().split()[0])
    report("again", free=free, held=held)
