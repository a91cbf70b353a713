"""Trainings with Lightning, Accelerate and transformers save the same step on all ranks, and never hang."""

import os
import random
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from helpers.nodes import meeting

from elasticrs import ctl

REQUESTS = int(os.environ.get("ELASTICRS_TEST_REQUESTS", "30"))

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(300 + 30 * REQUESTS),
]

PROGRAM = Path(__file__).parents[1] / "workers" / "agreed_lightning.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


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

# Runs an example. After three steps, each rank prints BEGUN. When the example is asked to save or stop, and
# at its end, each rank prints the number of optimizer steps that its process has made, and a digest of its
# parameters. DistributedDataParallel usually changes its buckets after the first step. With more than two
# ranks, the sums in the buckets are then rounded in another way, which would make a resumed training differ
# from one that was not stopped. So this program prevents it.
SHOWN = """
    import hashlib, os, runpy, sys

    sys.path[0] = os.path.dirname(sys.argv[1])
    import elasticrs, task
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps, inner = [], elasticrs.checkpoint_requested

    def note(optimizer, *_):
        steps.append(optimizer)
        if len(steps) == 3:
            os.write(1, b"BEGUN\\n")

    def show(what):
        tensors = [each for group in steps[-1].param_groups for each in group["params"]]
        digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors))
        os.write(1, f"{what} {os.environ['RANK']} {len(steps)} {digest.hexdigest()}\\n".encode())

    def checkpoint_requested():
        if wish := inner():
            show(wish.upper())
        return wish

    def prepare(self, module, prepare=DistributedDataParallel.__init__, **options):
        prepare(self, module, **{**options, "find_unused_parameters": True})

    DistributedDataParallel.__init__ = prepare
    elasticrs.checkpoint_requested = checkpoint_requested
    task.report = lambda _loss: show("END")
    register_optimizer_step_post_hook(note)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def shown(agents):
    """Return what each rank has printed when it saved or stopped, and at its end, by rank."""
    by_rank = {}
    for each in agents:
        for what, rank, *state in re.findall(r"(SAVE|STOP|END) (\d+) (\d+) (\w{64})", each.stdout):
            by_rank.setdefault(rank, []).append((what, *state))
    return list(by_rank.values())


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("example", ["accelerate_loop", "huggingface_trainer"])
def test_an_example_that_is_saved_and_restarted_at_many_moments_ends_as_without_that(
    launch, worker_script, tmp_path, sockets, example, nodes
):
    ranks, program = (2 if nodes == 1 else 1), worker_script(SHOWN)
    environment = {
        **ENVIRONMENT,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "ELASTICRS_CONTROL_DIR": str(sockets),
    }

    def start(folder):
        options = (
            "--warm=torch,accelerate,transformers.trainer",
            f"--nproc-per-node={ranks}",
            "--shutdown-timeout=12",
        )
        options += meeting(f"{nodes}") if nodes > 1 else ()
        command = (program, EXAMPLES / f"{example}.py", f"--epochs={5 * REQUESTS}", "--checkpoints")
        return [launch(*options, *command, tmp_path / folder, env=environment) for _ in range(nodes)]

    moments, agents, restarts = random.Random(13), start("stopped"), 0
    for _ in range(REQUESTS):
        for each in agents:
            each.wait_for_lines("BEGUN", ranks * (restarts + 1))
        agents[0].read_for(moments.uniform(0, 0.3))
        signals = moments.choice([("SAVE",), ("STOP",), ("SAVE", "STOP")])
        before = [each.stdout.count(f"{signals[-1]} ") for each in agents]
        for each in agents if "SAVE" in signals else ():
            each.signal(signal.SIGUSR1)
        if "STOP" in signals:
            assert ctl.main(["restart", "--no-wait", "--job", str(agents[-1].pid)]) == 0
        # A rank that saved at another step than the other ranks would leave them in a collective.
        for each, number in zip(agents, before, strict=True):
            each.wait_for_lines(rf"{signals[-1]} \d", number + ranks)
        restarts += "STOP" in signals
    for each in agents:
        each.exits(0, timeout=60 + 10 * REQUESTS)
        assert "killed" not in each.stderr
    stopped = shown(agents)
    assert len(stopped) == nodes * ranks
    for each in zip(*stopped, strict=True):
        assert len(set(each)) == 1, each
    agents = start("calm")
    for each in agents:
        each.exits(0, timeout=60 + 10 * REQUESTS)
    assert {each[-1][2] for each in shown(agents)} == {stopped[0][-1][2]}
