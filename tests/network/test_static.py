"""Jobs with user-assigned node ranks, each node on its own host."""

import signal

import pytest
from helpers.nodes import restarts
from helpers.procs import HANG

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(150)]

QUICK = {"keep_alive_interval": 0.4, "keep_alive_max_attempt": 5, "connect_timeout": 1}


def start(job, host, rank):
    """Start the agent with this node rank."""
    (agent,) = job.start(host, options=("--rdzv-backend", "static", "--node-rank", str(rank)))
    return agent


def hosts_by_rank(workers):
    return [worker.host for worker in workers]


@pytest.mark.parametrize("is_ipv6_only", [False, True], ids=["IPv4", "IPv6"])
def test_nodes_get_their_given_ranks_and_the_address_of_rank_0(hosts, multinode, is_ipv6_only):
    first, second, third = hosts(3, is_ipv6_only=is_ipv6_only)
    job = multinode(second, "3", conf={"join_timeout": 60})
    agents = [start(job, host, rank) for host, rank in ((third, 1), (first, 2), (second, 0))]
    workers = job.formed(*agents)
    assert hosts_by_rank(workers) == ["node2", "node3", "node1"]
    assert {(each.master, each.port) for each in workers} == {(second.address, "29400")}
    job.finish(agents, workers)


@pytest.mark.beyond_torchrun
def test_a_disconnected_host_rejoins_with_its_rank(hosts, multinode):
    first, second, third = hosts(3)
    job = multinode(first, "3", conf=QUICK)
    agents = [start(job, host, rank) for host, rank in ((first, 0), (third, 1), (second, 2))]
    job.formed(*agents)
    third.link_down()
    job.line(agents[0], "stopping .*round 1", HANG)
    third.link_up()
    workers = job.formed(*agents, timeout=60)
    assert hosts_by_rank(workers) == ["node1", "node3", "node2"]
    assert {(each.restart, each.round) for each in workers} == {(0, "2")}
    job.finish(agents, workers)


@pytest.mark.beyond_torchrun
def test_a_new_host_can_replace_a_lost_host_with_its_rank(network, multinode):
    net = network(3)
    first, second, third = net.hosts
    job = multinode(first, "3", conf=QUICK)
    agents = [start(job, host, rank) for host, rank in ((first, 0), (second, 1), (third, 2))]
    job.formed(*agents)
    agents[1].signal(signal.SIGKILL)
    job.assert_empty(second)
    agents[1] = start(job, net.add_host(), 1)
    workers = job.formed(*agents, timeout=60)
    assert hosts_by_rank(workers) == ["node1", "node4", "node3"]
    assert restarts(workers) == {0}
    job.finish(agents, workers)
