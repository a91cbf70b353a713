"""Trains a small model with `DistributedDataParallel`, and saves in its handlers for SIGUSR1 and SIGTERM.

Reported: `begun` after three steps. After SIGUSR1: `acted`, and some steps later `stood`, by how many
nanoseconds the steps around the signal were longer than usual. After SIGTERM: `saved`; then the program ends.

With the argument `look`, it measures what the hook for the agreed step adds to each step of an optimizer:
`bare` and `hooked` are reported, in nanoseconds for `STEPS` steps.
"""

import os
import random
import select
import signal
import statistics
import sys
import time
from collections import deque

import torch
import torch.distributed as dist
from report import report
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks as post_hooks

STEPS = 20_000
AROUND = 4
"""Number of steps around a signal in which ranks may wait."""


def train():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model, moments = DistributedDataParallel(model), random.Random(os.getpid())
    usual, left, begun = deque(maxlen=100), 0, time.monotonic_ns()
    for number in range(1, 1 << 40):
        select.select([], [], [], moments.uniform(0.003, 0.005))
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        begun, before = time.monotonic_ns(), begun
        usual.append(begun - before)
        if number == 3:
            report("begun")
        if acted:
            acted.clear()
            left = AROUND // 2
        elif left and not (left := left - 1):
            median = statistics.median(usual)
            report("stood", int(sum(max(0, each - median) for each in list(usual)[-AROUND:])))


def save():
    """Write nothing, but synchronize the ranks before and after, as most scripts do when they save."""
    dist.barrier()
    dist.barrier()


def on_request(*_):
    report("acted")
    acted.append(True)


def on_stop(*_):
    save()
    report("saved")
    os._exit(0)


def look():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1e-3)
    kept = dict(post_hooks)
    for name, chosen in (("bare", {}), ("hooked", kept)) * 5:
        post_hooks.clear()
        post_hooks.update(chosen)
        begun = time.thread_time_ns()
        for _ in range(STEPS):
            optimizer.step()
        report(name, time.thread_time_ns() - begun)


torch.set_num_threads(1)
acted = []
if sys.argv[1:] == ["look"]:
    look()
else:
    signal.signal(signal.SIGUSR1, on_request)
    signal.signal(signal.SIGTERM, on_stop)
    train()
