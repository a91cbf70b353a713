"""Run a collective that times out. NCCL's watchdog then kills the process; gloo raises an exception.

With NCCL the collective waits behind an endless kernel, so one GPU and one rank are enough. With gloo the
last rank does not enter the collective.
"""

import datetime
import signal
import sys

import torch
import torch.distributed as dist
from kit import ATTEMPT, BACKEND, DEVICE, ON_GPU, RANK, choose_device, report, start_endless_kernel

choose_device()
dist.init_process_group(BACKEND, timeout=datetime.timedelta(seconds=float(sys.argv[1])))
part = torch.ones(1, device=DEVICE)
dist.all_reduce(part)
report("collective", total=part.item())
if ATTEMPT == 0:
    start_endless_kernel()
    if not ON_GPU and dist.get_world_size() - 1 == RANK:
        signal.pause()
    report("waiting")
    dist.all_reduce(part)
    torch.cuda.synchronize()
else:
    report("again")
    dist.destroy_process_group()
