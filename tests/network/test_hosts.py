"""The simulated hosts of the other tests behave as documented and leave nothing behind."""

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from helpers import procs
from helpers.hosts import Network, network_of
from helpers.leaks import snapshot
from helpers.procs import run_program
from helpers.talk import connecting, serving

pytestmark = pytest.mark.privileged


@pytest.mark.parametrize("is_ipv6_only", [False, True], ids=["IPv4", "IPv6"])
def test_hosts_reach_each_other_by_address_and_name(hosts, is_ipv6_only):
    first, second, third = hosts(3, is_ipv6_only=is_ipv6_only)
    assert first.can_reach(second)
    assert third.can_reach(first)
    assert second.run("hostname").stdout == "node2\n"
    names = "import socket; print(socket.getfqdn(), socket.getaddrinfo('node3', 1)[0][4][0])"
    assert first.run(sys.executable, "-c", names).stdout.split() == ["node1", third.address]
    if is_ipv6_only:
        assert "inet 10." not in first.run("ip", "address", "show").stdout


def test_a_simulated_host_is_isolated_from_the_machine(hosts):
    machine = socket.gethostname()
    (host,) = hosts(1)
    links = [
        line.split(": ")[1].partition("@")[0] for line in host.run("ip", "-o", "link").stdout.splitlines()
    ]
    assert links == ["lo", "eth0"]
    assert socket.gethostname() == machine
    asked = host.run(sys.executable, "-c", "import socket; socket.gethostbyname('nowhere.test')", check=False)
    assert "gaierror" in asked.stderr


def test_a_pulled_cable_delays_data_without_closing_connections(hosts):
    first, second = hosts(2)
    with serving(first) as server, connecting(second, first.address, peer=server) as client:
        second.link_down()
        assert client.tell("send hello") == "SENT"
        assert client.tell("close") == "CLOSED"
        # Neither the data nor the FIN has arrived, so the sender's socket stays in FIN-WAIT-1.
        assert server.tell("peek 0.3") == "NOTHING"
        assert "FIN-WAIT-1" in second.run("ss", "-tn").stdout
        assert "ESTAB" in first.run("ss", "-tn").stdout
        assert not first.can_reach(second, seconds=0.2)

        second.link_up()
        assert server.tell("receive") == "RECEIVED b'hello'"
        assert server.tell("receive") == "RECEIVED b''"
        assert first.can_reach(second)


def test_a_killed_program_closes_its_connections_but_a_dead_host_does_not(hosts):
    first, second, third = hosts(3)
    with serving(first) as server, connecting(second, first.address, peer=server) as client:
        second.kill(client.pid)
        assert server.tell("receive") == "RECEIVED b''"
    with serving(first) as server, connecting(third, first.address, peer=server) as client:
        third.power_off()
        assert client.launched.wait() == -signal.SIGKILL
        assert server.tell("peek 0.3") == "NOTHING"


def test_two_hosts_can_be_separated_without_affecting_a_third(network):
    net = network(3)
    first, second, third = net.hosts
    net.separate(second, third)
    assert not second.can_reach(third, seconds=0.2)
    assert first.can_reach(second)
    assert third.can_reach(first)
    net.reunite(second, third)
    assert third.can_reach(second)


def test_two_networks_with_the_same_addresses_are_isolated(network):
    one, other = network(2), network(2)
    with serving(one.hosts[0]) as server:
        refused = other.hosts[1].run(
            sys.executable, "-c", "import socket; socket.create_connection(('10.77.0.1', 7000))", check=False
        )
        assert "ConnectionRefusedError" in refused.stderr
        with connecting(one.hosts[1], "10.77.0.1", peer=server):
            assert server.tell("send hello") == "SENT"


# --- what stays ---


def links_of_the_machine():
    return run_program(["ip", "-o", "link"], check=True).stdout


def mounts_and_names():
    return Path("/proc/self/mounts").read_text(encoding="utf-8"), socket.gethostname()


def test_a_closed_network_leaves_nothing_behind(tmp_path):
    before = snapshot(), links_of_the_machine(), mounts_and_names()
    network = Network(tmp_path, 3)
    network.hosts[0].link_down()
    namespaces = {network_of(host.pid) for host in network.hosts}
    assert len(namespaces) == 3
    assert network.close() == []
    assert (snapshot(), links_of_the_machine(), mounts_and_names()) == before
    # Check only our own processes, because the kernel may have reused the numbers for namespaces of other
    # tests.
    assert not namespaces & {network_of(each.pid) for each in procs.descendants(os.getpid())}


def test_leftover_processes_on_a_host_are_named_and_killed(tmp_path):
    network = Network(tmp_path, 1)
    (host,) = network.hosts
    with subprocess.Popen([*host.prefix(), "sleep", "1000"]) as left:
        # The command is nsenter until it executes sleep.
        procs.wait_until(lambda: [each.command for each in host.processes()] == ["sleep 1000"])
        assert network.close() == [f"{left.pid} (S) sleep 1000 on node1 (10.77.0.1)"]
        assert left.wait(procs.HANG) == -signal.SIGKILL


OWNER = """
import subprocess, sys
from pathlib import Path
from helpers import procs
from helpers.hosts import Network, network_of
network = Network(Path(sys.argv[1]), 2)
started = subprocess.Popen([*network.hosts[0].prefix(), "sleep", "1000"])
procs.wait_until(lambda: [each.command for each in network.hosts[0].processes()] == ["sleep 1000"])
print(started.pid, network.switch.pid, *(host.pid for host in network.hosts), flush=True)
sys.stdin.read()
"""


def test_no_process_of_a_network_outlives_a_killed_test_run(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    with closing(owner.stdin), closing(owner.stdout):
        assert select.select([owner.stdout], [], [], procs.HANG)[0]
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 4
        owner.kill()
        owner.wait(procs.HANG)
    # This process has adopted all of the processes, and they exit on their own.
    assert sorted(each.pid for each in procs.reap_adopted()) == sorted(pids)
