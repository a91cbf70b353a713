"""Nodes of a job meet, get their ranks and finish, on reliable and on faulty networks."""

import signal
import sys

import pytest
from helpers.nodes import PORT, WORKERS
from helpers.procs import wait_until
from helpers.relay import relay_on

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(150)]


def by_host(workers):
    """Ranks of each host."""
    found: dict[str, list[int]] = {}
    for worker in workers:
        found.setdefault(worker.host, []).append(worker.rank)
    return found


@pytest.mark.parametrize("is_ipv6_only", [False, True], ids=["IPv4", "IPv6"])
def test_two_nodes_form_a_job_and_finish(hosts, multinode, is_ipv6_only):
    first, second = hosts(2, is_ipv6_only=is_ipv6_only)
    job = multinode(first, "2", "--role", "trainer", nproc=2)
    agents = job.start(second, first)
    workers = job.formed(*agents)
    assert by_host(workers) == {"node1": [0, 1], "node2": [2, 3]}
    assert [each.local for each in workers] == [0, 1, 0, 1]
    assert {(each.run, each.restart, each.role_world) for each in workers} == {("job", 0, 4)}
    # Resolve the master address on the second node, because a name that only the first node knows would be
    # useless.
    names = second.run("getent", "ahosts", workers[0].master).stdout
    assert first.address in names.split()
    job.finish(agents, workers)


@pytest.mark.beyond_torchrun
def test_ranks_follow_the_natural_order_of_host_names(hosts, multinode):
    # As text, node10 and node11 come before node2.
    numbers = (1, 2, 10, 11)
    every = hosts(11)
    machines = [every[number - 1] for number in numbers]
    job = multinode(machines[0], "4")
    agents = job.start(*reversed(machines))
    workers = job.formed(*agents, timeout=60)
    assert [each.host for each in workers] == [f"node{number}" for number in numbers]
    job.finish(agents, workers, timeout=60)


def test_nodes_may_have_different_numbers_of_workers(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "2")
    agents = job.start(first, nproc=1) + job.start(second, nproc=3)
    workers = job.formed(*agents, world=4)
    assert by_host(workers) == {"node1": [0], "node2": [1, 2, 3]}
    job.finish(agents, workers)


def test_two_agents_on_one_host_join_the_same_job(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "3")
    agents = job.start(first, first, second)
    workers = job.formed(*agents)
    assert [each.host for each in workers] == ["node1", "node1", "node2"]
    job.finish(agents, workers)


def test_the_node_that_hosts_the_store_may_start_last(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "2")
    with relay_on(second, first, PORT) as relay:
        (early,) = job.start(second, endpoint=second.endpoint(relay.port), conf={"is_host": 0})
        wait_until(lambda: relay.counts()["connections"])
        (late,) = job.start(first)
        job.finish((early, late), job.formed(early, late))


@pytest.mark.slow
@pytest.mark.beyond_torchrun
def test_agents_wait_until_the_endpoint_name_can_be_resolved(network, multinode):
    net = network(2)
    job = multinode(net.hosts[0], "2")
    agents = job.start(*net.hosts, endpoint=f"late:{PORT}")
    for agent in agents:
        job.line(agent, "cannot resolve 'late'")
    net.name(late=net.hosts[0])
    workers = job.formed(*agents)
    # On the second node, the master address resolves to the host that the endpoint's name now points to.
    assert net.hosts[0].address in net.hosts[1].run("getent", "ahosts", workers[0].master).stdout.split()
    job.finish(agents, fail_once(job, agents, workers))


@pytest.mark.slow
@pytest.mark.beyond_torchrun
def test_agents_follow_a_changed_address_of_the_endpoint_name(network, multinode):
    net = network(3)
    net.name(moving=net.hosts[2])
    job = multinode(net.hosts[0], "2")
    agents = job.start(*net.hosts[:2], endpoint=f"moving:{PORT}")
    for agent in agents:
        job.line(agent, f"moving:{PORT} .*refused")
    net.name(moving=net.hosts[0])
    job.finish(agents, job.formed(*agents))


@pytest.mark.slow
@pytest.mark.beyond_torchrun
def test_an_agent_that_becomes_store_host_late_fails_if_it_cannot_listen(network, multinode):
    net = network(1)
    job = multinode(net.hosts[0], "2", conf={"bind_addr": "10.77.0.99"})
    (agent,) = job.start(*net.hosts, endpoint=f"late:{PORT}")
    job.line(agent, "cannot resolve 'late'")
    net.name(late=net.hosts[0])
    assert job.ended(agent) == [1]
    job.line(agent, f"cannot listen on 10.77.0.99:{PORT}: ")


def test_agents_need_to_reach_only_the_store(network, multinode):
    net = network(3)
    net.separate(*net.hosts[1:])
    job = multinode(net.hosts[0], "3")
    agents = job.start(*net.hosts)
    workers = fail_once(job, agents, job.formed(*agents))
    job.finish(agents, workers)


def fail_once(job, agents, workers):
    """Make one worker fail, and return the new workers of all nodes after exactly one restart."""
    job.tell(workers[-1:], signal.SIGUSR2)
    return job.formed(*agents, timeout=60, restarts=1)


@pytest.mark.beyond_torchrun
def test_a_job_runs_over_a_network_with_200_ms_delay(hosts, multinode, impair):
    first, second = hosts(2)
    job = multinode(first, "2")
    impair(second, seed=1, delay=0.2, jitter=0.02)
    agents = job.start(first, second)
    workers = fail_once(job, agents, job.formed(*agents))
    job.finish(agents, workers)


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 2))])
def test_a_job_runs_despite_lost_duplicated_and_reordered_packets(hosts, multinode, impair, seed):
    first, second, third = hosts(3)
    job = multinode(first, "3")
    relays = [
        impair(host, seed=seed, loss=0.05, duplicate=0.05, reorder=0.1, delay=0.005)
        for host in (second, third)
    ]
    agents = job.start(first, second, third)
    workers = fail_once(job, agents, job.formed(*agents, timeout=60))
    job.finish(agents, workers, timeout=60)
    assert all(relay.counts()["up"]["taken"] for relay in relays)


@pytest.mark.beyond_torchrun
def test_a_job_runs_over_a_slow_connection_to_the_store(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "2")
    with relay_on(second, first, PORT) as relay:
        relay.set(rate=20_000, delay_up=0.05, delay_down=0.05)
        endpoint = second.endpoint(relay.port)
        agents = job.start(first) + job.start(second, endpoint=endpoint, conf={"is_host": 0})
        workers = fail_once(job, agents, job.formed(*agents, timeout=60))
        job.finish(agents, workers, timeout=60)
        assert relay.counts()["up"] > 0


@pytest.mark.beyond_torchrun
def test_a_node_that_stops_slowly_takes_part_in_the_restart(hosts, multinode):
    first, second = hosts(2)
    job = multinode(first, "2", "--shutdown-timeout", "2")
    agents = job.start(first) + job.start(second, env={"STUBBORN": "1"})
    workers = job.formed(*agents)
    job.tell(workers[:1], signal.SIGUSR2)
    again = job.formed(*agents, restarts=1)
    assert "IGNORED 15" in agents[1].launched.stdout
    job.finish(agents, again)


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
def test_a_new_host_can_replace_a_lost_host_with_its_rank(network, multinode):
    net = network(3)
    first, second, third = net.hosts
    job = multinode(first, "3", conf=QUICK)
    agents = [start(job, host, rank) for host, rank in ((first, 0), (second, 1), (third, 2))]
    job.formed(*agents)
    agents[1].signal(signal.SIGKILL)
    job.assert_empty(second)
    agents[1] = start(job, net.add_host(), 1)
    workers = job.formed(*agents, restarts=0, timeout=60)
    assert hosts_by_rank(workers) == ["node1", "node4", "node3"]
    job.finish(agents, workers)


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
