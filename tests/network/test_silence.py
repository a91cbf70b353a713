"""Hosts that become silent without closing a connection, and that come back.

The limit is 2 s in all of these; how long it takes is a benchmark's business.
"""

import signal

import pytest
from helpers import procs
from helpers.nodes import PORT, QUICK, pids
from helpers.relay import relay_on

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]


@pytest.fixture
def three(formed):
    """A job on three nodes that needs only two."""
    return formed(3, nnodes="2:3", conf=QUICK)


def goes_on_with_two(job, agents):
    return job.formed(*agents[:2], restarts=0)


def takes_it_in_again(job, agents):
    again = job.formed(*agents, restarts=0)
    assert [each.host for each in again] == ["node1", "node2", "node3"]
    job.finish(agents, again)


def test_a_disconnected_host_is_dropped_kills_its_workers_and_rejoins(three):
    job, agents, workers = three
    host = agents[2].host
    host.link_down()
    goes_on_with_two(job, agents)
    # No message reaches the disconnected host, so its agent has to notice the loss on its own.
    procs.assert_gone(pids(workers, host))
    host.link_up()
    takes_it_in_again(job, agents)


def test_a_short_disconnection_does_not_affect_the_job(three):
    job, agents, workers = three
    host = agents[2].host
    host.link_down()
    host.link_up()
    assert host.can_reach(agents[0].host)
    job.finish(agents, workers)


def test_a_host_that_loses_power_is_dropped_from_the_job(three):
    job, agents, _ = three
    agents[2].host.power_off()
    again = goes_on_with_two(job, agents)
    assert job.ended(agents[2]) == [-signal.SIGKILL]
    job.reap()
    job.finish(agents[:2], again)


def test_workers_stop_and_wait_if_too_few_nodes_remain(formed):
    job, agents, workers = formed(2, conf=QUICK)
    agents[1].host.link_down()
    procs.assert_gone(pids(workers))
    agents[1].host.link_up()
    again = job.formed(*agents, restarts=0)
    job.finish(agents, again)


def test_a_paused_agent_is_dropped_and_its_workers_are_killed(three):
    job, agents, workers = three
    agents[2].signal(signal.SIGSTOP)
    agents[2].launched.wait_stopped()
    goes_on_with_two(job, agents)
    # The workers are killed while their agent is still stopped.
    procs.assert_gone(pids(workers, agents[2].host))
    agents[2].signal(signal.SIGCONT)
    takes_it_in_again(job, agents)


@pytest.fixture
def relayed(hosts, multinode):
    """Like :func:`three`, but with a relay between the third node and the store."""
    machines = hosts(3)
    with relay_on(machines[1], machines[0], PORT) as relay:
        job = multinode(machines[0], "2:3", conf=QUICK)
        agents = job.start(*machines[:2])
        agents += job.start(machines[2], endpoint=machines[1].endpoint(relay.port))
        yield job, agents, job.formed(*agents), relay


@pytest.mark.parametrize("stalled", [("up", "down"), ("up",), ("down",)], ids=" and ".join)
def test_a_node_with_a_stalled_connection_is_dropped_and_rejoins(relayed, stalled):
    job, agents, workers, relay = relayed
    relay.set(**{f"is_stalled_{direction}": True for direction in stalled})
    goes_on_with_two(job, agents)
    procs.assert_gone(pids(workers, agents[2].host))
    relay.resume()
    takes_it_in_again(job, agents)


def test_connection_resets_do_not_affect_the_job(relayed):
    job, agents, workers, relay = relayed
    for number in range(1, 4):
        relay.reset()
        procs.wait_until(relay.counts, lambda counts, number=number: counts["connections"] > number)
    job.finish(agents, workers)


def test_a_node_whose_reconnects_hang_is_dropped_and_rejoins(relayed):
    job, agents, _, relay = relayed
    relay.set(new="hang")
    relay.reset()
    goes_on_with_two(job, agents)
    relay.set(new="serve")
    takes_it_in_again(job, agents)
