"""A training loop with gloo and DistributedDataParallel. It saves a checkpoint after each step and resumes
from it.

`$CHECKPOINT` is a file that all nodes see: the number of steps done. It ends after `$STEPS` steps, or when
the file `$CHECKPOINT.stop` exists. `$PACE` is the number of seconds that a step takes at least.
Rank 0 prints `step N world W`; every rank prints `TRAINING pid=... rank=... world=... from=N` when it begins.
"""

import os
import select
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path(os.environ["CHECKPOINT"])
STEPS = int(os.environ.get("STEPS", "0")) or None
PACE = float(os.environ.get("PACE", "0.05"))


def done_so_far() -> int:
    return int(CHECKPOINT.read_text(encoding="utf-8")) if CHECKPOINT.exists() else 0


def save(step: int) -> None:
    # Use a different name in each process, because a disconnected worker may still be writing.
    partial = CHECKPOINT.with_name(f"{CHECKPOINT.name}.{os.getpid()}")
    partial.write_text(str(step), encoding="utf-8")
    partial.replace(CHECKPOINT)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Take the step from a single rank, so that all ranks start at the same step.
    start = torch.tensor([done_so_far()])
    dist.broadcast(start, 0)
    step = int(start.item())
    restart, host = os.environ["TORCHELASTIC_RESTART_COUNT"], socket.gethostname()
    line = f"TRAINING pid={os.getpid()} host={host} rank={rank} world={world} restart={restart} from={step}\n"
    os.write(1, line.encode())
    is_last = torch.zeros(1)
    while not is_last.item():
        step += 1
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == world
        if rank == 0:
            save(step)
            os.write(1, f"step {step} world {world}\n".encode())
            is_last.fill_(step == STEPS or CHECKPOINT.with_name(f"{CHECKPOINT.name}.stop").exists())
        dist.broadcast(is_last, 0)
        select.select([], [], [], PACE)
    dist.barrier()
    dist.destroy_process_group()
    os.write(1, f"FINISHED rank={rank} world={world} steps={step}\n".encode())
    # Skip the interpreter's shutdown, because threads of gloo sometimes abort it (torch 2.15).
    os._exit(0)


main()
