"""Trains a small model, in mode `restart` (from its checkpoint) or `replace` (with elasticrs.train).

Rank 1 of the first attempt kills itself in the middle of a step. Reported: `dies`; `again`, when the first
step after each meeting is done; `from`, the number of the step that was begun then.
"""

import io
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from report import report
from torch.nn.parallel import DistributedDataParallel

from elasticrs.train import AgentCoordinator, State, train
from elasticrs.train.distributed import all_gather_return_max_long, broadcast_binary

KILL_STEP = 75
EVERY = 50
"""Steps between two checkpoints."""

mode, path = sys.argv[1:]


class Job(State):
    """Training state: a model, its optimizer and the step number."""

    def __init__(self):
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.step = 0

    def wrap(self):
        self.ddp = DistributedDataParallel(self.model)
        self.is_first = True

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def restore(self, stream):
        found = torch.load(stream)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.step = found["step"]

    def sync(self, world_size, rank):  # noqa: ARG002 -- the same for all
        leader, _ = all_gather_return_max_long(self.step)
        stream = io.BytesIO()
        torch.save(self.state(), stream)
        data = broadcast_binary(torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8), leader)
        self.restore(io.BytesIO(data.numpy().tobytes()))
        self.wrap()


def step(job):
    if job.is_first:
        report("from", job.step)
    loss = job.ddp(torch.ones(16, 64)).square().mean()
    rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (job.step, rank, life) == (KILL_STEP, "1", "0"):
        report("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    job.optimizer.zero_grad()
    loss.backward()
    job.optimizer.step()
    job.step += 1
    if job.is_first:
        report("again")
        job.is_first = False
    time.sleep(0.005)
    return job, None


job = Job()
if mode == "replace":
    train(AgentCoordinator("gloo"), step, job)
dist.init_process_group("gloo")
if os.path.exists(path):
    with open(path, "rb") as file:
        job.restore(file)
job.wrap()
while True:
    step(job)
    if job.step % EVERY == 0 and dist.get_rank() == 0:
        torch.save(job.state(), path + ".new")
        os.replace(path + ".new", path)
