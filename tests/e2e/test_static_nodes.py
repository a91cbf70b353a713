"""Several nodes on loopback with the static rendezvous. The user sets the ranks, the address and the port."""

import errno
import json
import os
import re
import signal
import socket
from contextlib import contextmanager

import pytest
from helpers import ports
from helpers.nodes import RANKS, WORKERS, Worker
from helpers.procs import reap_adopted

pytestmark = pytest.mark.timeout(180)

QUICK = {"keep_alive_interval": 0.4, "keep_alive_max_attempt": 5, "connect_timeout": 1}


STORE = """
    import os, signal
    if os.environ["RANK"] == "0":
        from torch.distributed import TCPStore
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = TCPStore(*address, is_master=True, wait_for_workers=False)
    elif "WAITS" in os.environ:
        from torch.distributed import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        os.write(1, b"READY %d\\n" % os.getpid())
        store.wait(["a key that no rank sets"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.write(1, b"READY %d\\n" % os.getpid())
    signal.sigwait({signal.SIGUSR1})
    os._exit(0)
"""


class Nodes:
    """The agents of one job. All agents run on this machine."""

    def __init__(self, launch, nnodes, script=RANKS, *, host="127.0.0.1", restarts=3, conf=None, env=None):
        self._launch, self._script, self._env = launch, script, env
        self.port = ports.free()
        self._options = ["--nnodes", str(nnodes), "--master-addr", host, "--master-port", str(self.port)]
        self._options += ["--max-restarts", str(restarts)]
        self._conf = conf
        self.agents = []

    def start(self, rank, *options, conf=None):
        given = {**(self._conf or {}), **(conf or {})}
        all_conf = (
            ["--rdzv-conf", ",".join(f"{name}={each}" for name, each in given.items())] if given else []
        )
        argv = [*self._options, *all_conf, "--node-rank", str(rank), *options, self._script]
        self.agents.append(self._launch(*argv, env=self._env))
        return self.agents[-1]

    def codes(self):
        return [agent.wait() for agent in self.agents]


@contextmanager
def listening(port):
    """Occupy a port, as another program would."""
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server


def ready(agent, count=1):
    """Wait until ``count`` workers of an agent are ready, and return the report of the latest one."""
    return Worker.parse(agent.wait_for_lines(r"^READY (.*)$", count)[-1][1])


def finish(*agents):
    """Let the running workers succeed, and wait for their agents."""
    for agent in agents:
        told = [Worker.parse(line.partition(" ")[2]) for line in agent.stdout.splitlines() if "READY" in line]
        os.kill(told[-1].pid, signal.SIGUSR1)
    assert [agent.wait() for agent in agents] == [0] * len(agents)


def line_of(agent, *texts):
    """Assert that an agent failed with a line that contains all of these texts, and return the line."""
    assert agent.wait() != 0
    found = [line for line in agent.stderr.splitlines() if all(text in line for text in texts)]
    assert found, f"no line has {texts}:\n{agent.stderr}"
    assert "Traceback" not in agent.stderr
    return found[0]


# --- as in torch ---


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nodes_get_their_given_ranks_in_any_start_order(launch, order):
    nodes = Nodes(launch, 3)
    agents = {rank: nodes.start(rank, "--nproc-per-node=2", "--role=r") for rank in order}
    for rank in range(3):
        told = [Worker.parse(match[1]) for match in agents[rank].wait_for_lines(r"^READY (.*)$", 2)]
        for local, each in enumerate(sorted(told, key=lambda worker: worker.local)):
            assert (each.local, each.rank, each.world) == (local, 2 * rank + local, 6)
            assert (each.group, each.groups) == (rank, 3)
            assert (each.role_rank, each.role_world) == (2 * rank + local, 6)
            assert (each.master, each.port, each.restart) == ("127.0.0.1", str(nodes.port), 0)
            os.kill(each.pid, signal.SIGUSR1)
    assert nodes.codes() == [0, 0, 0]


def test_each_node_uses_the_address_that_it_was_given(launch):
    nodes = Nodes(launch, 3)
    given = ["0.0.0.0", "127.0.0.1", "localhost"]
    for rank, host in enumerate(given):
        nodes.start(rank, f"--master-addr={host}")
    found = [ready(agent) for agent in nodes.agents]
    assert [each.master for each in found] == given
    for each in found:
        os.kill(each.pid, signal.SIGUSR1)
    assert nodes.codes() == [0, 0, 0]


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_master_address_works_with_and_without_brackets(launch, host):
    nodes = Nodes(launch, 2, host=host)
    agents = [nodes.start(rank) for rank in (1, 0)]
    for agent in agents:
        told = ready(agent)
        assert (told.master, told.port) == ("::1", str(nodes.port))
        os.kill(told.pid, signal.SIGUSR1)
    assert nodes.codes() == [0, 0]


def test_rdzv_endpoint_can_replace_master_addr_and_master_port(launch):
    port = ports.free()
    argv = ("--nnodes=2", "--rdzv-backend=static", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job")
    agents = [launch(*argv, f"--node-rank={rank}", RANKS) for rank in (0, 1)]
    for agent in agents:
        told = ready(agent)
        assert (told.master, told.port, told.run) == ("localhost", str(port), "job")
        os.kill(told.pid, signal.SIGUSR1)
    assert [agent.wait() for agent in agents] == [0, 0]


def test_a_process_group_forms_over_the_given_address(launch_with_torch):
    nodes = Nodes(launch_with_torch, 2, WORKERS / "all_reduce.py")
    for rank in (1, 0):
        nodes.start(rank)
    assert nodes.codes() == [0, 0]
    assert ["SUM 3" in agent.stdout for agent in nodes.agents] == [True] * 2


# --- differences from torch ---


@pytest.mark.beyond_torchrun
def test_rank_0_hosts_the_store_of_the_workers(launch, worker_script):
    script = worker_script("""
        import json, os
        names = ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        print(json.dumps([os.environ[name] for name in names]))
    """)
    nodes = Nodes(launch, 2, script)
    agents = [nodes.start(rank) for rank in (0, 1)]
    assert nodes.codes() == [0, 0]
    for rank, agent in enumerate(agents):
        assert json.loads(agent.stdout) == ["False", "127.0.0.1", str(nodes.port), str(rank)]


@pytest.mark.beyond_torchrun
def test_a_process_group_forms_again_in_three_restarts(launch_with_torch):
    nodes = Nodes(launch_with_torch, 2, WORKERS / "all_reduce.py", restarts=3, env={"FAILURES": "3"})
    agents = [nodes.start(rank) for rank in (1, 0)]
    assert [agent.wait(120) for agent in agents] == [0, 0], agents[1].stderr
    assert [agent.stdout.count("SUM 3 ") for agent in agents] == [4, 4]


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("lost", [1, 2])
def test_a_killed_agent_can_rejoin_with_its_rank(launch, lost):
    nodes = Nodes(launch, 3, conf=QUICK)
    agents = {rank: nodes.start(rank) for rank in range(3)}
    for agent in agents.values():
        ready(agent)
    agents[lost].signal(signal.SIGKILL)
    agents[lost].wait()
    # Restart the agent at once: the other agents have not stopped yet, and the workers of rank 0 still hold
    # the port.
    agents[lost] = nodes.start(lost)
    for rank, agent in agents.items():
        told = ready(agent, 1 if rank == lost else 2)
        assert (told.rank, told.round, told.restart, told.port) == (rank, "2", 0, str(nodes.port))
    finish(*agents.values())
    reap_adopted()


@pytest.mark.beyond_torchrun
def test_the_job_fails_if_the_agent_of_rank_0_is_killed(launch):
    nodes = Nodes(launch, 2, conf={**QUICK, "settle": 4, "store_lost_timeout": 1})
    first, second = nodes.start(0), nodes.start(1)
    ready(first)
    ready(second)
    first.signal(signal.SIGKILL)
    line_of(second, "lost", f"store 127.0.0.1:{nodes.port}", "round 1")
    first.wait()
    reap_adopted()


@pytest.mark.beyond_torchrun
def test_the_report_blames_the_lost_store_not_a_rank_that_lost_its_peer(
    launch_with_torch, worker_script, tmp_path
):
    conf = {**QUICK, "settle": 4, "store_lost_timeout": 1}
    script = worker_script(STORE)
    nodes = Nodes(launch_with_torch, 2, script, restarts=0, conf=conf, env={"WAITS": "1"})
    first, second = nodes.start(0), nodes.start(1, "--report", str(tmp_path / "report.json"))
    first.wait_for_lines(r"^READY (.*)$", 1)
    second.wait_for_lines(r"^READY (.*)$", 1)
    first.signal(signal.SIGKILL)
    assert second.wait() == 1
    report = json.loads((tmp_path / "report.json").read_text())
    (failure,) = report["failures"]
    assert (failure["rank"], failure["exception"]) == (1, "torch.distributed.DistNetworkError")
    assert report["root_cause"] is None
    assert report["headline"] == report["reason"]
    assert f"store 127.0.0.1:{nodes.port}" in report["reason"]
    _, _, shown = second.stderr.partition("Root Cause")
    root, _, others = shown.partition("Failures:")
    assert report["reason"] in root
    assert "rank 1" not in root
    assert "[0]: rank 1, " in others
    first.wait()
    reap_adopted()


# --- mistakes ---


@pytest.mark.beyond_torchrun
def test_one_of_two_nodes_with_the_same_rank_is_refused(launch):
    nodes = Nodes(launch, 3, conf=QUICK)
    first, second = nodes.start(0), nodes.start(1)
    again = nodes.start(1)
    # Either of the two agents may have joined first.
    agents = [second, again]
    while not any(agent.has_exited for agent in agents):
        for agent in agents:
            agent.read_for(0.05)
    refused = next(agent for agent in agents if agent.has_exited)
    agents.remove(refused)
    name = os.uname().nodename
    line_of(refused, "node rank 1", f"{name} (", f" and {name} (", "0 to 2")
    third = nodes.start(2)
    for agent in (first, *agents, third):
        ready(agent)
    finish(first, *agents, third)


@pytest.mark.beyond_torchrun
def test_a_surplus_node_is_refused_with_the_reason(launch_with_torch, worker_script):
    nodes = Nodes(launch_with_torch, 2, worker_script(STORE), conf=QUICK)
    agents = [nodes.start(rank) for rank in (0, 1)]
    pids = [int(agent.wait_for_line(r"^READY (\d+)$")[1]) for agent in agents]
    late = nodes.start(1, conf={"join_timeout": 2})
    line_of(late, "could not join", "another program", "round of this job")
    assert late.stderr.count("trying again") == 1
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert [agent.wait() for agent in agents] == [0, 0]


@pytest.mark.beyond_torchrun
def test_a_master_address_without_a_listener_is_named_in_the_error(launch):
    nodes = Nodes(launch, 2, conf={"join_timeout": 1})
    found = line_of(nodes.start(1), f"127.0.0.1:{nodes.port} ", " 1 s", "refused")
    assert re.search("--master-addr.*--master-port", found), "options that were given, not those of c10d"


@pytest.mark.beyond_torchrun
def test_rank_0_reports_a_master_address_that_is_not_its_own(launch):
    nodes = Nodes(launch, 2, host="192.0.2.1", conf={"join_timeout": 1})
    line_of(nodes.start(0), "1 of at least 2", " 1 s", "node rank 1")
    assert "192.0.2.1" in nodes.agents[0].stderr


@pytest.mark.beyond_torchrun
def test_missing_node_ranks_are_named_in_the_error(launch):
    nodes = Nodes(launch, 4, conf={"join_timeout": 5})
    agents = [nodes.start(rank) for rank in (0, 2)]
    for agent in agents:
        line_of(agent, "node rank 0 is ", "node rank 2 is ", "node rank 1, 3")


@pytest.mark.beyond_torchrun
def test_a_taken_master_port_is_named_in_the_error(launch):
    nodes = Nodes(launch, 2)
    with listening(nodes.port):
        line_of(nodes.start(0), f"port {nodes.port}: ", os.strerror(errno.EADDRINUSE), "--master-port")


@pytest.mark.beyond_torchrun
def test_a_node_rank_beyond_the_last_is_a_usage_error(launch):
    agent = Nodes(launch, 2).start(2)
    line_of(agent, "--node-rank: got 2")
    assert agent.wait() == 2
