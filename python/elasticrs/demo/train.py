"""Trains a model to tell which of three spirals a point belongs to, in each worker of the demo.

The lines with the comment ``# keep`` are all that the script needs so that no training step is lost when a
worker fails. ``python -m elasticrs.demo`` runs it, and sets a variable that makes two of the workers fail.
"""

import json
import os
import queue
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticrs import Keep  # keep

STEPS = 300
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ACCIDENTS = json.loads(os.environ.get("ELASTICRS_DEMO_ACCIDENTS", "[]"))
"""The failure of each attempt that is to fail: its rank, its step, and ``killed``, ``raised`` or ``hung``."""
RECORDS = os.environ.get("ELASTICRS_DEMO_RECORDS")
"""The file to which the workers append what they have done, in lines that are JSON objects."""


def main() -> None:
    """Train until the last step has ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())  # Each rank draws other points.

    keep = Keep(model=model, optimizer=optimizer)  # keep
    step = begin = keep.restore(default=0)  # keep
    while step < STEPS:
        points, spirals = next_batch(step + 1)
        loss: Any = cross_entropy(ddp(points), spirals)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        keep.step(step)  # keep
        if step == begin + 1:
            record("trains", step=begin)
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}/{STEPS}: loss {loss:.4f}", flush=True)

    if dist.get_rank() == 0:
        points, spirals = draw(3000)
        with torch.no_grad():
            right = (model(points).argmax(dim=1) == spirals).float().mean()
        record("ended", accuracy=100 * right.item())
    dist.barrier()  # no rank may exit while another one still trains
    dist.destroy_process_group()


def draw(count: int) -> tuple[Any, Any]:
    """Draw random points near three spirals. Return them, and for each point the number of its spiral."""
    spirals = torch.randint(3, (count,))
    radius = torch.rand(count)
    angle = 4 * radius + spirals * (2 * torch.pi / 3) + 0.1 * torch.randn(count)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), spirals


def next_batch(step: int) -> tuple[Any, Any]:
    """Return the batch for a step. If this worker is to fail in this step, let it fail instead."""
    for attempt, (rank, at, what) in enumerate(ACCIDENTS):
        if (attempt, rank, at) == (ATTEMPT, dist.get_rank(), step):
            record(what)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raised":
                raise ValueError("a bad batch")
            never_filled: queue.Queue[Any] = queue.Queue()
            never_filled.get()
    return draw(128)


def record(what: str, **values: float) -> None:
    """Append what this worker has done to the file that ``RECORDS`` names."""
    if RECORDS:
        line = json.dumps(
            {"what": what, "attempt": ATTEMPT, "pid": os.getpid(), "time": time.time(), **values}
        )
        with open(RECORDS, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
    # Skip the interpreter's shutdown, because threads of the library gloo sometimes abort the process there.
    sys.stdout.flush()
    os._exit(0)
