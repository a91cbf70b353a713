"""Trainings with Lightning, Accelerate and transformers save the same step on all ranks, and never hang."""

import os
import random
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from helpers.nodes import meeting

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(600),
]

PROGRAM = Path(__file__).parents[1] / "workers" / "agreed_lightning.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
REQUESTS = int(os.environ.get("ELASTICRS_TEST_REQUESTS", "30"))


@pytest.mark.parametrize("nodes", [1, 3])
def test_lightning_saves_the_same_step_on_all_ranks_again_and_again(launch, tmp_path, nodes):
    ranks = 2 if nodes == 1 else 1
    options = ("--shutdown-timeout=12", f"--nproc-per-node={ranks}")
    options += meeting(f"{nodes}") if nodes > 1 else ()
    agents = [launch(*options, PROGRAM, tmp_path, env=ENVIRONMENT) for _ in range(nodes)]
    for each in agents:
        each.wait_for_lines(r"BEGUN \d+", ranks)
    moments = random.Random(11)
    for number in range(1, REQUESTS + 1):
        agents[0].read_for(moments.uniform(0, 0.1))
        for each in agents:
            each.signal(signal.SIGUSR1)
        # If one rank saved while another one trained, it would wait forever, and never print these lines.
        found = [match for each in agents for match in each.wait_for_lines(r"SAVES \d+ (.*)", ranks * number)]
        host = next(each for each in agents if "SAVES 0 " in each.stdout)
        host.wait_for_line(rf"SAVED {number}$")
    for each in agents:
        each.signal(signal.SIGTERM)
    for each in agents:
        each.wait(60)
    # Each rank has printed a line for each request, which shows one update of the parameters in each step.
    saved = Counter(match[1] for match in found)
    assert sum(saved.values()) == REQUESTS * nodes * ranks
    assert set(saved.values()) == {nodes * ranks}
    assert all(len(set(each.split())) == 1 for each in saved)


EXAMPLES = Path(__file__).parents[2] / "examples"


def of_rank_0(agents, pattern):
    """Wait for a line that only rank 0 prints, which runs on one of the nodes, and return it."""
    while not (found := [match for each in agents if (match := re.search(pattern, each.stdout))]):
        for each in agents:
            each.read_for(0.02)
    return found[0][0]


@pytest.mark.parametrize(
    ("nodes", "signals"), [(1, (signal.SIGUSR1, signal.SIGTERM)), (3, (signal.SIGTERM,))], ids=["1", "3"]
)
@pytest.mark.parametrize("example", ["accelerate_loop", "huggingface_trainer"])
def test_an_example_that_was_stopped_and_resumed_ends_as_without_the_stops(
    launch, tmp_path, example, nodes, signals
):
    environment = {
        **ENVIRONMENT,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }

    def start(folder):
        ranks, where = (2, ("--standalone",)) if nodes == 1 else (1, meeting(f"{nodes}"))
        options = (*where, f"--nproc-per-node={ranks}", "--shutdown-timeout=12")
        command = (EXAMPLES / f"{example}.py", "--checkpoints", folder, "--epochs=12")
        return [launch(*options, *command, env=environment) for _ in range(nodes)]

    moments = random.Random(13)
    for _ in range(max(1, REQUESTS // 10)):
        agents = start(tmp_path / "stopped")
        of_rank_0(agents, "loss")
        agents[0].read_for(moments.uniform(0, 0.3))
        for signum in signals:
            for each in agents:
                each.signal(signum)
        for each in agents:
            each.exits(1)
            assert "killed" not in each.stderr
    ends = []
    for folder in ("stopped", "calm"):
        agents = start(tmp_path / folder)
        for each in agents:
            each.exits(0, timeout=120)
        ends.append(of_rank_0(agents, "done: .*"))
    assert ends[0] == ends[1]
