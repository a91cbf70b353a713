"""The workers of several nodes are members of one rendezvous. Each agent replaces its own workers."""

import re
from pathlib import Path

import pytest
from helpers import ports
from helpers.procs import HANG

pytestmark = pytest.mark.beyond_torchrun

TRAIN = Path(__file__).parents[2] / "examples" / "train_state" / "train.py"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"token": "secret", "conf": "max_node_losses=0,scale_up=0"},
    ],
)
def test_the_worker_of_another_node_stays_when_one_dies(launch, how):
    env = {"ELASTICRS_TOKEN": how["token"]} if how else {}
    node = (
        *((f"--rdzv-conf={how['conf']}",) if how else ()),
        *(
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{ports.free()}",
        ),
        *("--max-restarts=1", "--on-failure=replace", "--warm=auto", TRAIN),
        *("--stamps", "--epochs=1", "--kill-rank=1", "--kill-step=5"),
    )
    jobs = [launch(*node, env=env), launch(*node, env=env)]
    assert [job.wait(4 * HANG) for job in jobs] == [0, 0]
    done = [set(re.findall(r"stamp done .*pid=(\d+)", job.stdout)) for job in jobs]
    assert sorted(map(len, done)) == [1, 2]
    assert sum(len(re.findall("final accuracy", job.stdout)) for job in jobs) == 1
    assert sorted(len(re.findall(r"replaced by", job.stderr)) for job in jobs) == [0, 1]
