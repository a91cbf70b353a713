"""A training with gloo in which some ranks have a fault in step 5.

Usage: ``hang_matrix.py SHAPE KIND RANKS`` as the program of a job, or ``hang_matrix.py SHAPE KIND RANKS NPROC
LOGS`` to launch it in forks of this process. ``RANKS`` are the faulty ranks, separated by commas. Shapes:
``plain`` (an all-reduce in each step), ``mesh`` (tensor-parallel groups of two ranks, data-parallel groups
across them, and an all-reduce of all ranks), ``ddp`` and ``fsdp``.
"""

import os
import select
import signal
import sys
import threading
from datetime import timedelta

import torch
from torch import distributed

from elasticrs.timer import heartbeat

STEPS, AT = 9, 5
LONG = timedelta(minutes=10)


def wait_here():
    threading.Event().wait()


def spin():
    while True:
        pass


def all_reduce(elements=4, group=None):
    distributed.all_reduce(torch.ones(elements), group=group)


def gather(group=None):
    gathered = [torch.zeros(4) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, torch.ones(4), group=group)


class Plain:
    def __init__(self):
        self.model = torch.nn.Linear(4, 4)

    def loss(self):
        return self.model(torch.ones(2, 4)).sum()

    def communicate(self):
        all_reduce()

    def step(self, kind=""):
        """Run a training step. ``kind`` is the fault of this rank; empty if this rank has none."""
        self.loss().backward()
        if kind == "extra":
            all_reduce(1)
        elif kind == "other":
            gather()
        elif kind == "size":
            all_reduce(4096)
        if kind not in ("skip", "other", "size"):
            self.communicate()


class Mesh(Plain):
    def __init__(self):
        super().__init__()
        rank, size = distributed.get_rank(), distributed.get_world_size()
        pairs = [list(range(first, first + 2)) for first in range(0, size, 2)]
        rows = [list(range(first, size, 2)) for first in range(2)]
        self.tp = [distributed.new_group(ranks, group_desc="tp") for ranks in pairs][rank // 2]
        self.dp = [distributed.new_group(ranks, group_desc="dp") for ranks in rows][rank % 2]

    def step(self, kind=""):
        self.loss().backward()
        calls = [(4, self.tp), (4, self.tp), (8, self.dp), (1, None)]
        if kind == "skip-tp":
            del calls[0]
        elif kind == "skip-dp":
            del calls[2]
        elif kind == "extra-tp":
            calls.insert(0, (4, self.tp))
        elif kind == "extra-dp":
            calls.insert(0, (8, self.dp))
        elif kind == "reorder":
            calls = [*calls[:2], calls[3], calls[2]]
        for elements, group in calls:
            all_reduce(elements, group)


class Wrapped(Plain):
    """A model whose wrapper communicates in the backward pass."""

    def communicate(self):
        pass

    def step(self, kind=""):
        if kind == "extra":
            all_reduce(1)
        elif kind == "size":
            all_reduce(4096)
        elif kind == "other":
            gather()
        if kind != "skip":
            self.loss().backward()


class DataParallel(Wrapped):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)


class Sharded(Wrapped):
    def __init__(self):
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


SHAPES = {"plain": Plain, "mesh": Mesh, "ddp": DataParallel, "fsdp": Sharded}


def leaving_together(kind, guilty):
    """Return pidfds of the ranks that leave, if several do. The other ranks must wait for all of them before
    the next collective. Otherwise that collective may fail after the first has left, and the agent may stop
    the second before it leaves.
    """
    if kind != "leaves" or "," not in guilty:
        return []
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"pid{distributed.get_rank()}", str(os.getpid()))
    return [os.pidfd_open(int(store.get(f"pid{rank}"))) for rank in guilty.split(",")]


def train(shape, kind, guilty):
    distributed.init_process_group("gloo", timeout=LONG)
    rank = distributed.get_rank()
    diverges = rank in map(int, guilty.split(","))
    training = SHAPES[shape]()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    # Wait for all ranks before the first heartbeat, because the hang timeout starts then, and some ranks may
    # start much later than others.
    leavers = leaving_together(kind, guilty)
    distributed.barrier()
    for step in range(STEPS):
        if step == AT and not diverges:
            for process in leavers:
                select.select([process], [], [])
        heartbeat(step)
        optimizer.zero_grad()
        own = kind if diverges and step == AT else ""
        if own == "sleep":
            wait_here()
        elif own == "busy":
            spin()
        elif own == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif own == "returns":
            return
        elif own == "leaves":
            os._exit(0)
        elif own == "section":
            with heartbeat.section("checkpoint", limit=600):
                # Wait longer than the hang timeout. The other ranks wait for this rank in a collective.
                threading.Event().wait(4)
        training.step(own)
        optimizer.step()
    distributed.barrier()
    print("done", rank, flush=True)


def launch(shape, kind, guilty, nproc, logs):
    from elasticrs import LaunchConfig, elastic_launch
    from elasticrs.multiprocessing import DefaultLogsSpecs
    from elasticrs.multiprocessing.errors import ChildFailedError

    limits = {"hang_timeout": 3, "shutdown_timeout": 5, "max_restarts": 0}
    logs_specs = DefaultLogsSpecs(log_dir=logs)
    config = LaunchConfig(1, 1, int(nproc), start_method="fork", logs_specs=logs_specs, **limits)
    try:
        elastic_launch(config, train)(shape, kind, guilty)
    except ChildFailedError as error:
        print(error, flush=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    (train if len(sys.argv) == 4 else launch)(*sys.argv[1:])
