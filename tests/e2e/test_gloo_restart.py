"""Restarted workers meet again in a process group: the store of a former attempt must not be found."""

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
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
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
    script = worker_script(TRAIN)
    for run in range(10):
        launched = launch("--standalone", "--nproc-per-node", str(n), "--max-restarts", "1", script)
        assert launched.wait() == 0, f"run {run}:\n{launched.stderr}"


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_a_process_group_forms(launch, worker_script):
    script = worker_script(TRAIN.replace('== "0"', '== "never"'))
    launched = launch("--standalone", "--nproc-per-node", "2", script)
    assert launched.wait() == 0, launched.stderr
