"""Agents receive exit signals, or lose the host of the store."""

import signal

import pytest
from helpers import procs
from helpers.nodes import pids

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun, pytest.mark.timeout(150)]


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
