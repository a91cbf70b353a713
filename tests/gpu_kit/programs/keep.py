"""Train with elasticrs.Keep on the device. One rank is killed. The next attempt compares its end with that of
a training without a failure.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from kit import ATTEMPT, BACKEND, DEVICE, RANK, choose_device, report

from elasticrs import Keep

STEPS, EVERY = 40, 5
victim, kill_step = map(int, sys.argv[1:])


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + RANK)
    return model, optimizer


def step(model, optimizer):
    # These numbers are from the device's generator.
    model(torch.randn(16, 64, device=DEVICE)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def tensors(model, optimizer):
    of_optimizer = [value for each in optimizer.state.values() for value in each.values()]
    return [each.detach().clone() for each in (*model.parameters(), *of_optimizer)]


choose_device()
dist.init_process_group(BACKEND)
expected = None
if ATTEMPT:
    calm = made()
    for _ in range(STEPS):
        step(*calm)
    expected = tensors(*calm)
model, optimizer = made()
keep = Keep(model=model, optimizer=optimizer, every=EVERY)
at = keep.restore(default=0)
report("begins", step=at, exact=keep.source is not None and keep.source.exact)
while at < STEPS:
    if ATTEMPT == 0 and at == kill_step and victim == RANK:
        report("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    step(model, optimizer)
    at += 1
    keep.step(at)
found = tensors(model, optimizer)
report("trained", equal=expected is not None and all(map(torch.equal, found, expected)))
dist.barrier()
dist.destroy_process_group()
