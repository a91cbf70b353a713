"""Workers fail, agents and hosts are lost, nodes join, and the job continues with the right ranks."""

import signal

import pytest
from helpers import procs
from helpers.nodes import pids

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]

KILL, FAIL, SUCCEED = signal.SIGKILL, signal.SIGUSR2, signal.SIGUSR1


def test_a_killed_worker_restarts_all_nodes_together(formed):
    job, agents, workers = formed(2, nproc=2)
    job.tell(workers[3:], KILL)
    again = job.formed(*agents, restarts=1)  # `formed` checks that all workers belong to one round
    procs.assert_gone(pids(workers))
    for agent in agents:
        job.line(agent, r"rank 3 \(pid \d+\).* node2 .*SIGKILL.* round 1")
    job.finish(agents, again)


def test_a_new_node_takes_the_ranks_of_a_lost_node(hosts, network, multinode):
    net = network(3)
    first, second, third = net.hosts
    job = multinode(first, "3", nproc=2)
    agents = job.start(first, second, third)
    job.formed(*agents)
    agents[1].signal(KILL)
    job.assert_empty(second)
    (fresh,) = job.start(net.add_host())
    now = (agents[0], agents[2], fresh)
    again = job.formed(*now, restarts=0)
    assert [each.host for each in again] == ["node1", "node1", "node4", "node4", "node3", "node3"]
    job.finish(now, again)


def test_a_spare_replaces_a_lost_node(hosts, multinode):
    first, second, third = hosts(3)
    job = multinode(first, "2")
    agents = job.start(first, second)
    job.formed(*agents)
    (spare,) = job.start(third)
    job.line(spare, "spare")
    agents[1].signal(KILL)
    again = job.formed(agents[0], spare, restarts=0)
    job.assert_empty(second)
    job.finish((agents[0], spare), again)


@pytest.mark.parametrize("how", [signal.SIGTERM, KILL], ids=["SIGTERM", "SIGKILL"])
def test_a_job_grows_and_shrinks_without_charging_a_restart(hosts, multinode, how):
    first, second, third = hosts(3)
    job = multinode(first, "2:3")
    agents = job.start(first, second)
    two = job.formed(*agents)
    agents += job.start(third)
    three = job.formed(*agents, restarts=0)
    assert [each.host for each in three] == ["node1", "node2", "node3"]
    procs.assert_gone(pids(two))
    agents[2].signal(how)
    assert job.ended(agents[2]) == [1 if how == signal.SIGTERM else -how]
    again = job.formed(*agents[:2], restarts=0)
    job.assert_empty(third)
    job.finish(agents[:2], again)


def test_a_failure_also_restarts_a_node_that_has_finished(formed):
    job, agents, workers = formed(2)
    job.tell(workers[1:], SUCCEED)
    procs.assert_gone(pids(workers[1:]))
    job.tell(workers[:1], FAIL)
    again = job.formed(*agents, restarts=1)
    job.finish(agents, again)


@pytest.fixture
def three(formed):
    return lambda **conf: formed(3, nnodes="2:3", conf=conf)


@pytest.mark.parametrize(("which", "conf"), [(2, {"drain": "job"}), (0, {})], ids=["on request", "host"])
def test_sigterm_ends_the_whole_job_with_drain_job_or_on_the_store_host(three, which, conf):
    job, agents, workers = three(**conf)
    agents[which].signal(signal.SIGTERM)
    assert 0 not in job.ended()
    procs.assert_gone(pids(workers))
    for agent in agents:
        if agent is not agents[which]:
            assert f"node{which + 1}" in agent.launched.stderr, job.story("no reason")
            assert "SIGTERM" in agent.launched.stderr, job.story("no reason")
    job.assert_empty()


def test_every_agent_ends_and_names_the_store_if_its_host_is_killed(three):
    job, agents, workers = three(store_lost_timeout=2, keep_alive_interval=0.4)
    agents[0].signal(signal.SIGKILL)
    codes = job.ended(*agents[1:])
    assert 0 not in codes
    procs.assert_gone(pids(workers))
    for agent in agents[1:]:
        assert job.endpoint in agent.launched.stderr, job.story("no host:port")
    job.ended()
    job.assert_empty()
