"""Restarted workers form a process group again, because they do not find the store of an earlier attempt."""

import re
import sys

import pytest

TRAIN = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist

def train(failures):
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failures:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.write(1, b"ALL HAVE MET\\n")
            os._exit(7)
        # Fails, or waits for the one that is gone.
        dist.all_reduce(ones)
    dist.barrier()
    dist.destroy_process_group()
"""
PROGRAM = """
train(int(sys.argv[1]))
# Threads of gloo now and then abort the interpreter's own way out (torch 2.15).
os._exit(0)
"""
# Import torch once for all attempts, because the import takes most of an attempt's time.
FORKS = """
from elasticrs import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 4, rdzv_backend="c10d", max_restarts=10, start_method="fork")
elastic_launch(config, train)(10)
"""


def meetings(launched):
    """Return the number of attempts in which all ranks met. The reported rank is not checked, because the
    exits race.
    """
    return len(re.findall("ALL HAVE MET", launched.stdout))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.beyond_torchrun
@pytest.mark.timeout(300)
def test_forked_workers_form_a_gloo_group_in_ten_restarts_in_a_row(launch, worker_script):
    argv = (sys.executable, worker_script(TRAIN + FORKS))
    # If the ranks of an attempt do not meet, the attempt fails and is missing from the count.
    launched = launch(argv=argv).exits(0, timeout=240)
    assert meetings(launched) == 10, launched.stderr


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("failures", "warm"),
    [
        (0, ()),
        pytest.param(3, (), marks=[pytest.mark.slow, pytest.mark.beyond_torchrun]),
        pytest.param(3, ("--warm", "auto"), marks=[pytest.mark.slow, pytest.mark.beyond_torchrun]),
    ],
)
def test_a_gloo_group_forms_at_the_start_and_after_each_restart(launch, worker_script, failures, warm):
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", *warm)
    launched = launch(*options, worker_script(TRAIN + PROGRAM), str(failures)).exits(0, timeout=240)
    assert meetings(launched) == failures, launched.stderr
