"""The workers of several nodes are members of one rendezvous. Each agent replaces its own workers."""

import re
from pathlib import Path

import pytest
from helpers.nodes import meeting
from helpers.procs import HANG

pytestmark = pytest.mark.beyond_torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_state" / "train.py"

SCRIPT = """
    # As the example, but it imports less.
    import os, signal
    import torch.distributed as dist
    from torch import ones
    from elasticrs.train import AgentCoordinator, State, train
    from elasticrs.train.distributed import all_gather_return_max_long

    class Steps(State):
        step = 0
        def sync(self, world_size, rank):
            _, self.step = all_gather_return_max_long(self.step)

    def step(state):
        if state.step == 20:
            raise StopIteration
        if state.step == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(ones(1))
        state.step += 1
        os.write(1, f"stamp done step={state.step} pid={os.getpid()}\\n".encode())
        return state, None

    train(AgentCoordinator("gloo"), step, Steps())
    if os.environ["RANK"] == "0":
        os.write(1, b"final accuracy\\n")
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"script": EXAMPLE}, marks=pytest.mark.slow),
        {"token": "secret", "conf": "max_node_losses=0,scale_up=0"},
    ],
)
def test_a_worker_keeps_running_if_a_worker_of_another_node_dies(launch, worker_script, how):
    env = {"ELASTICRS_TOKEN": how["token"]} if "token" in how else {}
    node = (
        *((f"--rdzv-conf={how['conf']}",) if "conf" in how else ()),
        *(*meeting(), "--nproc-per-node=1", "--max-restarts=1", "--on-failure=replace", "--warm=auto"),
        how.get("script") or worker_script(SCRIPT),
        *("--stamps", "--epochs=1", "--kill-rank=1", "--kill-step=5"),
    )
    jobs = [launch(*node, env=env), launch(*node, env=env)]
    assert [job.wait(4 * HANG) for job in jobs] == [0, 0]
    done = [set(re.findall(r"stamp done .*pid=(\d+)", job.stdout)) for job in jobs]
    assert sorted(map(len, done)) == [1, 2]
    assert sum(len(re.findall("final accuracy", job.stdout)) for job in jobs) == 1
    assert sorted(len(re.findall(r"replaced by", job.stderr)) for job in jobs) == [0, 1]
