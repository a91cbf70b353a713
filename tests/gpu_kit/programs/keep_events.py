"""Copy tensors at random moments while a stream changes them, by the rule of two events.

Each step ends with an event E, and another event C is before the kernels that change the tensors. The host
queues steps in advance, so it does not know how far the device is. The newest step whose E has been reached
may be copied, unless C of the next step has been reached. The copy is used only if C has not been reached
after the copy either. A used copy must be that of the step, to the last bit.
"""

import random
import sys
import threading
from functools import partial

import torch
from kit import DEVICE, ON_GPU, Stream, choose_device, occupy, report

TRIALS = int(sys.argv[1])
SIZE, AHEAD = (1 << 20 if ON_GPU else 1 << 14), 4

choose_device()
rng = random.Random(0)
tensors = [torch.zeros(SIZE, device=DEVICE) for _ in range(4)]
slots = [torch.zeros(SIZE, pin_memory=ON_GPU) for _ in tensors]
if ON_GPU:
    torch.cuda.synchronize()
training, copier = Stream(), Stream()
ended, changes = [training.run()], [None]
"""The events E and C by step. The state of step 0 is never changed before C of step 1."""


def change():
    for tensor in tensors:
        tensor.add_(1)
        occupy(1e-4)


def copy():
    for tensor, slot in zip(tensors, slots, strict=True):
        slot.copy_(tensor, non_blocking=True)


found = {"used": 0, "not_begun": 0, "refused": 0, "refused_and_changed": 0, "wrong": 0}
for _ in range(TRIALS):
    for _ in range(rng.randint(1, AHEAD)):
        if len(ended) > AHEAD:
            ended[-AHEAD].wait()
        training.run(partial(occupy, rng.random() * 2e-3))  # Forward and backward pass.
        changes.append(training.run())
        training.run(change)
        ended.append(training.run())
    threading.Event().wait(rng.random() * 3e-3)
    step = max(number for number, mark in enumerate(ended) if mark.is_reached())
    next_change = changes[step + 1] if step + 1 < len(changes) else None
    if next_change is not None and next_change.is_reached():
        found["not_begun"] += 1
        continue
    copier.run(copy).wait()
    is_equal = all(torch.equal(slot, torch.full_like(slot, step)) for slot in slots)
    if next_change is None or not next_change.is_reached():
        found["used"] += 1
        found["wrong"] += not is_equal
    else:
        found["refused"] += 1
        found["refused_and_changed"] += not is_equal
report("ruled", **found)
