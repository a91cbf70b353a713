"""A training whose script handles signals as usual scripts do, without a line for elasticrs.

Usage: ``agreed_training.py LOOP HANDLER [FOLDER]`` as the program of a job. ``LOOP`` says how a step is made.
With ``compiled`` and ``compiled_first``, torch does not report the optimizer's steps, which come before or
(``compiled_first``) after ``zero_grad``. With ``own``, the optimizer is not torch's, and the loop sends
heartbeats. ``HANDLER`` says what the script does on SIGUSR1 and, with ``FOLDER``, on SIGTERM:

- ``note``: the handler prints the step, the place in the loop, and a digest of the state that it could save.
- ``flag``: the handler sets a flag. The loop looks at the flag after each step, and prints the same there.
  After SIGTERM, the loop also saves the state in ``FOLDER``, and exits with code 7.
- ``save``: like ``note``, but with ``FOLDER``, the handler also saves the state there, between two barriers
  as in most scripts. After SIGTERM, it exits with code 7.

With ``FOLDER``, the training resumes from ``FOLDER/checkpoint``, and ends after ``STEPS`` steps. It prints
``BEGUN RANK`` after three steps, ``ACTED RANK STEP PLACE DIGEST`` at a signal, and ``END RANK DIGEST``.
"""

import hashlib
import os
import random
import select
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from elasticrs.timer import heartbeat

LOOP, HANDLER = sys.argv[1:3]
FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else None
LAST = int(os.environ.get("STEPS", "60")) if FOLDER else 1 << 40


def say(text):
    os.write(1, f"{text}\n".encode())


class Samples(Dataset):
    """Samples that depend only on rank and position, so that a resumed training gets the same ones."""

    def __init__(self, rank, start):
        self.rank, self.start = rank, start

    def __len__(self):
        return 1 << 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed((self.start + index) * 1000 + self.rank)
        return torch.randn(8, 16, generator=generator)


def network(out):
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, out))


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.step, self.place = 0, "start"
        self.nets = [network(16), network(1)] if LOOP == "gan" else [network(16)]
        self.optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in self.nets]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizers[0], lambda step: 0.97**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=4)
        if FOLDER and (FOLDER / "checkpoint").exists():
            self.load(torch.load(FOLDER / "checkpoint"))
        self.start = self.step
        self.steps = self.optimizers[0].step
        if LOOP.startswith("compiled"):
            self.steps = torch.compile(self.steps, backend="eager")
        # Keep the buckets, which DistributedDataParallel usually changes after the first step. With more than
        # two ranks, the change rounds sums in another way, so that a resumed training would differ.
        self.models = [DistributedDataParallel(net, find_unused_parameters=True) for net in self.nets]
        self.jitter = random.Random(os.getpid())

    def parts(self):
        return [*self.nets, *self.optimizers, self.scheduler, self.scaler]

    def load(self, saved):
        self.step = saved["step"]
        for part, state in zip(self.parts(), saved["parts"], strict=True):
            part.load_state_dict(state)

    def digest(self):
        tensors = [p.detach().numpy().tobytes() for net in self.nets for p in net.parameters()]
        learned = [str(self.scheduler.get_last_lr()).encode(), str(self.step).encode()]
        return hashlib.sha256(b"".join([*tensors, *learned])).hexdigest()[:16]

    def act(self):
        say(f"ACTED {self.rank} {self.step} {self.place} {self.digest()}")

    def save(self):
        dist.barrier()
        if self.rank == 0:
            parts = [part.state_dict() for part in self.parts()]
            torch.save({"step": self.step, "parts": parts}, FOLDER / "checkpoint.new")
            (FOLDER / "checkpoint.new").replace(FOLDER / "checkpoint")
        dist.barrier()

    def train(self, batches):
        for batch in batches:
            self.place = "work"
            if LOOP == "own":
                heartbeat(self.step)
            select.select([], [], [], 0.001 + self.jitter.random() * 0.004)
            self.make_step(batch)
            self.step += 1
            self.place = "end"
            if self.step - self.start == 3:
                say(f"BEGUN {self.rank}")
            self.look()
            if self.step == LAST:
                return

    def look(self):
        """If a signal handler has set the flag, act on it."""
        if flag:
            signum = flag.pop()
            flag.clear()
            self.act()
            if FOLDER and signum == signal.SIGTERM:
                self.save()
                os._exit(7)

    def make_step(self, batch):
        model, optimizer = self.models[0], self.optimizers[0]
        if LOOP == "accumulation":
            for part in batch.chunk(4):
                (model(part) - part).pow(2).mean().backward()
                select.select([], [], [], self.jitter.random() * 0.002)
            optimizer.step()
        elif LOOP == "gan":
            judge, other = self.models[1], self.optimizers[1]
            other.zero_grad()
            judge(batch).mean().backward()
            other.step()
            self.place = "between"
            judge(model(batch)).mean().backward()
            optimizer.step()
        elif LOOP == "scaled":
            # The scale of the loss grows until it overflows, so that the scaler skips some optimizer steps.
            self.scaler.scale((model(batch) - batch).pow(2).mean()).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
        elif LOOP == "own":
            (model(batch) - batch).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
                    parameter.grad = None
            return
        else:
            if LOOP == "compiled_first":
                optimizer.zero_grad()
            (model(batch) - batch).pow(2).mean().backward()
            self.steps()
        if LOOP != "compiled_first":
            optimizer.zero_grad()
        if LOOP in ("plain", "accumulation", "gan"):
            self.scheduler.step()


def on_signal(signum, _frame):
    if HANDLER == "flag":
        flag.append(signum)
        return
    training.act()
    if HANDLER == "save" and FOLDER:
        training.save()
        if signum == signal.SIGTERM:
            os._exit(7)


flag = []
torch.set_num_threads(1)
dist.init_process_group("gloo")
training = Training()
signal.signal(signal.SIGUSR1, on_signal)
if FOLDER:
    signal.signal(signal.SIGTERM, on_signal)
training.train(DataLoader(Samples(training.rank, training.step), batch_size=None))
say(f"END {training.rank} {training.digest()}")
os._exit(0)
