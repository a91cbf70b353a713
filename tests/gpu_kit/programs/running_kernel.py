"""Allocate device memory and run a kernel until SIGKILL. After the restart, report the free memory."""

import torch
from kit import ATTEMPT, DEVICE, choose_device, free_memory, report, start_endless_kernel, wait_for_device

choose_device()
free = free_memory()
if ATTEMPT == 0:
    held = torch.ones(256 << 20, dtype=torch.uint8, device=DEVICE)
    start_endless_kernel()
    report("running", free=free)
    wait_for_device()
else:
    report("restarted", free=free, total=torch.ones(3, device=DEVICE).sum().item())
