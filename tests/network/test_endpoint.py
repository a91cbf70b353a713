"""Access to the rendezvous endpoint by workers, by strangers, and by nodes that use another address."""

import sys

import pytest
from helpers.nodes import PORT, WORKERS

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(150)]

KNOCK = """
import os, socket, struct, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 30) as store:
    store.sendall(b"\\0\\xce\\xf7\\x85\\x3c\\r" + struct.pack("<I", os.getpid()))
    sys.stdout.write("served" if store.recv(4) else "refused")
"""
"""Program that connects to the endpoint as a worker, and prints whether it is served."""


def test_a_loopback_endpoint_on_the_host_and_its_address_elsewhere_is_the_same_endpoint(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "2")
    agents = job.start(first, endpoint=f"localhost:{PORT}") + job.start(second)
    workers = job.formed(*agents)
    # The second node can reach the workers' store too.
    assert first.address in second.run("getent", "ahosts", workers[0].master).stdout.split()
    job.finish(agents, workers)


def test_workers_of_several_nodes_meet_at_the_endpoint_and_strangers_do_not(hosts, multinode):
    first, second, third = hosts(3)
    job = multinode(first, "2", env={"ELASTICRS_TOKEN": "secret"})
    agents = job.start(first, second)
    workers = job.formed(*agents)
    knock = (sys.executable, "-c", KNOCK, first.address, str(PORT))
    for host, answer in ((first, "served"), (second, "served"), (third, "refused")):
        assert host.run(*knock).stdout == answer
    job.line(agents[0], "MASTER_ADDR")
    job.finish(agents, workers)


@pytest.mark.slow
def test_the_endpoint_leads_to_the_node_of_rank_0(hosts, multinode):
    first, second = hosts(2)
    # Ranks follow the natural order of host names, so the store is on the node of rank 1.
    env = {"ENDPOINT": f"{second.address} {PORT}"}
    job = multinode(second, "2", script=WORKERS / "at_endpoint.py", env=env)
    agents = job.start(first, second)
    codes = job.ended(*agents)
    assert not any(codes), job.story(f"exit codes {codes}")
    for agent in agents:
        assert "values=0,0" in agent.launched.stdout
