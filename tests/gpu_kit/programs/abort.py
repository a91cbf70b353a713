"""Abort a waiting collective from another thread, and then create a new group.

Rank 0 waits in a collective that the last rank does not enter. In a group with one rank a collective does
not wait, so only the duration of the abort and the new group are checked.
"""

import datetime
import sys
import threading
import time

import torch
import torch.distributed as dist
from kit import BACKEND, DEVICE, ON_GPU, RANK, choose_device, report

from elasticrs.train import groups

world_size = int(sys.argv[1])
TIMEOUT = datetime.timedelta(seconds=300)
DELAY = 1.0
"""Seconds after which the collective is aborted."""


def connect(prefix):
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), world_size, RANK == 0, timeout=TIMEOUT)
    return store, dist.PrefixStore(prefix, store)


choose_device()
connections = groups.Connections()
keep, store = connect("first")
with connections.recorded():
    groups.create(BACKEND, store, RANK, world_size, TIMEOUT)
dist.all_reduce(torch.ones(1, device=DEVICE))
moment = [0.0]


def abort():
    moment[0] = time.monotonic()
    connections.shut()
    groups.abort()


broken = "not tried: a group of one never waits"
if world_size > 1 and RANK == 0:
    thread = threading.Timer(DELAY, abort)
    thread.start()
    try:
        dist.all_reduce(torch.ones(1, device=DEVICE))
        if ON_GPU:
            torch.cuda.synchronize()
        broken = "the collective returned without an error"
    except RuntimeError as error:
        broken = type(error).__name__
    thread.join()
    left = time.monotonic() - moment[0]
    keep.set("aborted", "yes")
else:
    if world_size > 1:
        keep.wait(["aborted"], TIMEOUT)
    before = time.monotonic()
    abort()
    left = time.monotonic() - before
groups.destroy()
groups.create(BACKEND, dist.PrefixStore("second", keep), RANK, world_size, TIMEOUT)
total = torch.ones(1, device=DEVICE)
dist.all_reduce(total)
report("aborted", error=broken, seconds=left, total=total.item())
groups.destroy()
keep.wait(["aborted"], TIMEOUT) if world_size > 1 else None
