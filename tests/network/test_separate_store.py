"""The store is a separate program on a host without workers, so any agent may exit, even the leader."""

import random
import signal
import sys

import pytest
from helpers import procs
from helpers.nodes import PORT, QUICK, pids, restarts, running_on

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]

KILL, FAIL, SUCCEED = signal.SIGKILL, signal.SIGUSR2, signal.SIGUSR1

SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 2))])


def store_on(host):
    return running_on(host, sys.executable, "-m", "elasticrs.store", "--port", str(PORT))


@pytest.fixture
def apart(network, multinode):
    """A job of two or three nodes whose store runs on a fourth host."""
    net = network(4)
    *machines, store_host = net.hosts
    with store_on(store_host):
        yield multinode(store_host, "2:3", conf=QUICK), machines, net


@pytest.fixture
def led(apart):
    """The job, its first agent and the other two agents."""
    job, machines, _ = apart
    (leader,) = job.start(machines[0])
    return job, leader, job.start(*machines[1:])


@pytest.mark.parametrize("signum", [KILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_signal_to_the_first_agent_ends_its_node_alone(led, signum):
    job, leader, others = led
    workers = job.formed(leader, *others)
    leader.signal(signum)
    assert job.ended(leader) == [-KILL if signum == KILL else 1]
    again = job.formed(*others, restarts=0)
    procs.assert_gone(pids(workers))
    job.assert_empty(leader.host)
    job.finish(others, again)


@SEEDS
def test_the_job_forms_if_the_leader_is_killed_at_a_random_moment(led, seed):
    job, leader, others = led
    leader.launched.read_for(random.Random(seed).uniform(0.0, 1.5))
    leader.signal(KILL)
    job.assert_empty(leader.host)
    agents = (*job.start(leader.host), *others)
    job.finish(agents, job.formed(*agents))


@SEEDS
def test_the_job_continues_if_the_leader_is_killed_during_a_restart(led, seed):
    job, leader, others = led
    job.tell(job.formed(leader, *others)[-1:], FAIL)
    leader.launched.read_for(random.Random(seed).uniform(0.0, 0.1))
    leader.signal(KILL)
    job.assert_empty(leader.host)
    # The kill may come before or after the restart of all three nodes. In either case, the other two nodes
    # run.
    again = job.formed(*others)
    assert restarts(again) <= {0, 1}
    job.finish(others, again)


def test_all_agents_can_be_replaced_one_at_a_time(apart):
    job, machines, _ = apart
    agents = job.start(*machines)
    job.formed(*agents)
    for index, machine in enumerate(machines):
        agents[index].signal(KILL)
        job.assert_empty(machine)
        agents[index] = job.start(machine)[0]
        workers = job.formed(*agents, restarts=0)
    job.finish(agents, workers)


def test_a_disconnected_store_host_stops_the_workers_until_it_returns(apart):
    job, machines, net = apart
    store_host = net.hosts[-1]
    agents = job.start(*machines)
    workers = job.formed(*agents)
    store_host.link_down()
    # All agents kill their workers, because no agent can know whether the store still lists it as a member.
    procs.assert_gone(pids(workers))
    store_host.link_up()
    again = job.formed(*agents, restarts=0)
    job.finish(agents, again)


@pytest.mark.parametrize("befalls", ["program killed", "host dead"])
def test_all_agents_end_and_name_the_store_when_it_is_lost(hosts, multinode, befalls):
    *machines, store_host = hosts(4)
    with store_on(store_host) as store:
        job = multinode(store_host, "2:3", conf={**QUICK, "store_lost_timeout": 2})
        agents = job.start(*machines)
        workers = job.formed(*agents)
        if befalls == "host dead":
            store_host.power_off()
        else:
            store.signal(KILL)
        codes = job.ended()
    assert set(codes) == {1}, job.story(f"exit codes {codes}")
    procs.assert_gone(pids(workers))
    for agent in agents:
        lines = [
            line
            for line in agent.launched.stderr.splitlines()
            if "in round 1" in line and "store" in line and "failed after" not in line
        ]
        assert len(lines) == 1, job.story("not told, or twice")
        assert job.endpoint in lines[0], job.story("no host:port")
        assert "Root Cause" not in agent.launched.stderr, job.story("a worker is blamed")
    job.assert_empty(*machines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_all_agents_fail_and_name_a_store_killed_at_a_random_moment(hosts, multinode, seed):
    *machines, store_host = hosts(3)
    job = multinode(store_host, "2", conf={**QUICK, "store_lost_timeout": 2, "join_timeout": 4})
    with store_on(store_host) as store:
        agents = job.start(*machines)
        agents[0].launched.read_for(random.Random(seed).uniform(0.0, 1.5))
        store.signal(KILL)
        assert job.ended() == [1, 1]
    for agent in agents:
        assert job.endpoint in agent.launched.stderr, job.story("no host:port")
        assert "Traceback" not in agent.launched.stderr, job.story("a traceback")
    job.assert_empty(*machines)


@pytest.mark.parametrize("how", [SUCCEED, FAIL], ids=["succeeded", "failed"])
def test_a_node_that_joins_a_closed_job_learns_its_outcome(hosts, multinode, how):
    *machines, store_host = hosts(3)
    with store_on(store_host):
        job = multinode(store_host, "2", max_restarts=0)
        agents = job.start(*machines)
        job.tell(job.formed(*agents), how)
        job.ended()
        (late,) = job.start(machines[0])
        assert job.ended(late) == [1]
        outcome = "succeeded" if how == SUCCEED else "failed"
        assert f"job job is closed: {outcome} at 20" in late.launched.stderr, job.story("no outcome")
        assert late.workers() == []
        job.assert_empty(*machines)
