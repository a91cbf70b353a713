"""Jobs that run while members of etcd are killed, stopped and brought back at random moments."""

import random

import pytest
from helpers.nodes import RANKS, READY, STEPS, Worker, rdzv
from helpers.procs import wait_until

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.slow, pytest.mark.timeout(240)]

NODES = 3
PATIENT, QUICK = 20, 4
"""Seconds of a lease: longer than any election on a busy machine, and as short as can be."""


@pytest.fixture
def job(launch, etcd_cluster, tmp_path):
    """Return a function that starts the agents of a job. The workers share a checkpoint file."""

    def job(script, lease_ttl, **env):
        conf = {"etcd_prefix": etcd_cluster.prefix, "lease_ttl": lease_ttl, "store_lost_timeout": 60}
        where = rdzv("etcd", etcd_cluster.endpoint, **conf)
        return [
            launch(
                *(*where, f"--nnodes={NODES}", "--max-restarts=0", script),
                env={"CHECKPOINT": str(tmp_path / "steps"), "OMP_NUM_THREADS": "1", **env},
            )
            for _ in range(NODES)
        ]

    return job


def harm(cluster, chance, seconds, agents):
    """Kill or stop a random member and bring it back, again and again for about this many seconds."""
    while seconds > 0:
        pauses = chance.uniform(0, 0.5), chance.choice((0.0, 0.3, 1.5))
        seconds -= sum(pauses)
        agents[0].read_for(pauses[0])
        index = chance.randrange(cluster.size)
        chance.choice((cluster.kill, cluster.stop))(index)
        agents[0].read_for(pauses[1])
        cluster.bring_back(index)
        cluster.wait_healthy(index)


@pytest.mark.torch
def test_training_continues_while_etcd_members_fail(job, etcd_cluster, tmp_path):
    server, steps = etcd_cluster.server, tmp_path / "steps"
    agents = job(STEPS, PATIENT, PACE="0.02")
    for agent in agents:
        agent.wait_for_line("TRAINING", "stdout")
    harm(server, random.Random(3), 3, agents)
    # Stop two members, so that etcd has no quorum for a while.
    for index in (0, 2):
        server.stop(index)
    agents[0].read_for(2.0)
    server.mend()
    before = int(steps.read_text())
    wait_until(lambda: int(steps.read_text()) > before)
    steps.with_suffix(".stop").touch()
    for agent in agents:
        agent.exits(0)
        assert agent.stdout.count("TRAINING") == 1, "its worker has been restarted"


def test_workers_are_killed_without_etcd_quorum_and_started_when_it_returns(job, etcd_cluster, tmp_path):
    server, done = etcd_cluster.server, tmp_path / "done"
    agents = job(RANKS, QUICK, DONE=str(done))
    for agent in agents:
        agent.wait_for_line(READY.pattern, "stdout")
    for index in (0, 2):
        server.stop(index)
    for agent in agents:
        agent.wait_for_line("keep-alives", "stderr")
    server.mend()
    for agent in agents:
        agent.wait_for_lines(READY.pattern, 2, "stdout")
    done.touch()
    for agent in agents:
        agent.exits(0)
        restarts = {Worker.parse(match[1]).restart for match in READY.finditer(agent.stdout)}
        assert restarts == {0}, "the loss of the store is charged"
