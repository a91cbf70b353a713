"""Report this worker's device and the number of devices."""

import os

import torch
from kit import DEVICE, LOCAL_RANK, ON_GPU, report

device = str(torch.cuda.get_device_properties(LOCAL_RANK).uuid) if ON_GPU else str(LOCAL_RANK)
count = torch.cuda.device_count() if ON_GPU else os.cpu_count()
report("counted", device=device, count=count, total=torch.ones(3, device=DEVICE).sum().item())
