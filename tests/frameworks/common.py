"""What the scripts beside this share: data, the accident, and the line by which the test judges a run."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

EPOCHS = 3
BATCHES_PER_EPOCH = 4
BATCH_SIZE = 8
WORLD_SIZE = 2
FEATURES = 16

ACCIDENT_STEP = BATCHES_PER_EPOCH + 2
"""Steps, from 1, over all epochs. In the middle of the second epoch: the first one's checkpoint is whole, as
the step before this one was a collective of all ranks that followed it."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--directory", type=Path, required=True, help="for checkpoints; kept between attempts"
    )
    parser.add_argument("--fail", action="store_true", help="the last rank exits 1 in the first attempt")
    return parser.parse_args()


class Rows(torch.utils.data.Dataset):
    """Random features, and which of two classes a hidden plane puts them in."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        rows = BATCHES_PER_EPOCH * BATCH_SIZE * WORLD_SIZE
        self.features = torch.randn(rows, FEATURES, generator=generator)
        self.labels = (self.features.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.labels[index]


def make_model() -> nn.Module:
    """The same weights on every rank and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 2))


def fail_if_told(arguments: argparse.Namespace, step: int) -> None:
    """The accident: the last rank leaves with exit code 1, once in the life of the job.

    Not by an exception: see :func:`leave`.
    """
    is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    is_last_rank = int(os.environ["RANK"]) == WORLD_SIZE - 1
    if arguments.fail and is_first_attempt and is_last_rank and step == ACCIDENT_STEP:
        say("accident", step=step)
        os._exit(1)


def report(framework: str, steps: int, weights: float) -> None:
    """Say how this process ended its training.

    ``steps`` are those of this attempt alone, and ``weights`` is a sum over all parameters.
    """
    say(
        "done",
        framework=framework,
        world=dist.get_world_size(),
        backend=dist.get_backend(),
        steps=steps,
        weights=f"{weights:.9f}",
    )


def say(what: str, **values: object) -> None:
    """One line of ``name=value``, in one write: the ranks share the descriptor."""
    told = {"rank": os.environ["RANK"], "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"], **values}
    os.write(1, (f"{what} " + " ".join(f"{name}={value}" for name, value in told.items()) + "\n").encode())


def sum_of(model: nn.Module) -> float:
    return float(sum(each.detach().double().abs().sum() for each in model.parameters()))


def leave() -> None:
    """End the process with success, and nothing else.

    Threads of gloo outlive the process group, and now and then one of them aborts the interpreter on its way
    out (torch 2.15): a failure, and a restart, after all is done.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
