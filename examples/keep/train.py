"""Trains a model on handwritten digits, with `elasticrs.Keep`: after a failure, no step is trained again.

Run: elasticrun --standalone --nproc-per-node 4 --max-restarts 3 --hang-timeout 3 examples/keep/train.py
Try: add --accidents kill:60 raise:120 hang:180 to let workers fail in these steps. `make demo-keep` does so,
lets nodes fail, too, and compares elasticrun with torchrun.

The lines with the comment `# keep` are all that a script needs to use `Keep`. Under torchrun, they do
nothing, and after a failure the job continues from its last checkpoint.
"""

import argparse
import os
import queue
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticrs import Keep  # keep

BATCH = 16
EVERY = 25
"""Steps between two checkpoints."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("digits.pt"), help="file to load and to write"
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--accidents", nargs="*", default=[], help="a rank does this once: KIND:STEP")
    parser.add_argument("--stamps", action="store_true", help="print the monotonic time of each step")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
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
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    ddp = DistributedDataParallel(model)
    # Draw other batches and dropout masks on each rank. Keep restores the random number generators, too.
    torch.manual_seed(1 + rank)

    keep = Keep(**objects)  # keep
    step = keep.restore(default=lambda: load(arguments.checkpoint, objects))  # keep
    stamp(arguments, "continues", step)
    while step < arguments.steps:
        batch = torch.randint(len(images), (BATCH,))
        loss: Any = cross_entropy(ddp(images[batch]), labels[batch])
        have_accident(arguments, step + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        keep.step(step)  # keep
        stamp(arguments, "ended", step)
        if step % EVERY == 0 and rank == 0:
            save(arguments.checkpoint, objects, step)

    if rank == 0:
        with torch.no_grad():
            accuracy = (model.eval()(images).argmax(dim=1) == labels).float().mean()
        total = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"done: accuracy {accuracy:.2%}, sum of the parameters {total.hex()}\n", end="", flush=True)
    dist.barrier()


# --- checkpoints ---


def load(path: Path, objects: dict[str, Any]) -> int:
    """Load the checkpoint if there is one. Return its step, or 0."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    for name, each in objects.items():
        each.load_state_dict(saved[name])
    return int(saved["step"])


def save(path: Path, objects: dict[str, Any], step: int) -> None:
    """Replace the checkpoint atomically, so that a crash leaves either the old or the new one intact."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save({"step": step, **{name: each.state_dict() for name, each in objects.items()}}, partial)
    partial.replace(path)


# --- the accidents ---


def have_accident(arguments: argparse.Namespace, step: int) -> None:
    """Fail in this step if the option --accidents says so, but only the first time that the job reaches the
    step.

    For the accidents `drain` and `lose`, print a line, upon which `demo.py` acts: it sends SIGTERM to the
    agent of a worker that prints `drain`, and kills a worker that prints `lose` together with its agent.
    """
    rank, node = dist.get_rank(), os.environ.get("DEMO_NODE")
    kinds = {"1": ("drain",), "2": ("lose",)}.get(node or "", ("kill", "raise", "hang") if rank == 1 else ())
    for accident in arguments.accidents:
        kind, _, at = accident.partition(":")
        if int(at) != step or kind not in kinds:
            continue
        mark = arguments.checkpoint.with_name(f"{arguments.checkpoint.name}.{kind}")
        if mark.exists():
            continue
        mark.touch()
        stamp(arguments, kind, step)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise ValueError("a bad batch")
        elif kind in ("hang", "lose"):
            never_filled: queue.Queue[Any] = queue.Queue()
            never_filled.get()


def stamp(arguments: argparse.Namespace, what: str, step: int) -> None:
    if arguments.stamps:
        line = f"stamp {what} rank={dist.get_rank()} step={step} ns={time.monotonic_ns()} pid={os.getpid()}\n"
        # Write with a single call, because the workers share this descriptor, and `print` may need two.
        os.write(1, line.encode())


if __name__ == "__main__":
    main()
    # Skip the interpreter's shutdown. Threads of gloo outlive `destroy_process_group` and sometimes abort it
    # (torch 2.15), which would cause a failure and a restart.
    sys.stdout.flush()
    os._exit(0)
