"""Jobs whose agents host the etcd cluster of their rendezvous, on nodes with separate network stacks."""

import pytest
from helpers.etcd import binary, healthy_members

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def hosting(hosts, multinode):
    """Start a job on four hosts, three of which host etcd members. Return the job, the hosts and
    the workers.
    """
    program = binary()
    if program is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    machines = hosts(4)
    names = ",".join(machine.name for machine in machines[:3])
    job = multinode(
        machines[0],
        "1:4",
        *("--rdzv-backend", "etcd", "--rdzv-endpoint", names),
        # The lease must outlast a leader election of etcd.
        conf={"host": 1, "lease_ttl": 8, "last_call_timeout": 60, "store_lost_timeout": 5},
        env={"TORCHELASTIC_ETCD_BINARY_PATH": program},
    )
    job.start(*machines)
    workers = job.formed(*job.agents)
    # Wait for all three members. Until then, losing one member could cost etcd its majority.
    everybody = [machine.name for machine in machines[:3]]
    job.until(lambda: True if healthy_members(*machines[:3]) == everybody else None, "three members")
    return job, machines, workers


def test_the_host_of_rank_0_can_be_lost_and_rejoin(hosting):
    job, machines, workers = hosting
    # If rank 0 runs on the node without an etcd member, power off the first node instead.
    by_name = {agent.host.name: agent for agent in job.agents[:3]}
    first = by_name.get(workers[0].host, job.agents[0])
    first.host.power_off()
    rest = [agent for agent in job.agents if agent is not first]
    workers = job.formed(*rest)
    assert {each.restart for each in workers} == {0}
    first.host.link_up()
    (back,) = job.start(first.host)
    agents = [*rest, back]
    workers = job.formed(*agents)
    job.line(back, "member of etcd .* its data")
    # Power off a second host. etcd keeps its majority only if the member that came back is working.
    lost = next(agent for agent in rest if agent.host is not machines[3])
    lost.host.power_off()
    agents.remove(lost)
    workers = job.formed(*agents)
    assert {each.restart for each in workers} == {0}
    job.finish(agents, workers)


def test_a_job_that_loses_the_etcd_majority_fails_with_that_reason(hosting):
    job, machines, _ = hosting
    left = [agent for agent in job.agents if agent.host not in machines[:2]]
    for machine in machines[:2]:
        machine.power_off()
    assert job.ended(*left) == [1, 1]
    for agent in left:
        job.line(agent, "2 of its 3")
    job.assert_empty(*(agent.host for agent in left))
