"""Run some steps, then wait forever for the device. After the restart, run the steps and exit."""

import torch
from kit import ATTEMPT, DEVICE, choose_device, report, start_endless_kernel, wait_for_device

from elasticrs.timer import heartbeat

choose_device()
total = torch.zeros(1, device=DEVICE)
for step in range(5):
    heartbeat(step)
    total += 1
    total.item()
report("stepped", total=total.item())
if ATTEMPT == 0:
    start_endless_kernel()
    wait_for_device()
