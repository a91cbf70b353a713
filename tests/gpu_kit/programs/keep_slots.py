"""Register a slot of the agent's file with CUDA, and copy from the device into it, also while another stream
is occupied. After the restart, do that again with the same memory. On a CPU, nothing is registered.
"""

import os
import signal
import sys
import time

import torch
from kit import ATTEMPT, DEVICE, ON_GPU, Stream, choose_device, occupy, report

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import KeepFile

SIZE = int(sys.argv[1])
OCCUPIED = 2.0
"""Seconds for which the other stream is occupied, as by a collective that hangs."""


def seconds(function):
    before = time.monotonic()
    function()
    return time.monotonic() - before


def register():
    if ON_GPU:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), SIZE, 0))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister failed with {code}")


def copy():
    copier.run(lambda: memory.copy_(source, non_blocking=True)).wait()


choose_device()
slot = KeepFile(os.environ[layout.VARIABLE]).slots[0]
was_there = not slot.reserve(SIZE)
memory = torch.frombuffer(slot.map, dtype=torch.uint8, count=SIZE)
source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=DEVICE)
training, copier = Stream(), Stream()
if ON_GPU:
    torch.cuda.synchronize()
copy()  # The first copy also makes the pages, unless another attempt has made them.
plain = min(seconds(copy) for _ in range(3))
registering = seconds(register)
registered = min(seconds(copy) for _ in range(3))
memory.zero_()
hangs = training.run(lambda: occupy(OCCUPIED))
beside = seconds(copy)
report(
    "copied",
    was_there=was_there,
    register_s_per_gb=registering * 1e9 / SIZE,
    plain_gb_s=SIZE / 1e9 / plain,
    registered_gb_s=SIZE / 1e9 / registered,
    beside_gb_s=SIZE / 1e9 / beside,
    waited=hangs.is_reached(),
    equal=torch.equal(memory, source.cpu()),
)
if ATTEMPT == 0:
    os.kill(os.getpid(), signal.SIGKILL)
hangs.wait()
