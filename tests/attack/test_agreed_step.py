"""All ranks handle a signal at the same training step, with usual training loops and signal handlers, for
signals that request a save and signals that stop the job, at many moments.
"""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from helpers import kept, procs
from helpers.nodes import meeting, meetings
from helpers.said import says

from elasticrs import ctl

REQUESTS = int(os.environ.get("ELASTICRS_TEST_REQUESTS", "30"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(600 + 20 * REQUESTS),
]

PROGRAM = Path(__file__).parents[1] / "workers" / "agreed_training.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
STOPS = REQUESTS // 10
RESTARTS = REQUESTS // 6
LOOPS = ["plain", "accumulation", "gan", "scaled", "compiled", "compiled_first", "own"]


@pytest.fixture
def job(launch):
    """Return a function that starts a job and waits until its ranks have made some steps."""

    def start(*arguments, ranks=2):
        options = (f"--nproc-per-node={ranks}", "--shutdown-timeout=12")
        launched = launch(*options, PROGRAM, *arguments, env=ENVIRONMENT)
        launched.wait_for_lines(r"BEGUN \d+", ranks)
        return launched

    return start


def acts(launched, count):
    """Return for each signal, in order, what each rank printed on it: its step, the place in its training
    loop, and a digest of its state.
    """
    lines = launched.wait_for_lines(r"ACTED (\d+) (\d+) (\w+) (\w+)", count)
    by_rank = {}
    for line in lines:
        by_rank.setdefault(line[1], []).append((line[2], line[3], line[4]))
    return list(zip(*by_rank.values(), strict=True))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("handler", ["note", "flag"])
@pytest.mark.parametrize("loop", LOOPS)
def test_all_ranks_act_on_a_request_at_the_same_step(job, loop, handler, ranks):
    launched = job(loop, handler, ranks=ranks)
    moments = random.Random(5)
    for number in range(1, REQUESTS + 1):
        launched.read_for(moments.uniform(0.005, 0.1))
        launched.signal(signal.SIGUSR1)
        found = acts(launched, ranks * number)
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    tally = Counter(len({step for step, _, _ in each}) == 1 for each in found)
    digests = Counter(len({digest for _, _, digest in each}) == 1 for each in found)
    places = Counter(place for each in found for _, place, _ in each)
    assert (tally[False], digests[False]) == (0, 0), (tally, digests, places)
    # If heartbeats are counted as steps, a step begins at the place in the loop that sends one.
    assert set(places) == {"work" if loop == "own" and handler == "note" else "end"}


@pytest.fixture
def nodes(launch):
    """Return a function that starts a job of three nodes with a rank each, and returns their agents."""

    def start(options, *arguments):
        common = ("--nproc-per-node=1", "--shutdown-timeout=12")
        agents = [launch(*common, *each, PROGRAM, *arguments, env=ENVIRONMENT) for each in options]
        for each in agents:
            each.wait_for_line(r"BEGUN \d+")
        return agents

    return start


def acts_of(agents, number):
    """Wait until each rank has handled ``number`` signals. Return step, place and digest at the last one."""
    found = [each.wait_for_lines(r"ACTED (\d+) (\d+) (\w+) (\w+)", number)[-1] for each in agents]
    return [(match[2], match[3], match[4]) for match in found]


@pytest.mark.parametrize("handler", ["note", "flag"])
@pytest.mark.parametrize(
    ("loop", "backend"), [*((loop, "c10d") for loop in LOOPS), ("plain", "static"), ("own", "static")]
)
def test_ranks_of_several_nodes_act_on_a_request_at_the_same_step(nodes, loop, backend, handler):
    agents = nodes(meetings(backend, 3), loop, handler)
    moments = random.Random(5)
    for number in range(1, REQUESTS + 1):
        agents[0].read_for(moments.uniform(0.005, 0.1))
        for each in agents:
            each.signal(signal.SIGUSR1)
        found = acts_of(agents, number)
        assert len(set(found)) == 1, agents[0].stderr
        assert found[0][1] == ("work" if loop == "own" and handler == "note" else "end")
    for each in agents:
        says(each.stderr, "SIGUSR1 reaches all ranks after step")
        assert "at different steps" not in each.stderr
        each.signal(signal.SIGTERM)
    for each in agents:
        each.wait(60)


def test_a_node_that_leaves_stops_the_ranks_of_all_nodes_at_the_same_step(nodes, tmp_path):
    options = (*meeting("2:3"), "--rdzv-conf=last_call_timeout=2")
    agents = nodes([options] * 3, "plain", "flag", tmp_path)
    agents[-1].signal(signal.SIGTERM)
    found = acts_of(agents, 1)
    assert len(set(found)) == 1, agents[0].stderr
    for each in agents[:-1]:
        each.wait_for_lines(r"BEGUN \d+", 2)
    for each in agents[:-1]:
        each.signal(signal.SIGTERM)
    for each in agents:
        each.wait(60)


def test_ranks_save_and_stop_if_both_signals_come_at_once(job, tmp_path):
    moments = random.Random(3)
    for number in range(STOPS):
        folder = tmp_path / str(number)
        folder.mkdir()
        launched = job("plain", "save", folder)
        launched.read_for(moments.uniform(0, 0.1))
        launched.signal(signal.SIGUSR1)
        launched.signal(signal.SIGTERM)
        # A rank that waited for another one in a barrier would be killed after --shutdown-timeout.
        launched.exits(1)
        assert "killed" not in launched.stderr
        assert all(first == second for first, second in acts(launched, 4))


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_ranks_of_several_nodes_save_and_stop_if_both_signals_come_at_once(nodes, tmp_path, backend):
    moments = random.Random(3)
    for number in range(STOPS):
        folder = tmp_path / str(number)
        folder.mkdir()
        agents = nodes(meetings(backend, 3), "plain", "save", folder)
        agents[0].read_for(moments.uniform(0, 0.1))
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            for each in agents:
                each.signal(signum)
        for each in agents:
            each.wait(60)
        assert all("killed" not in each.stderr for each in agents), agents[0].stderr
        assert [len(set(acts_of(agents, count))) for count in (1, 2)] == [1, 1]


@pytest.mark.parametrize(("handler", "ranks"), [("save", 2), ("save", 4), ("save", 8), ("flag", 2)])
def test_a_training_that_is_stopped_and_resumed_again_and_again_ends_as_without_the_stops(
    launch, tmp_path, handler, ranks
):
    environment = {**ENVIRONMENT, "STEPS": str(60 * STOPS)}

    def start(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        options = (f"--nproc-per-node={ranks}", "--shutdown-timeout=12", "--warm=torch,torch._dynamo")
        return launch(*options, PROGRAM, "plain", handler, tmp_path / folder, env=environment)

    moments, ends = random.Random(7), []
    for number in range(STOPS):
        stopped = start("stopped")
        stopped.wait_for_lines(r"BEGUN \d+", ranks)
        stopped.read_for(moments.uniform(0, 0.1))
        stopped.signal(signal.SIGTERM)
        # A rank that waited for another one in a barrier would be killed after --shutdown-timeout.
        stopped.exits(1)
        assert "killed" not in stopped.stderr
        (states,) = acts(stopped, ranks)
        assert len(set(states)) == 1
        print("stop", number + 1, "of", ranks, "ranks at", *states[0], flush=True)
    for folder in ("stopped", "calm"):
        job = start(folder)
        job.exits(0, timeout=30 + 10 * STOPS)
        ends.append({match[2] for match in job.wait_for_lines(r"END (\d) (\w+)", ranks)})
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    assert procs.children() == []


@pytest.mark.parametrize("loop", ["plain", "gan", "scaled", "compiled_first"])
def test_a_training_that_is_restarted_at_many_moments_ends_as_without_restarts(
    launch, tmp_path, sockets, loop
):
    environment = {**ENVIRONMENT, "STEPS": str(40 * REQUESTS), "ELASTICRS_CONTROL_DIR": str(sockets)}
    ends = []
    for number, restarts in enumerate((0, REQUESTS)):
        (tmp_path / str(number)).mkdir()
        options = ("--nproc-per-node=2", "--shutdown-timeout=12", "--warm=torch,torch._dynamo")
        job = launch(*options, PROGRAM, loop, "save", tmp_path / str(number), env=environment)
        moments = random.Random(9)
        for restart in range(1, restarts + 1):
            job.wait_for_lines(r"BEGUN \d+", 2 * restart)
            job.read_for(moments.uniform(0, 0.05))
            assert ctl.main(["restart", "--no-wait"]) == 0
            acts(job, 2 * restart)
        job.exits(0, timeout=120)
        assert "killed" not in job.stderr
        assert all(first == second for first, second in acts(job, 2 * restarts))
        ends.append({match[2] for match in job.wait_for_lines(r"END (\d) (\w+)", 2)})
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1


def test_a_restart_loses_no_step_whose_changes_are_hidden(launch, tmp_path, sockets):
    training = kept.KeptTraining(tmp_path / "job")
    options = ("--nproc-per-node=2", kept.PROGRAM, training.folder)
    options += ("--steps=40", "--variant=compiled", "--every=0")
    job = launch(*kept.OPTIONS, *options, env={**kept.ENVIRONMENT, "ELASTICRS_CONTROL_DIR": str(sockets)})
    training.wait_for(job, "ended", rank=0, step=8)
    assert ctl.main(["restart", "--no-wait"]) == 0
    job.exits(0, timeout=120)
    assert [each.step for each in training.logged("ended", rank=0)] == list(range(1, 41))
    assert len(training.logged("restored", rank=0)) == 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_restart_goes_on_from_the_step_on_which_all_ranks_agreed(launch, tmp_path, sockets, ranks):
    training = kept.KeptTraining(tmp_path / "job", ranks)
    options = (f"--nproc-per-node={ranks}", kept.PROGRAM, training.folder, "--steps=400")
    job = launch(*kept.OPTIONS, *options, env={**kept.ENVIRONMENT, "ELASTICRS_CONTROL_DIR": str(sockets)})
    moments = random.Random(3)
    begin = training.wait_for(job, "restored", rank=0).step
    for number in range(1, RESTARTS + 1):
        training.wait_for(job, "ended", rank=0, step=begin + 5)
        job.read_for(moments.uniform(0, 0.05))
        assert ctl.main(["restart", "--no-wait"]) == 0
        line = r"SIGTERM reaches all ranks after step (\d+) of this attempt"
        begin += int(job.wait_for_lines(line, number)[-1][1])
        for rank in range(ranks):
            training.wait_for(job, "restored", rank=rank, step=begin)
    job.exits(0, timeout=120)
    starts = [each.step for each in training.logged("restored", rank=0)]
    assert len(starts) == RESTARTS + 1
    # No step was made twice.
    ended = [each.step for each in training.logged("ended", rank=0)]
    assert ended == sorted(set(ended))
