"""Reports when torch has computed a result and, in mode `step`, when the first step of DDP over gloo is done.
Then waits.
"""

import signal
import sys

import torch
import torch.distributed as dist
from report import report
from torch.nn.parallel import DistributedDataParallel

assert (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item() == 512
report("torch")
if sys.argv[1] == "step":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(16, 64)).sum().backward()
    optimizer.step()
    report("step")
if sys.argv[1] != "leave":
    signal.pause()
