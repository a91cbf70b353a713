"""Trains a model of 9 million parameters, and reports how it continues after a failure.

The first argument is a mode. With ``kill STEP FILE`` and ``raise STEP FILE``, rank 1 kills itself, or raises
an exception, in this step. Under a launcher that does not keep the state, the training goes on from ``FILE``,
a checkpoint that is saved every 25 steps. The worker reports the failure (`dies`), the step from which the
training goes on (`from`), the nanoseconds of loading the state (`restore`), and when the interrupted step has
ended (`again`). ``ends TENSORS`` reports the nanoseconds that `Keep` adds to a step. ``copies EVERY`` reports
for which share of the time periodic copies block the training (`blocked`), and the nanoseconds of a periodic
copy with its checksum (`copy`), of a copy at the end of the process (`death`), and of copying the same
tensors into memory that was written before (`memcpy`).
"""

import os
import signal
import sys
import time
from itertools import count

import torch
import torch.distributed as dist
from report import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticrs import Keep
from elasticrs._engine.inside.keep import keep_own
from elasticrs._engine.inside.keep.layout import Head

EVERY = 25
WIDTH = 1000
LAYERS = 9


def make_model():
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def train(how, last_step, path):
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ddp = DistributedDataParallel(model)
    is_kept = "ELASTICRS_KEEP" in os.environ

    def load():
        if not os.path.exists(path):
            return 0
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]

    keep = Keep(model=model, optimizer=optimizer)
    begin = time.monotonic_ns()
    step = keep.restore(default=load)
    report("restore", time.monotonic_ns() - begin)
    report("from", step)
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while True:
        loss = ddp(torch.randn(4, WIDTH)).square().mean()
        if is_first and step + 1 == last_step and dist.get_rank() == 1:
            report("dies")
            if how == "raise":
                raise ValueError("a bad batch")
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        keep.step(step)
        if step == last_step:
            report("again")
        if step % EVERY == 0 and dist.get_rank() == 0 and not is_kept:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, path + ".new")
            os.replace(path + ".new", path)


def ends(tensors, steps=200):
    """Report the nanoseconds of processor time that `Keep` adds to a step of a model of this many tensors."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(tensors // 3)]
    model = nn.ParameterList(parameters)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.zeros(4)

    numbers = count(1)

    def spent(keep):
        optimizer.step()
        begin = time.process_time_ns()
        for _ in range(steps):
            optimizer.step()
            if keep:
                keep.step(next(numbers))
        return (time.process_time_ns() - begin) // steps

    bare = min(spent(None) for _ in range(3))
    keep = Keep(model=model, optimizer=optimizer, every=0)
    keep.restore()
    report("end", max(0, min(spent(keep) for _ in range(3)) - bare))


def copies(every, steps=30):
    """Report how long copies of the state take, and how many millionths of the time they block training."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    keep = Keep(model=model, optimizer=optimizer, every=every)
    keep.restore()

    def run(begin, end):
        started = time.monotonic_ns()
        for step in range(begin, end):
            model(torch.randn(64, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            keep.step(step + 1)
        return time.monotonic_ns() - started

    run(0, 2 * every)
    words = keep._keeper._file.words
    before = words[Head.BLOCKED_NS]
    spent = run(2 * every, 2 * every + steps)
    report("blocked", (words[Head.BLOCKED_NS] - before) * 1_000_000 // spent)
    keep._keeper._copier.wait_until_complete(60)
    report("copy", words[Head.LAST_NS])
    run(2 * every + steps, 2 * every + steps + 1)
    begin = time.monotonic_ns()
    keep_own()
    report("death", time.monotonic_ns() - begin)
    tensors = [*model.parameters(), *(each for one in optimizer.state.values() for each in one.values())]
    targets = [torch.zeros_like(each) for each in tensors]
    begin = time.monotonic_ns()
    torch._foreach_copy_(targets, tensors)
    report("memcpy", time.monotonic_ns() - begin)


mode, *arguments = sys.argv[1:]
torch.set_num_threads(1)
if mode in ("kill", "raise"):
    train(mode, int(arguments[0]), arguments[1])
else:
    {"ends": ends, "copies": copies}[mode](int(arguments[0]))
