"""``--on-failure replace`` on several nodes: one restart budget, one report, and the ranks that the workers
have.
"""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers import ports, procs
from helpers.coordination import store_command
from helpers.etcd import Etcd
from helpers.etcd_fixtures import site
from helpers.launcher import Launched, clean_environment

pytestmark = pytest.mark.beyond_torchrun

WORKER = """
    # Meets the others, as elasticrs.train does, when SIGUSR2 comes: its agent reads the same bytes.
    import os, signal
    from elasticrs._engine.workers.node_page import page_of
    began, page = int(os.environ["RANK"]), page_of(os.environ)
    def meet(*_):
        number = int(open("meeting").read())
        page.place(10 + began, 4, number)
        os.write(1, f"MET {number} rank={10 + began}\\n".encode())
    def end(*_):
        page.finish()
        os._exit(0)
    signal.signal(signal.SIGUSR1, end)
    signal.signal(signal.SIGUSR2, meet)
    group, life = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    port = os.environ["MASTER_PORT"]
    os.write(1, f"UP rank={began} pid={os.getpid()} group={group} life={life} port={port}\\n".encode())
    while True:
        signal.pause()
"""
UP = r"UP rank=(\d) pid=(\d+) group=(\d) life=(\d)"


class Nodes:
    """Agents with two workers each. The workers are identified by the ranks that they started with."""

    def __init__(self, start: Callable[..., Launched], folder: Path) -> None:
        self._start, self._folder = start, folder
        self.agents: list[Launched] = []
        self.pids: dict[int, int] = {}
        self._up: list[int] = []
        self._met: dict[int, int] = {}

    def start(self, *options: str) -> Launched:
        """Start one more agent, with additional options."""
        self.agents.append(self._start(*options))
        self._up.append(0)
        return self.agents[-1]

    def up(self, agent: Launched, count: int) -> list[int]:
        """Wait for ``count`` more workers of an agent. Return the restart count with which each of them
        started.
        """
        index = self.agents.index(agent)
        self._up[index] += count
        found = agent.wait_for_lines(UP, self._up[index], "stdout")[-count:]
        self.pids.update((int(each[1]), int(each[2])) for each in found)
        return [int(each[4]) for each in found]

    def agent_of(self, rank: int) -> Launched:
        line = rf"UP rank=\d pid={self.pids[rank]} "
        return next(each for each in self.agents if re.search(line, each.stdout))

    def kill(self, *ranks: int) -> list[int]:
        """Kill workers and wait for their replacements. Return the restart counts with which the replacements
        started.
        """
        agents = [self.agent_of(rank) for rank in ranks]
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)
        return [life for agent in agents for life in self.up(agent, 1)]

    def meet(self, number: int) -> None:
        (self._folder / "meeting").write_text(str(number))
        for rank, pid in self.pids.items():
            agent = self.agent_of(rank)
            os.kill(pid, signal.SIGUSR2)
            agent.wait_for_line(f"MET {number} rank={10 + rank}$", "stdout")

    def finish(self, *ranks: int) -> None:
        for rank in ranks or self.pids:
            os.kill(self.pids[rank], signal.SIGUSR1)


@pytest.fixture
def nodes(launch, worker_script, tmp_path, either_store):
    script = worker_script(WORKER)

    def make(*options: str, conf: Sequence[str] = (), store: str | None = None) -> Nodes:
        backend, endpoint, settings = "c10d", store or f"localhost:{ports.free()}", list(conf)
        if isinstance(either_store, Etcd):
            where = site(either_store)
            backend, endpoint = "etcd", where.endpoint
            settings += [f"etcd_prefix={where.prefix}", "protocol=http", "lease_ttl=2"]
        own = [f"--rdzv-conf={','.join(settings)}"] if settings else []
        common = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", *own)
        how = ("--nproc-per-node=2", "--on-failure=replace", *common, *options)
        return Nodes(lambda *others: launch(*how, *others, script), tmp_path)

    return make


@pytest.fixture
def store(tmp_path):
    """Yield the address of a separate store that saves its state, a function that kills it, and one that
    starts it again.
    """
    port, running = ports.free(), []

    def start() -> None:
        argv = store_command("--state", tmp_path / "state", port=port)
        running.append(Launched(argv, env=clean_environment(), cwd=tmp_path))
        procs.bystanders.add(running[0].pid)
        running[0].wait_for_line("serving at", "stdout")

    def kill() -> None:
        program = running.pop()
        program.signal(signal.SIGKILL)
        program.wait()
        procs.bystanders.discard(program.pid)
        program.close()

    start()
    yield f"localhost:{port}", kill, start
    if running:
        kill()


def two(nodes, *options, **how):
    """Start two nodes and wait for their workers."""
    found = nodes("--nnodes=2", *options, **how)
    for agent in (found.start(), found.start()):
        agent.wait_for_lines(UP, 2, "stdout")
    for agent in found.agents:
        assert found.up(agent, 2) == [0, 0]
    return found


def test_all_nodes_share_one_restart_budget_and_one_root_cause(nodes):
    job = two(nodes, "--max-restarts=2")
    job.meet(1)
    assert job.kill(0) == [1]
    job.meet(2)
    assert job.kill(3) == [2]
    job.meet(3)
    last = job.agent_of(1), job.pids[1]
    os.kill(job.pids[1], signal.SIGKILL)
    for agent in job.agents:
        agent.exits(1)
        assert "(max_restarts=2, 2 used)" in agent.stderr
        assert "2 of 2 restarts charged" in agent.stderr
        (cause,) = re.findall(r"Root Cause.*?^=", agent.stderr, re.DOTALL | re.MULTILINE)
        assert re.search(r"rank +: 11 \(local_rank: 1\)", cause)
        assert f"-9 (pid: {last[1]})" in cause
    own, other = job.agents if job.agents[0] is last[0] else job.agents[::-1]
    line = r"rank {} \(local_rank \d, pid \d+\) died by SIGKILL; .* \(restart {} of 2\)"
    assert re.search(line.format(10, 1), own.stderr)
    assert re.search(line.format(13, 2), other.stderr)
    elsewhere = r"rank {} \(pid \d+\) on node \S+ died by SIGKILL; the workers .* 2 nodes \(restart {} of 2\)"
    assert re.search(elsewhere.format(10, 1), other.stderr)
    assert re.search(elsewhere.format(13, 2), own.stderr)
    assert len(re.findall("replaced by", own.stderr + other.stderr)) == 2


def test_options_that_differ_between_nodes_are_named_in_the_error(nodes):
    job = nodes("--nnodes=1:2", "--max-restarts=1")
    first = job.start()
    job.up(first, 2)
    for other in ("--on-failure=restart", "--max-restarts=2", "--fatal-exit-codes=4"):
        late = job.start(other).exits(1)
        name, _, value = other.removeprefix("--").replace("-", "_").partition("=")
        assert re.search(rf"{name}={value}.*\bnode \S+ .*{name}=", late.stderr)
    job.finish()
    first.exits(0)


def test_workers_failing_before_the_next_rendezvous_cost_one_restart(nodes):
    job = two(nodes, "--max-restarts=2")
    job.meet(1)
    assert job.kill(0) == [1]
    # Rank 2 runs on the other node, and has not yet met the replacement of rank 0.
    assert job.kill(2) == [1]
    job.meet(2)
    assert job.kill(1, 3) == [2, 2]
    job.meet(3)
    job.finish()
    for agent in job.agents:
        agent.exits(0)
        assert "2 restarts" in agent.stderr


def test_a_joining_or_leaving_node_stops_no_worker_and_uses_no_restart(nodes):
    job = nodes("--nnodes=1:2", "--max-restarts=1")
    first = job.start()
    job.up(first, 2)
    before = dict(job.pids)
    second = job.start()
    second.wait_for_lines(UP, 2, "stdout")
    second.signal(signal.SIGKILL)
    second.wait()
    procs.reap_adopted(keep=[each.pid for each in job.agents])
    first.wait_for_line(r"was lost; .*1 node \(no restart charged, 0 of 1 used\)")
    third = job.start()
    third.wait_for_lines(UP, 2, "stdout")
    third.signal(signal.SIGTERM)
    third.exits(1)
    first.wait_for_line(r"left \(SIGTERM\); .*1 node")
    assert job.pids == before
    assert job.kill(0) == [1]
    job.finish()
    first.exits(0)


def test_a_node_with_a_paused_agent_loses_its_workers_and_rejoins(nodes, either_store):
    conf = () if either_store is not None else ("keep_alive_interval=0.4",)
    job = nodes("--nnodes=1:2", "--max-restarts=0", conf=conf)
    first = job.start()
    job.up(first, 2)
    second = job.start()
    job.up(second, 2)
    fds = [os.pidfd_open(job.pids[rank]) for rank in (2, 3)]
    try:
        second.signal(signal.SIGSTOP)
        for fd in fds:
            assert procs.wait_readable(fd, procs.HANG)
    finally:
        second.signal(signal.SIGCONT)
        for fd in fds:
            os.close(fd)
    assert job.up(second, 2) == [0, 0]
    job.finish()
    first.exits(0)
    second.exits(0)


def test_a_node_that_joins_a_failed_job_gets_the_reason(nodes, store):
    job = two(nodes, "--max-restarts=0", store=store[0])
    os.kill(job.pids[3], signal.SIGKILL)
    for agent in job.agents:
        agent.exits(1)
    late = job.start().exits(1)
    assert "(max_restarts=" in late.stderr
    assert "UP" not in late.stdout


@pytest.mark.parametrize("either_store", [None], ids=["own"])
def test_an_unreachable_store_delays_a_replacement(nodes, store):
    endpoint, kill, start = store
    job = two(nodes, "--max-restarts=1", store=endpoint, conf=["store_grace=60"])
    kill()
    os.kill(job.pids[0], signal.SIGKILL)
    job.agent_of(0).wait_for_line("does not answer|is away|lost|no connection")
    start()
    assert job.up(job.agent_of(0), 1) == [1]
    job.finish()
    for agent in job.agents:
        agent.exits(0)


@pytest.mark.parametrize("either_store", [None], ids=["own"])
def test_the_job_fails_if_the_node_that_hosts_the_store_is_lost(nodes):
    conf = ["keep_alive_interval=0.4", "store_lost_timeout=2"]
    job = nodes("--nnodes=1:2", "--max-restarts=1", conf=conf)
    host = job.start()
    job.up(host, 2)
    other = job.start()
    job.up(other, 2)
    host.signal(signal.SIGKILL)
    host.wait()
    procs.reap_adopted(keep=[other.pid])
    assert re.search(r"\blost\b.*\bstore\b", other.exits(1).stderr)


def test_a_replacement_gets_the_port_of_the_present_round(nodes):
    job = two(nodes, "--max-restarts=3")
    job.meet(1)
    job.kill(0)
    job.meet(2)
    job.kill(3)
    found = [re.findall(UP + r" port=(\d+)", agent.stdout) for agent in job.agents]
    lives = {life: {each[4] for each in (*found[0], *found[1]) if each[3] == life} for life in "012"}
    assert [len(each) for each in lives.values()] == [1, 1, 1]
    assert len(set.union(*lives.values())) == 3
    job.finish()
    for agent in job.agents:
        agent.exits(0)
