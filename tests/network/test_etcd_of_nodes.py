"""Jobs whose rendezvous is an etcd cluster with a member on each of three nodes, as described in
contrib/etcd.
"""

import os
import signal
from pathlib import Path

import pytest
from helpers.etcd import binary
from helpers.procs import reap_adopted

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.slow, pytest.mark.timeout(180)]

MEMBER = Path(__file__).resolve().parents[2] / "contrib/etcd/member.sh"


@pytest.fixture
def members(launch, tmp_path):
    """Yield a function that starts an etcd member on each of the given hosts, and returns the members by host
    name.
    """
    if (program := binary()) is None:
        pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
    started = {}

    def start(*machines):
        names = [machine.name for machine in machines]
        for machine in machines:
            command = ["sh", MEMBER, str(tmp_path / machine.name), *names]
            env = {"PATH": f"{Path(program).parent}:{os.environ['PATH']}"}
            started[machine.name] = launch(argv=[*machine.prefix(tmp_path), *command], env=env)
        return started

    yield start
    for member in started.values():
        member.signal(signal.SIGTERM)
        member.wait()


def test_a_job_outlives_the_node_of_a_member(hosts, multinode, members):
    machines = hosts(4)
    started = members(*machines[:3])
    job = multinode(
        machines[0],
        "1:4",
        *("--rdzv-backend", "etcd", "--rdzv-endpoint", ",".join(machine.name for machine in machines[:3])),
        # The lease must outlast a leader election of etcd.
        conf={"lease_ttl": 8, "last_call_timeout": 60},
    )
    agents = job.start(*machines)
    workers = job.formed(*agents)
    by_name = {agent.host.name: agent for agent in agents[:3]}
    # Power off the node of rank 0. If this node has no etcd member, power off the first node instead.
    first = by_name.get(workers[0].host, agents[0])
    started.pop(first.host.name).signal(signal.SIGKILL)
    first.host.power_off()
    rest = [agent for agent in agents if agent is not first]
    workers = job.formed(*rest)
    assert {each.restart for each in workers} == {0}
    job.tell(workers, signal.SIGUSR1)
    assert job.ended(*rest) == [0, 0, 0]
    # Reap the processes of the lost node.
    reap_adopted(keep=[member.pid for member in started.values()])
