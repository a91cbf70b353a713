"""A crash, a restart, and collectives again: where workers of torchrun meet the keys of their predecessors.

See pytorch issue 135712.
"""

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = """
    import os, datetime
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    for _ in range(3):
        dist.all_reduce(ones)
    if dist.get_rank() == 0:
        print("SUM", int(ones), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("repetition", range(10))
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_work_after_a_restart(launch, worker_script, ranks, repetition):
    job = launch("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1", worker_script(SCRIPT))
    assert job.wait(timeout=55) == 0, job.stderr
    assert job.stdout == f"SUM {ranks**4}\n"
    assert "exited with code 7" in job.stderr
