"""DistributedDataParallel on handwritten digits. Each attempt resumes from the checkpoint of the last epoch.

Run: elasticrun --standalone --nproc-per-node 4 --max-restarts 2 examples/ddp_digits/train.py
Try: add --kill-rank 2, and rank 2 is killed in epoch 3. The job restarts after epoch 2.

This is an ordinary script, which also runs under torchrun. It uses nothing of elasticrs.
"""

import argparse
import os
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("digits.pt"), help="file to resume from, and to write"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--kill-rank", type=int, help="this rank dies once, by SIGKILL ...")
    parser.add_argument("--kill-epoch", type=int, default=3, help="... in the middle of this epoch")
    parser.add_argument("--stamps", action="store_true", help="print the monotonic time of starts and deaths")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.stamps:
        stamp("up")

    torch.manual_seed(0)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


def train(arguments: argparse.Namespace, device: Any) -> None:
    rank = dist.get_rank()
    images, labels, held_out_images, held_out_labels = (part.to(device) for part in load_data())
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.Adam(model.parameters())

    done = resume(arguments.checkpoint, model, optimizer, device)
    if done and rank == 0:
        print(f"resumed after epoch {done}", flush=True)

    for epoch in range(done + 1, arguments.epochs + 1):
        # Compute the learning rate from the epoch alone, so that it need not be restored.
        optimizer.param_groups[0]["lr"] = 5e-3 * (arguments.epochs + 1 - epoch) / arguments.epochs
        batches = batches_of(epoch, len(images), arguments.batch_size)
        for step, batch in enumerate(batches):
            if step == len(batches) // 2:
                die_if_told(arguments, rank, epoch)
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            if arguments.stamps and (epoch, step) == (done + 1, 0):
                stamp("trains")
        if rank == 0:
            save(arguments.checkpoint, model, optimizer, epoch)
            accuracy = accuracy_on(model, held_out_images, held_out_labels)
            print(f"epoch {epoch}/{arguments.epochs}: loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)

    if rank == 0:
        accuracy = accuracy_on(model, held_out_images, held_out_labels)
        print(f"final accuracy on held-out data: {accuracy:.2%}", flush=True)
    # Let all ranks finish before any of them exits. Gloo's threads also need time to release the last
    # gradients, because the interpreter would otherwise abort.
    dist.barrier()


def make_model() -> Any:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


# --- data ---


def load_data() -> tuple[Any, Any, Any, Any]:
    """Return images and labels for training, and held-out images and labels. All ranks use the same split."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    held_out = len(images) // 5
    return images[held_out:], labels[held_out:], images[:held_out], labels[:held_out]


def batches_of(epoch: int, samples: int, batch_size: int) -> list[Any]:
    """Return this rank's batches. The order differs between epochs, but does not change when an epoch is
    repeated.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1000 + epoch))
    world_size = dist.get_world_size()
    # All ranks need the same number of batches, because each step is a collective operation.
    share: Any = order[: samples - samples % world_size][dist.get_rank() :: world_size]
    return list(share.split(batch_size))


def accuracy_on(model: Any, images: Any, labels: Any) -> float:
    with torch.no_grad():
        # Bypass the wrapper, which would wait for the other ranks.
        correct = model.module(images).argmax(dim=1) == labels
    return float(correct.float().mean())


# --- checkpoints ---


def resume(path: Path, model: Any, optimizer: Any, device: Any) -> int:
    """Load the checkpoint if there is one. Return the number of completed epochs."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epoch"])


def save(path: Path, model: Any, optimizer: Any, epoch: int) -> None:
    """Replace the checkpoint atomically, so that a crash at any moment leaves either the old or the new one
    intact.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# --- the accident ---


def die_if_told(arguments: argparse.Namespace, rank: int, epoch: int) -> None:
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_attempt and rank == arguments.kill_rank and epoch == arguments.kill_epoch:
        if arguments.stamps:
            stamp("dies")
        os.kill(os.getpid(), signal.SIGKILL)


def stamp(what: str) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    line = f"stamp {what} rank={os.environ['RANK']} attempt={attempt} ns={time.monotonic_ns()}"
    line += f" world={os.environ['WORLD_SIZE']}\n"
    # Write with a single call, because the workers share this descriptor, and `print` may need two.
    os.write(1, line.encode())


if __name__ == "__main__":
    main()
    # Skip the interpreter's shutdown. Threads of gloo outlive `destroy_process_group` and sometimes abort it
    # (torch 2.15), which would cause a failure and a restart.
    sys.stdout.flush()
    os._exit(0)
