"""Handwritten digits with `elasticrs.train`: a dead worker costs one step, and the others keep running.

Run: elasticrun --standalone --nproc-per-node 4 --max-restarts 3 --on-failure replace \\
         examples/train_state/train.py
Try: add --kill-rank 2, and rank 2 is killed in step 60. `make demo-train` compares it with a calm run.

The job is a state and a step over it. In `sync`, the workers take over the state of the one that is furthest.
"""

import argparse
import copy
import hashlib
import io
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticrs.train import AgentCoordinator, State, train
from elasticrs.train.distributed import all_gather_return_max_long, broadcast_binary


class Digits(State):
    """The model, its optimizer, and the progress of the training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.arguments = arguments
        self.images, self.labels, self.unseen, self.answers = digits()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.step = 0
        self.epoch = 0
        self.seen = 0  # samples processed in this epoch by all workers

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a new process needs to continue."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.step, self.epoch, self.seen),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``, possibly in another process."""
        self.model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.step, self.epoch, self.seen = state_dict["progress"]

    def capture_snapshot(self) -> dict[str, Any]:
        """Return a copy of the state. ``train`` calls this before each step, so that it can undo a failed
        step.
        """
        return copy.deepcopy(self.state_dict())

    def apply_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore the copy returned by ``capture_snapshot``, because the step after it failed."""
        self.load_state_dict(snapshot)

    def sync(self, world_size: int, rank: int) -> None:
        """Make all workers, including new ones, continue from the state of the worker that is
        furthest ahead.
        """
        leader, _ = all_gather_return_max_long(self.step)
        stream = io.BytesIO()
        if rank == leader:
            self.save(stream)
        data = broadcast_binary(
            torch.frombuffer(bytearray(stream.getvalue() or b"-"), dtype=torch.uint8), leader
        )
        self.load(io.BytesIO(data.numpy().tobytes()))
        self.rank, self.world_size = rank, world_size
        # Each worker creates a new wrapper. With this option, wrappers never change their buckets, so the
        # sums are identical to the last bit with or without a failure.
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)

    def batch(self) -> torch.Tensor:
        """Return this worker's samples for this step. No sample is used twice, even if workers join
        or leave.
        """
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.epoch))
        begin = self.seen + self.rank * self.arguments.batch_size
        return order[begin : begin + self.arguments.batch_size]

    def accuracy(self) -> float:
        """Return the accuracy on held-out digits, in per cent."""
        with torch.no_grad():
            return 100 * (self.model(self.unseen).argmax(1) == self.answers).float().mean().item()

    def digest(self) -> str:
        """Return a hash of all parameters."""
        return hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        ).hexdigest()


def train_step(state: Digits) -> tuple[Digits, None]:
    """Train on one batch per worker."""
    arguments = state.arguments
    if state.epoch == arguments.epochs:
        raise StopIteration
    stamp("begins", state)
    indices = state.batch()
    state.optimizer.zero_grad()
    loss = cross_entropy(state.ddp(state.images[indices]), state.labels[indices])
    if dies_here(state):
        stamp("dies", state)
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    state.optimizer.step()
    state.step += 1
    state.seen += state.world_size * arguments.batch_size
    if state.seen + state.world_size * arguments.batch_size > len(state.images):
        state.epoch, state.seen = state.epoch + 1, 0
    stamp("done", state)
    return state, None


def dies_here(state: Digits) -> bool:
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return is_first and (state.rank, state.step) == (state.arguments.kill_rank, state.arguments.kill_step)


def stamp(what: str, state: Digits) -> None:
    if state.arguments.stamps:
        print(
            f"stamp {what} rank={state.rank} pid={os.getpid()} step={state.step} ns={time.monotonic_ns()}",
            flush=True,
        )


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    is_unseen = torch.arange(len(x)) % 5 == 0
    return x[~is_unseen], y[~is_unseen], x[is_unseen], y[is_unseen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--kill-rank", type=int, help="this rank dies once, by SIGKILL ...")
    parser.add_argument("--kill-step", type=int, default=60, help="... in the middle of this step")
    parser.add_argument("--stamps", action="store_true", help="print the monotonic time of each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state = train(AgentCoordinator("gloo"), train_step, Digits(arguments))
    assert isinstance(state, Digits)
    # Use RANK instead of state.rank, which is set by `sync`. A replacement worker that starts after the end
    # of training never calls `sync`.
    if os.environ["RANK"] == "0":
        print(
            f"final accuracy on held-out data: {state.accuracy():.1f}%, parameters {state.digest()}",
            flush=True,
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
