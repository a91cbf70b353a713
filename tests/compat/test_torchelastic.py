"""Programs as they were written for torchelastic in 2019 and 2020 run under the alias, without a change."""

import re
import subprocess
import sys

import pytest
from helpers.launcher import clean_environment

pytestmark = [pytest.mark.torch]

STARTED_BY_HAND = """
import os, runpy, sys
import torch.distributed
for rank in range(2):
    if os.fork() == 0:
        sys.argv[:] = sys.argv[1:]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(sys.exc_info()[0] is not None)
print("exit", *sorted(os.waitstatus_to_exitcode(os.wait()[1]) for rank in range(2)))
"""
"""Torch is imported once; each child is then a process that somebody has started."""

OF_2019 = """
import sys

import torch
import torch.distributed as dist
import torchelastic
import torchelastic.distributed as edist
from torchelastic.worker_stats import WorkerStats  # noqa: F401
from torchelastic.p2p import CoordinatorP2P


class ToyState(torchelastic.State):
    def __init__(self, limit):
        self.limit = limit
        self.nums = [1] * limit
        self.i = 0
        self.total = 0
        self.failed = False

    def capture_snapshot(self):
        return {"i": self.i, "total": self.total}

    def apply_snapshot(self, snapshot):
        self.i = snapshot["i"]
        self.total = snapshot["total"]

    def sync(self, world_size, rank):
        self.rank = rank
        max_rank, self.i = edist.all_gather_return_max_long(self.i)
        self.total = edist.broadcast_long(self.total, max_rank)


def train_step(state):
    if state.i >= state.limit:
        raise StopIteration
    tensor = torch.tensor([state.nums[state.i]])
    dist.all_reduce(tensor)
    if state.i == 3 and state.rank == 1 and not state.failed:
        state.failed = True
        raise RuntimeError("a step that fails")
    state.total += int(tensor[0])
    state.i += 1
    return state, torchelastic.SimpleWorkerStats(progress_rate=1.0)


coordinator = CoordinatorP2P(
    c10d_backend="gloo", init_method=sys.argv[1], max_num_trainers=2, process_group_timeout=10000
)
state = torchelastic.train(coordinator, train_step, ToyState(10))
print(f"total {state.total}\\n", end="", flush=True)
"""

OF_2020 = """
import sys

import torch
import torch.nn.functional as functional
import torchelastic
import torchelastic.checkpoint as checkpoint
import torchelastic.distributed as edist
from torchelastic.worker_stats import WorkerStats  # noqa: F401
import torchelastic.event_logger as event_logger
import torchelastic.metrics as metrics
from torch.nn.parallel import DistributedDataParallel
from torchelastic.p2p import CoordinatorP2P
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.utils.data import CyclingIterator, ElasticDistributedSampler

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.rand(40, 3))


class TrainState(torchelastic.State):
    def __init__(self, epochs):
        self.epochs = epochs
        self.epoch = 0
        self.batch = 0
        self.steps = 0
        self.model = torch.nn.Linear(3, 1)

    def capture_snapshot(self):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"at": (self.epoch, self.batch, self.steps), "weights": weights}

    def apply_snapshot(self, snapshot):
        self.epoch, self.batch, self.steps = snapshot["at"]
        self.model.load_state_dict(snapshot["weights"])

    def sync(self, world_size, rank):
        max_rank, self.steps = edist.all_gather_return_max_long(self.steps)
        self.epoch = edist.broadcast_long(self.epoch, max_rank)
        self.batch = edist.broadcast_long(self.batch, max_rank)
        edist.broadcast_model(self.model, max_rank)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sampler = ElasticDistributedSampler(DATA, start_index=self.batch * 4 * world_size)
        loader = torch.utils.data.DataLoader(DATA, batch_size=4, sampler=self.sampler)

        def epoch(number):
            self.sampler.set_epoch(number)
            return iter(loader)

        self.data = CyclingIterator(self.epochs, epoch, start_epoch=self.epoch)

    def should_save_checkpoint(self, rank):
        return self.steps == 5


def train_steps(state):
    for (inputs,) in state.data:
        state.optimizer.zero_grad()
        loss = functional.mse_loss(state.parallel(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        state.optimizer.step()
        state.steps += 1
        state.epoch, state.batch = divmod(state.steps, 5)
        yield state, torchelastic.SimpleWorkerStats(4.0)


metrics.configure(metrics.NullMetricHandler())
event_logger.configure(event_logger.ConsoleEventLogHandler())
host, prefix, folder = sys.argv[1:]
parameters = RendezvousParameters("etcd", host, "job", 2, 2, f"last_call_timeout=1,etcd_prefix={prefix}")
coordinator = CoordinatorP2P("gloo", parameters.url, 2)
checkpoint.set_checkpoint_manager(checkpoint.FileSystemCheckpointManager(folder))
state = torchelastic.run_train(coordinator, train_steps, TrainState(2))
weights = [round(each, 6) for each in state.model.weight.flatten().tolist()]
print(f"steps {state.steps} weights {weights}\\n", end="")
"""


def by_hand(installed, program, *arguments):
    return installed("-c", STARTED_BY_HAND, str(program), *arguments, check=False)


def test_one_of_2019(installed, tmp_path):
    program = tmp_path / "toy.py"
    program.write_text(OF_2019, encoding="utf-8")
    store = subprocess.Popen(
        [sys.executable, "-m", "elasticrs.store", "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    )
    try:
        port = re.search(r":(\d+)", store.stdout.readline())[1]
        url = f"elasticrs://127.0.0.1:{port}/toy?min_workers=2&max_workers=2"
        done = by_hand(installed, program, url)
    finally:
        store.stdout.close()
        store.kill()
        store.wait()
    assert done.stdout.splitlines() == ["total 20", "total 20", "exit 0 0"], done.stderr


def test_one_of_2020(installed, tmp_path, etcd):
    program = tmp_path / "model.py"
    program.write_text(OF_2020, encoding="utf-8")
    done = by_hand(installed, program, etcd.endpoint, etcd.prefix, str(tmp_path / "checkpoints"))
    *told, last = done.stdout.splitlines()
    assert last == "exit 0 0", done.stderr
    first, second = (line for line in told if line.startswith("steps 10 weights"))
    assert first == second
    assert any(line.startswith("event: rendezvous_succeeded") for line in told)
    assert (tmp_path / "checkpoints" / "0" / "checkpoint.json").exists()
