"""Several jobs get the same endpoint and start at different stages of each other. A launcher that exits with
0 has run its own workers to the end, and no round has workers of two jobs.
"""

import os
import random
import re
import shutil
import signal

import pytest
from helpers import ports, procs
from helpers.nodes import RANKS

pytestmark = [pytest.mark.slow, pytest.mark.beyond_torchrun, pytest.mark.timeout(600)]

BRIEF = """
    import os, sys
    os.write(1, b"RAN %s\\n" % sys.argv[1].encode())
    sys.stdin.read() if len(sys.argv) > 2 else None
    os.write(1, b"ENDED %s\\n" % sys.argv[1].encode())
    """


def told(agent, word):
    return re.findall(rf"^{word} (\S+)$", agent.stdout, re.MULTILINE)


@pytest.mark.parametrize("seed", range(6))
def test_jobs_that_start_at_any_moment_run_or_fail(launch, worker_script, seed):
    rng, script, port = random.Random(seed), worker_script(BRIEF), ports.free()
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=0")
    agents = []
    for number in range(12):
        nnodes, name = rng.choice(["1", "1", "1:2"]), rng.choice("AB")
        agents.append((name, nnodes, launch(f"--nnodes={nnodes}", *where, script, name)))
        agents[-1][2].read_for(rng.random() * 0.5)
        if rng.random() < 0.2:
            agents[rng.randrange(number + 1)][2].signal(signal.SIGKILL)
    for name, nnodes, agent in agents:
        code = agent.wait()
        assert set(told(agent, "RAN")) <= {name}, agent.stdout
        is_spare = "without this node" in agent.stderr and nnodes == "1:2"
        assert code != 0 or told(agent, "ENDED") == [name] or is_spare, agent.stderr
    procs.reap_adopted()


@pytest.mark.privileged
def test_another_job_never_takes_the_place_of_a_lost_node(hosts, multinode, tmp_path):
    machines = hosts(2)
    other = tmp_path / "other.py"
    shutil.copy(RANKS, other)
    job = multinode(machines[0], "2", conf={"join_timeout": 60})
    agents = job.start(*machines)
    job.formed(*agents)
    for lost in range(3):
        job.script = other
        refused = job.start(*machines)
        assert job.ended(*refused) == [1, 1], job.story("not refused")
        assert not any(each.workers() for each in refused)
        agents[1].signal(signal.SIGKILL)
        job.ended(agents[1])
        (late,) = job.start(machines[1])
        assert job.ended(late) == [1]
        job.script = RANKS
        agents[1:] = job.start(machines[1])
        workers = job.formed(*agents)
        assert {each.round for each in workers} == {str(lost + 2)}
    job.finish(agents, workers)


@pytest.mark.privileged
def test_the_tasks_of_a_sweep_do_not_become_one_job(hosts, launch, worker_script, tmp_path):
    machines = hosts(4)
    script = worker_script(BRIEF)
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint={machines[0].endpoint(29400)}", "--nnodes=4")
    first, *others = [
        launch(*where, script, f"--lr={number}", prefix=machine.prefix(tmp_path))
        for number, machine in enumerate(machines)
    ]
    # Any of the agents may have created the job.
    agents = [first, *others]
    waiting = procs.wait_until(
        lambda: [each for each in agents if not each.has_exited], lambda left: len(left) == 1
    )
    for agent in agents:
        if agent not in waiting:
            assert agent.wait() == 1
            assert "--lr=" in agent.stderr
    os.kill(waiting[0].pid, signal.SIGTERM)
    assert waiting[0].wait() == 1
    assert not any(told(agent, "RAN") for agent in agents)
