"""Restarted workers form a process group again, because they do not find the store of an earlier attempt."""

import sys

import pytest
from helpers.nodes import WORKERS

# Import torch once for all attempts, because the import takes most of an attempt's time.
FORKS = f"""
import sys
sys.path.insert(0, {str(WORKERS)!r})
from all_reduce import main
from elasticrs import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 4, rdzv_backend="c10d", max_restarts=10, start_method="fork")
elastic_launch(config, main)(10)
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.beyond_torchrun
@pytest.mark.timeout(300)
def test_forked_workers_form_a_gloo_group_in_ten_restarts_in_a_row(launch, worker_script):
    launched = launch(argv=(sys.executable, worker_script(FORKS))).exits(0, timeout=240)
    # If the ranks of an attempt do not meet, the attempt fails, and its sums are missing. The other ranks may
    # be stopped before they write theirs.
    assert launched.stdout.count("SUM 10 in rank 3\n") == 11, launched.stderr


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
def test_a_gloo_group_forms_at_the_start_and_after_each_restart(launch, failures, warm):
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", *warm)
    job = launch(*options, WORKERS / "all_reduce.py", env={"FAILURES": str(failures)}).exits(0, timeout=240)
    assert job.stdout.count("SUM 3 in rank 1\n") == failures + 1, job.stderr
