"""Trains a model on handwritten digits, and saves a checkpoint when the launcher asks for one.
It does that at `elasticctl checkpoint`, and before the job is stopped or restarted, or a node is drained.

Run: elasticrun --standalone --nproc-per-node 3 examples/operate/train.py
Try: elasticctl checkpoint, elasticctl stop, and run it again. `make demo-operate` does this on three nodes.

The data of a batch depend only on the step and the rank. So a training that was stopped and continued ends
with the same parameters, bit by bit, as one that was never stopped.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticrs import checkpoint_requested

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("digits.pt"), help="file to load and to write"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait after each step")
    parser.add_argument("--tell", type=int, help="also print the sum of the parameters after this step")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


def train(arguments: argparse.Namespace) -> None:
    rank = dist.get_rank()
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Without this option, DDP adds gradients in another order from the second step on. After a resume, the
    # sums of three ranks would then be rounded differently.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    step = load(arguments.checkpoint, model, optimizer)
    tell(f"rank {rank} of {dist.get_world_size()} continues at step {step}")
    while step < arguments.steps:
        numbers = torch.Generator().manual_seed(1000 * step + rank)
        batch = torch.randint(len(images), (BATCH,), generator=numbers)
        loss: Any = cross_entropy(ddp(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step in (arguments.tell, arguments.steps):
            tell(f"after step {step}: sum of the parameters {sum_of(model)}")
        if wish := checkpoint_requested():  # All ranks get "save" or "stop" in the same step.
            if rank == 0:
                save(arguments.checkpoint, model, optimizer, step)
            tell(f"rank {rank} is asked to {wish} after step {step}")
            if wish == "stop":
                return
        time.sleep(arguments.pace)


def tell(line: str) -> None:
    # Write the line at once, so that the lines of several processes do not mix.
    os.write(1, f"{line}\n".encode())


def sum_of(model: nn.Module) -> str:
    return sum(float(each.detach().double().sum()) for each in model.parameters()).hex()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint. Write it to another file first, so that the previous checkpoint is never lost."""
    new = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
    new.replace(path)


if __name__ == "__main__":
    main()
