"""Forms a gloo group, and sums the ranks, counted from 1. `all_reduce.py [ADDRESS PORT]`: where it forms.

In the first ``FAILURES`` attempts (a variable), the last rank fails afterwards.
"""

import os
import sys
from datetime import timedelta

if len(sys.argv) > 1:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = sys.argv[1:]

import torch
import torch.distributed as dist


def main(failures):
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=20))
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    os.write(1, f"SUM {int(total)} in rank {dist.get_rank()}\n".encode())
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failures:
        if dist.get_rank() == dist.get_world_size() - 1:
            os._exit(7)
        # Fails, or waits for the one that is gone.
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ.get("FAILURES", "0")))
    # Threads of gloo now and then abort the interpreter's own way out (torch 2.15).
    os._exit(0)
