"""The examples' common task: for random points, learn on which side of a curved surface each of them is.

An example imports its data, its model and its arguments from here, and contains only what it is about.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

POINTS = 1024
FEATURES = 16
GLOBAL_BATCH = 64
"""Points in a step, over all ranks: the result does not depend on how many ranks share them."""


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments of an example: the folder of its checkpoints and the number of epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints", Path(sys.argv[0]).stem),
        help="folder to resume from and to save to (%(default)s)",
    )
    parser.add_argument("--epochs", type=int, default=300)
    arguments = parser.parse_args()
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    return arguments


class Points(torch.utils.data.Dataset):
    """Random points with labels. They are the same in every process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(POINTS, FEATURES, generator=generator)
        self.labels = (self.features.sin().sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return POINTS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.labels[index]


def make_model() -> nn.Sequential:
    """Return a classifier with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def join() -> torch.device:
    """Join the process group, and return this rank's device: its GPU, or the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def say(line: str) -> None:
    """Print a line on rank 0."""
    if os.environ["RANK"] == "0":
        print(line, flush=True)


# --- checkpoints in folders ---


def latest(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint, or `None` if there is none."""
    return max(checkpoints.glob("epoch-*"), default=None, key=number)


def number(checkpoint: Path) -> int:
    """Return the number of epochs completed when this checkpoint was saved."""
    return int(checkpoint.name.removeprefix("epoch-"))


def publish(partial: Path, epochs: int) -> None:
    """Rename a checkpoint that all ranks have saved, and remove the previous one. All ranks must call this
    function.

    A rank may be killed while it saves. Only a complete checkpoint gets a name that :func:`latest` finds.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        previous = latest(partial.parent)
        partial.rename(partial.with_name(f"epoch-{epochs}"))
        if previous is not None:
            shutil.rmtree(previous)


# --- the end ---


def loss_on_points(model: nn.Module, device: torch.device) -> float:
    """Return the loss on all points. All ranks must call this function, because a sharded model needs all of
    them.
    """
    points = Points()
    with torch.no_grad():
        return float(cross_entropy(model(points.features.to(device)), points.labels.to(device)))


def report(loss: float) -> None:
    """Print the number of ranks and the final loss."""
    say(f"done: {dist.get_world_size()} ranks, loss {loss:.5f}")


def leave() -> None:
    """Exit when all ranks are done, because no rank may exit while another one uses its connection."""
    uses_gloo = dist.get_backend() == "gloo"
    dist.barrier()
    dist.destroy_process_group()
    if uses_gloo:
        # Skip the interpreter's shutdown, because threads of gloo may still run and abort it (torch 2.15).
        sys.stdout.flush()
        os._exit(0)
