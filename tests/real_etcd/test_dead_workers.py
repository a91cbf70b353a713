"""With ``--on-failure replace`` and etcd, workers notice another worker's death before its lease expires."""

import os
import signal

import pytest
from helpers import procs
from helpers.nodes import rdzv

pytestmark = pytest.mark.beyond_torchrun

WORKER = """
    # Meets the other worker once. A replacement does not take part, so only agents can report the death.
    import os, signal
    from elasticrs.train.membership import Membership
    from elasticrs.train.rendezvous import rendezvous_of_agent
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        def changed(stop):
            os.write(1, f"CHANGED planned={stop.planned}\\n".encode())
        member = Membership(rendezvous_of_agent(), changed)
        current = member.meet()
        os.write(1, f"MET rank={current.rank} pid={os.getpid()}\\n".encode())
        with member.alone():
            while True:
                signal.pause()
    while True:
        signal.pause()
"""
MET = r"MET rank=(\d) pid=(\d+)"
LEASE = 600


@pytest.fixture
def job(launch, worker_script, etcd):
    """Start two agents with one worker each. Yield each agent and the pid of its worker, by the worker's
    rank.
    """
    script = worker_script(WORKER)
    command = (
        *rdzv("etcd", etcd.endpoint, etcd_prefix=etcd.prefix, protocol="http", lease_ttl=LEASE),
        *("--nnodes=2", "--nproc-per-node=1", "--on-failure=replace", "--max-restarts=1", script),
    )
    agents = [launch(*command), launch(*command)]
    met = [agent.wait_for_line(MET, "stdout") for agent in agents]
    procs.wait_until(lambda: etcd.are_linked("elasticrs/job", 2, is_held=True))
    yield {int(one[1]): (agent, int(one[2])) for agent, one in zip(agents, met, strict=True)}
    for agent in agents:
        if not agent.has_exited:
            agent.signal(signal.SIGTERM)
            agent.wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_worker_is_reported_by_its_own_agent(job, victim):
    os.kill(job[victim][1], signal.SIGKILL)
    line = job[1 - victim][0].wait_for_line(r"CHANGED planned=(\w+)", "stdout")
    assert line[1] == "False"


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_killed_agents_worker_is_reported_by_the_other_agent(job, victim):
    agent, other = job[victim][0], job[1 - victim][0]
    agent.signal(signal.SIGKILL)
    agent.wait()
    procs.reap_adopted(keep=[other.pid])
    assert other.wait_for_line(r"CHANGED planned=(\w+)", "stdout")[1] == "False"


def test_only_agents_and_no_workers_register_links(job, etcd):
    cards = [key for key, _ in etcd.keys().items() if key.startswith("~sessions/links/")]
    assert {key.rpartition("/")[0] for key in cards} == {"~sessions/links/elasticrs/job"}
    assert len(cards) == len(job)
