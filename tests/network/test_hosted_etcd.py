"""Nodes with networks of their own, whose agents host the etcd in which they meet."""

import pytest
from helpers.etcd import binary, hosted_voters

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(180)]


@pytest.fixture
def hosting(hosts, multinode):
    """A job on four hosts, three of which are endpoints, and its workers."""
    program = binary()
    if program is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    machines = hosts(4)
    names = ",".join(machine.name for machine in machines[:3])
    job = multinode(
        machines[0],
        "1:4",
        *("--rdzv-backend", "etcd", "--rdzv-endpoint", names),
        # A lease that outlasts an election.
        conf={"host": 1, "lease_ttl": 8, "last_call_timeout": 60, "store_lost_timeout": 60},
        env={"TORCHELASTIC_ETCD_BINARY_PATH": program},
    )
    job.start(*machines)
    workers = job.formed(*job.agents)
    # Before, the loss of one may be the loss of the majority.
    everybody = [f"http://{machine.name}:2380" for machine in machines[:3]]
    job.until(lambda: True if hosted_voters(machines[0]) == everybody else None, "three voters")
    return job, machines, workers


def test_the_machine_with_rank_0_is_lost_and_comes_back(hosting):
    job, machines, workers = hosting
    # Or, if the one that hosts nothing has it, any other.
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
    job.line(back, "the member of etcd at .* belongs to the cluster")
    # Its member counts: without it two of the three would be one.
    lost = next(agent for agent in rest if agent.host is not machines[3])
    lost.host.power_off()
    agents.remove(lost)
    workers = job.formed(*agents)
    assert {each.restart for each in workers} == {0}
    job.finish(agents, workers)
