"""DistributedDataParallel on handwritten digits. One rank hangs and is found, and the job resumes.

Run: elasticrun --standalone --nproc-per-node 4 --max-restarts 2 --hang-timeout 3 examples/hang/train.py
Try: add --hang-rank 2, and rank 2 hangs in epoch 3. `make demo-hang` does that, and shows the saved stack.

The loop reports each step with `heartbeat(step)`. The rest is in `../ddp_digits/train.py`.
"""

import argparse
import importlib.util
import os
import queue
import sys
from pathlib import Path
from typing import Any

from elasticrs.timer import heartbeat


def digits() -> Any:
    """Return the example `ddp_digits/train.py` as a module."""
    path = Path(__file__).parents[1] / "ddp_digits" / "train.py"
    spec = importlib.util.spec_from_file_location("ddp_digits_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("digits.pt"), help="file to resume from, and to write"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--hang-rank", type=int, help="this rank waits once for a batch that never comes ...")
    parser.add_argument("--hang-epoch", type=int, default=3, help="... in the middle of this epoch")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


def train(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    example, rank = digits(), dist.get_rank()
    images, labels, held_out_images, held_out_labels = example.load_data()
    model = DistributedDataParallel(example.make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    done = example.resume(arguments.checkpoint, model, optimizer, torch.device("cpu"))
    if done and rank == 0:
        print(f"resumed after epoch {done}", flush=True)

    for epoch in range(done + 1, arguments.epochs + 1):
        batches = example.batches_of(epoch, len(images), arguments.batch_size)
        for number, batch in enumerate(batches):
            heartbeat((epoch - 1) * len(batches) + number)
            if number == len(batches) // 2:
                hang_if_told(arguments, rank, epoch)
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        if rank == 0:
            with heartbeat.section("checkpoint", limit=60):
                example.save(arguments.checkpoint, model, optimizer, epoch)
            print(f"epoch {epoch}/{arguments.epochs}: loss {loss:.4f}", flush=True)

    if rank == 0:
        accuracy = example.accuracy_on(model, held_out_images, held_out_labels)
        print(f"final accuracy on held-out data: {accuracy:.2%}", flush=True)
    dist.barrier()


def hang_if_told(arguments: argparse.Namespace, rank: int, epoch: int) -> None:
    """Wait for a batch that no thread will pass on, as a data loader does whose reader has died."""
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_attempt and rank == arguments.hang_rank and epoch == arguments.hang_epoch:
        read: queue.Queue[Any] = queue.Queue()
        read.get()


if __name__ == "__main__":
    main()
    # Skip the interpreter's shutdown, as in the other example, because threads of gloo may abort it.
    sys.stdout.flush()
    os._exit(0)
