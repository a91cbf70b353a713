"""Restarted workers meet again in a process group: the store of a former attempt must not be found."""

import re

import pytest

TRAIN = """
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["FAILURES"]):
        if dist.get_rank() == dist.get_world_size() - 1:
            os._exit(7)
        # Fails, or waits for the one that is gone.
        dist.all_reduce(ones)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo now and then abort the interpreter's own way out (torch 2.15).
    os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.beyond_torchrun
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, 4])
def test_a_restart_succeeds_ten_times_in_a_row(launch, worker_script, n):
    options = ("--standalone", "--nproc-per-node", str(n), "--max-restarts", "10")
    launched = launch(*options, worker_script(TRAIN), env={"FAILURES": "10"})
    # An attempt that does not meet fails of itself, and the one that is missing at the end tells of it.
    launched.exits(0, timeout=240)
    told = re.findall(rf"elasticrs: rank {n - 1} \(pid \d+\) exited with code 7; stopping", launched.stderr)
    assert len(told) == 10, launched.stderr


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_a_process_group_forms(launch, worker_script):
    launch("--standalone", "--nproc-per-node", "2", worker_script(TRAIN), env={"FAILURES": "0"}).exits(0)
