"""Jobs whose etcd has slow members, or loses one or most of its members, temporarily or permanently."""

import os
import signal

import pytest
from helpers.nodes import FAIL, RANKS, finish, rdzv, round_of
from helpers.procs import assert_gone
from helpers.said import says

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]


@pytest.fixture
def agents(launch, etcd_cluster):
    """Return a function that starts the two agents of a job."""

    def agents(**conf):
        conf = {"etcd_prefix": etcd_cluster.prefix, "lease_ttl": 8, **conf}
        where = rdzv("etcd", etcd_cluster.endpoint, **conf)
        return [launch(*where, "--nnodes=2", "--max-restarts=2", RANKS) for _ in range(2)]

    return agents


def workers(agents, number):
    """Return each agent's ``number``-th worker. Check that they belong to one round."""
    found = round_of(agents, [number] * len(agents))
    assert len({(each.round, each.restart) for each in found}) == 1
    return found


def test_a_job_continues_without_one_of_three_etcd_members(agents, etcd_cluster):
    # The lease outlasts a leader election on a loaded machine, because no lease may expire here.
    job = agents(lease_ttl=30)
    first = workers(job, 1)
    etcd_cluster.server.kill(etcd_cluster.server.leader())
    os.kill(first[0].pid, FAIL)
    second = workers(job, 2)
    assert {(each.round, each.restart) for each in second} == {("2", 1)}
    finish(job, second)


def test_slow_etcd_members_stop_no_worker(agents, etcd_cluster):
    job, server = agents(), etcd_cluster.server
    first = workers(job, 1)
    # Stop members for as long as an fsync can take on a busy disk: first the leader, then all, as if they
    # shared a disk.
    for chosen in ([server.leader()], [0, 1, 2]):
        for seconds in (0.2, 0.5, 1.0):
            for index in chosen:
                server.stop(index)
            job[0].read_for(seconds)
            for index in chosen:
                server.bring_back(index)
            job[0].read_for(0.2)
    finish(job, first)
    for agent in job:
        assert len(agent.stdout.splitlines()) == 1
        assert "lost etcd" not in agent.stderr


def test_nodes_rejoin_when_the_etcd_majority_returns(agents, etcd_cluster):
    job = agents(store_lost_timeout=60, settle=60)
    first = workers(job, 1)
    for index in (0, 1):
        etcd_cluster.server.kill(index)
    for agent in job:
        agent.wait_for_line(r"lost etcd .*; killing the workers", "stderr")
    etcd_cluster.server.mend()
    second = workers(job, 2)
    assert {each.restart for each in second} == {0}
    assert not {each.pid for each in first} & {each.pid for each in second}
    finish(job, second)


def test_a_job_fails_if_the_etcd_majority_stays_down(agents, etcd_cluster):
    job = agents(store_lost_timeout=1)
    workers(job, 1)
    for index in (0, 1):
        etcd_cluster.server.kill(index)
    for agent in job:
        agent.exits(1)
        line, last = [line for line in agent.stderr.splitlines() if "within 1 s" in line]
        assert "failed after" in last
        says(line, "lost etcd", "most of its members")


def test_a_second_signal_ends_agents_without_waiting_for_etcd(agents, etcd_cluster):
    job = agents(lease_ttl=60, close_timeout=600)
    first = workers(job, 1)
    for index in (0, 1):
        etcd_cluster.server.kill(index)
    for agent in job:
        agent.signal(signal.SIGTERM)
    assert_gone(worker.pid for worker in first)
    for agent in job:
        agent.insist(signal.SIGTERM)
        agent.exits(1)
