"""A small training whose state is kept with `elasticrs.Keep`. Each variant has another kind of state.

Usage: ``kept_training.py FOLDER [options]`` as the program of a job. :func:`launch` runs it in forks of this
process. Each rank appends lines ``EVENT ATTEMPT STEP NANOSECONDS PID TEXT`` to ``FOLDER/rank{R}.log``:
``start``, ``restored`` (TEXT: where from), ``ended`` (a step; TEXT: its loss), ``copies`` (a fault follows in
this copy), and ``done`` (TEXT: digest of everything that the training has changed).
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticrs import Keep
from elasticrs._engine.inside.keep import copier

WIDTH = 16
CLASSES = 4
BATCH = 8


def parse_arguments(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, default="adamw")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="auto", help="of Keep: auto or a number of steps")
    parser.add_argument("--sharded", action="store_true", help="each rank trains a model of its own")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model's hidden layer")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of each rank in a step")
    parser.add_argument("--seeded", action="store_true", help="each step draws its own random numbers")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
    parser.add_argument("--fault", action="append", default=[], help="KIND:ATTEMPT:RANK:STEP; see Faults")
    return parser.parse_args(argv)


class Training:
    """A model, its optimizers, and one step over them."""

    def __init__(self, arguments):
        self.rank = dist.get_rank()
        self.is_sharded = arguments.sharded
        torch.manual_seed(self.rank if self.is_sharded else 0)
        self.batch, self.width = arguments.batch, arguments.width
        self.model = self.make_model(self.width)
        self.optimizers = self.make_optimizers()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 7, gamma=0.9)
        torch.manual_seed(1000 + self.rank)
        self.before_backward = lambda: None
        # With this argument, DDP does not put the gradients into new buckets after its first step. With three
        # ranks and more, the sums of the gradients would have other last bits after a restart.
        self.ddp = self.model
        if not self.is_sharded and arguments.variant != "fsdp":
            self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)

    def make_model(self, width):
        return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, CLASSES))

    def make_optimizers(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]

    def kept(self):
        """Return the objects to keep by name."""
        names = ("optimizer", "second_optimizer")
        return {
            "model": self.model,
            "scheduler": self.scheduler,
            **dict(zip(names, self.optimizers, strict=False)),
        }

    def load_resharded(self, _keep):
        return 0

    def loss(self):
        """Return the loss of a batch that is drawn from the random number generator."""
        loss = cross_entropy(self.ddp(self.inputs()), torch.randint(CLASSES, (self.batch,)))
        self.before_backward()
        return loss

    def begin(self, step, steps):
        """Prepare the steps that follow the restored one."""

    def inputs(self):
        return torch.randn(self.batch, WIDTH)

    def backward(self):
        loss = self.loss()
        loss.backward()
        return loss

    def step(self):
        """Run a step and return its loss."""
        loss = self.backward()
        if self.is_sharded:
            dist.all_reduce(torch.ones(1))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Fused(Training):
    def make_optimizers(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)]


class Foreach(Training):
    def make_optimizers(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)]


class Autocast(Training):
    def loss(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss()


class Average(Training):
    """A moving average of the parameters, which is changed after the optimizer."""

    def __init__(self, arguments):
        super().__init__(arguments)
        update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=update)

    def kept(self):
        return {**super().kept(), "average": self.average}

    def step(self):
        loss = super().step()
        self.average.update_parameters(self.model)
        return loss


class Tied(Training):
    """Two layers with the same parameter. The width is that of the inputs."""

    def make_model(self, width):
        first, *rest = super().make_model(width)
        second = nn.Linear(WIDTH, width)
        second.weight = first.weight
        return nn.Sequential(first, nn.ReLU(), second, *rest)


class CompiledModel(Training):
    def __init__(self, arguments):
        super().__init__(arguments)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{arguments.folder}/compiled{self.rank}")
        torch._inductor.config.compile_threads = 1
        self.ddp = torch.compile(self.ddp)


class Positioned(Training):
    """A data loader with a state: the numbers of the samples of the epoch, and the position in them."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.order, self.at = [], 0

    def kept(self):
        return {**super().kept(), "loader": self}

    def state_dict(self):
        return {"order": [*self.order], "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = [*state["order"]], state["at"]

    def inputs(self):
        if self.at == len(self.order):
            self.order, self.at = torch.randperm(11).tolist(), 0
        self.at += 1
        return Rows()[self.order[self.at - 1]]


class Compiled(Training):
    """A training whose optimizer is compiled, so that torch's hooks do not report the steps."""

    def make_optimizers(self):
        optimizers = super().make_optimizers()
        self.update = torch.compile(optimizers[0].step, backend="eager")
        return optimizers

    def step(self):
        loss = self.backward()
        self.update()
        self.optimizers[0].zero_grad()
        return loss


class Momentum(Training):
    def make_optimizers(self):
        return [torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)]


class Closure(Training):
    """LBFGS, which calls the model several times in a step."""

    def make_optimizers(self):
        return [torch.optim.LBFGS(self.model.parameters(), lr=1e-2, max_iter=3)]

    def step(self):
        def closure():
            self.optimizers[0].zero_grad()
            return self.backward()

        return self.optimizers[0].step(closure)


class TwoOptimizers(Training):
    def make_optimizers(self):
        first, *_, last = self.model
        return [
            torch.optim.SGD(first.parameters(), lr=1e-2, momentum=0.9),
            torch.optim.AdamW(last.parameters(), lr=1e-3, fused=True),
        ]


class BatchNorm(Training):
    def make_model(self, width):
        norm = nn.BatchNorm1d(width)
        return nn.Sequential(nn.Linear(WIDTH, width), norm, nn.ReLU(), nn.Linear(width, CLASSES))


class Accumulation(Training):
    def backward(self):
        for is_last in (False, False, True):
            with ExitStack() as stack:
                stack.enter_context(nullcontext() if is_last or self.is_sharded else self.ddp.no_sync())
                loss = super().backward()
        return loss


class Scaled(Training):
    """A GradScaler, which skips the optimizer in every fifth step, because the gradients are infinite."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        self.count = 0

    def kept(self):
        return {**super().kept(), "scaler": self.scaler, "count": self}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def step(self):
        self.count += 1
        loss = self.loss()
        self.scaler.scale(loss * (float("inf") if self.count % 5 == 0 else 1.0)).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.optimizers[0].zero_grad()
        return loss


class FullySharded(Training):
    """FSDP2. Sizes that the ranks do not divide make shards of different sizes."""

    def __init__(self, arguments):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._shard = fully_shard
        super().__init__(arguments)
        self.ddp = self.model

    def make_model(self, width):
        model = super().make_model(width + 1)
        for each in (*model, model):
            if each is model or isinstance(each, nn.Linear):
                self._shard(each, mesh=self._mesh)
        return model

    def load_resharded(self, keep):
        """Load what another number of ranks has kept. Return its step."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        reader = keep.reader()
        if reader is None:
            return 0
        model, optimizer = get_state_dict(self.model, self.optimizers)
        state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        dcp.load(state, storage_reader=reader)
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizers, **loaded)
        self.scheduler.load_state_dict(state["scheduler"])
        return reader.step


class Rows(torch.utils.data.Dataset):
    """Samples that depend on nothing but their numbers."""

    def __getitem__(self, number):
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))


class Loaded(Training):
    """A data loader with a process of its own, which is a fork of this one."""

    def begin(self, step, steps):
        # An iterator draws a random number. Let it not be one of the training.
        how = {"batch_size": None, "num_workers": 1, "generator": torch.Generator()}
        self.rows = iter(torch.utils.data.DataLoader(Rows(), sampler=range(step, steps), **how))

    def inputs(self):
        return next(self.rows)


VARIANTS = {
    "adamw": Training,
    "fused": Fused,
    "foreach": Foreach,
    "autocast": Autocast,
    "average": Average,
    "tied": Tied,
    "compiled": Compiled,
    "compiled-model": CompiledModel,
    "momentum": Momentum,
    "closure": Closure,
    "two-optimizers": TwoOptimizers,
    "batch-norm": BatchNorm,
    "accumulation": Accumulation,
    "scaled": Scaled,
    "fsdp": FullySharded,
    "loaded": Loaded,
    "positioned": Positioned,
}


def digest(training, values):
    """Return a hash of the tensors, schedules, random numbers and values of this rank."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            found.update(str((value.dtype, tuple(value.shape))).encode())
            value = getattr(value, "_local_tensor", value)  # of a DTensor
            found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, each in value.items():
                found.update(repr(key).encode())
                add(each)
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    for each in training.kept().values():
        add(each.state_dict())
    add(torch.get_rng_state())
    add(values)
    return found.hexdigest()[:16]


class Log:
    def __init__(self, folder, rank):
        # A lost node begins a round, but costs no restart.
        self.attempt = int(os.environ.get("ELASTICRS_ROUND", "1")) - 1
        self._fd = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event, step=0, text="-"):
        line = f"{event} {self.attempt} {step} {time.monotonic_ns()} {os.getpid()} {text}\n"
        os.write(self._fd, line.encode())


class Faults:
    """The faults of this rank in this attempt. Each strikes between forward and backward of its step, except
    ``copy`` (SIGKILL in the first copy after this step), ``restore`` (SIGKILL while restoring the state) and
    ``flip`` (before the state is restored, all ranks damage all copies in their files; with ``flip-newest``,
    only the newest one). ``copy-agent`` and ``restore-agent`` kill the agent as well.
    """

    def __init__(self, texts, rank, log):
        self._log = log
        split = [text.split(":") for text in texts]
        self._kinds = {
            int(step): kind
            for kind, in_attempt, of_rank, step in split
            if in_attempt in ("*", str(log.attempt)) and of_rank in ("*", str(rank))
        }
        self._step = 0
        if {"flip", "flip-newest"} & {*self._kinds.values()}:
            flip(is_all="flip" in self._kinds.values())
            dist.barrier()
        copier.copy_and_sum = self._dying("copy", copier.copy_and_sum)
        torch._foreach_copy_ = self._dying("restore", torch._foreach_copy_)

    def _dying(self, kind, copy):
        """Wrap a function that copies tensors. If a fault of this kind is due, die after half of them."""

        def call(*lists, **how):
            due = {each for step, each in self._kinds.items() if step <= self._step}
            due &= {kind, f"{kind}-agent"}
            if due and (kind == "copy" or not self._step):
                copy(*(each[: len(each) // 2] for each in lists), **how)
                self._log.write("copies", self._step)
                if kind not in due:
                    os.kill(int(os.environ["ELASTICRS_KEEP"].split("/")[2]), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return copy(*lists, **how)

        return call

    def strike(self, step):
        """Fail as ordered for this step, if at all."""
        self._step = step
        kind = self._kinds.get(step)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "raise":
            raise ValueError("a bad batch")
        elif kind == "exit":
            sys.exit(3)
        elif kind == "hang":
            threading.Event().wait()
        elif kind == "scribble":
            scribble(random.Random(step))
        elif kind == "fork":
            self._fork(step)

    def _fork(self, step):
        """Fork a process that uses `Keep`, too, and fails."""
        child = os.fork()
        if not child:
            self.keep.step(step + 1)
            sys.excepthook(ValueError, ValueError("in the child"), None)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def flip(*, is_all):
    """Damage all copies in the file of this rank, or only the newest one."""
    from elasticrs._engine.inside.keep.file import KeepFile
    from elasticrs._engine.inside.keep.layout import Slot

    slots = [each for each in KeepFile(os.environ["ELASTICRS_KEEP"]).slots if each.complete_step is not None]
    for slot in sorted(slots, key=lambda each: -each.complete_step)[: None if is_all else 1]:
        slot.map[slot.words[Slot.DATA_AT]] ^= 1


def scribble(rng):
    """Write random words to random places of the file in which `Keep` keeps the state, then die."""
    descriptor = os.open(os.environ["ELASTICRS_KEEP"].partition(":")[2], os.O_RDWR)
    size = os.fstat(descriptor).st_size
    for _ in range(500):
        # Keep the first two words, by which a worker knows its file.
        place = rng.choice([rng.randrange(16, 512), rng.randrange(4096, 8192), rng.randrange(65536, size)])
        os.pwrite(descriptor, rng.choice([rng.randbytes(8), b"\xff" * 8, bytes(8)]), place // 8 * 8)
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv=None):
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = Log(arguments.folder, rank)
    log.write("start")
    training = VARIANTS[arguments.variant](arguments)
    every = arguments.every if arguments.every == "auto" else int(arguments.every)
    keep = Keep(every=every, replicated=False if arguments.sharded else "auto", **training.kept())
    faults = Faults(arguments.fault, rank, log)
    faults.keep = keep
    step = keep.restore(default=lambda: training.load_resharded(keep))
    log.write("restored", step, repr(keep.source).replace(" ", ""))
    training.begin(step, arguments.steps)
    while step < arguments.steps:
        step += 1
        if arguments.seeded:
            torch.manual_seed(step * dist.get_world_size() + rank)
        keep.values["samples"] = step * arguments.batch
        threading.Event().wait(arguments.pause)
        training.before_backward = lambda at=step: faults.strike(at)
        loss = training.step()
        training.scheduler.step()
        keep.step(step)
        log.write("ended", step, float(loss.detach()).hex())
    log.write("done", step, digest(training, dict(keep.values)))
    dist.barrier()
    dist.destroy_process_group()


def launch(nproc, folder, *arguments, max_nodes=1, max_restarts=9, **settings):
    """Run the training as function workers, which are forks of this process."""
    from elasticrs import LaunchConfig, elastic_launch

    # Create an optimizer before the forks, so that torch's modules for it are imported only once.
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    settings = {"max_same_failures": 0, **settings, "start_method": "fork", "max_restarts": max_restarts}
    config = LaunchConfig(1, max_nodes, int(nproc), **settings)
    elastic_launch(config, main)([folder, *arguments])


if __name__ == "__main__":
    main()
    # Threads of gloo now and then abort the interpreter's own exit (torch 2.15).
    sys.stdout.flush()
    os._exit(0)
